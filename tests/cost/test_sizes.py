"""Parameters and KV bytes against the model on the meta device and a real cache."""

import pytest
import torch
from cost_cases import config_of, every_family, every_variant, steps_run, tiny_config
from transformers import DynamicCache

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import kv_bytes_per_token, parameter_counts

# Non-embedding parameters that EleutherAI publishes: (layers, width, heads, N).
PYTHIA = [
    (6, 512, 8, 18_915_328),
    (12, 768, 12, 85_056_000),
    (24, 1024, 16, 302_311_424),
    (16, 2048, 8, 805_736_448),
    (24, 2048, 16, 1_208_602_624),
    (32, 2560, 32, 2_517_652_480),
]


@every_family
@every_variant
def test_parameters_equal_the_models(family, sections):
    check_parameters(config_of(family, sections))


@every_family
def test_a_tied_head_counts_once(family):
    check_parameters(tiny_config(family, tie_word_embeddings=True))


def check_parameters(config):
    with torch.device("meta"):
        model = FathomForCausalLM(config)
    tables = {"model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight"}
    counts = parameter_counts(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.non_embedding == sum(p.numel() for name, p in model.named_parameters() if name not in tables)


@pytest.mark.parametrize("layers,width,heads,published", PYTHIA)
def test_non_embedding_parameters_are_those_pythia_publishes(layers, width, heads, published):
    config = FathomConfig(
        backbone="gpt_neox", vocab_size=50304, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads
    )
    assert parameter_counts(config).non_embedding == published


@every_family
@every_variant
def test_kv_bytes_equal_the_cache_after_a_forward(family, sections):
    check_kv_bytes(config_of(family, sections), torch.float32)


@every_family
def test_kv_bytes_in_half_the_bits(family):
    check_kv_bytes(tiny_config(family), torch.bfloat16)


def check_kv_bytes(config, dtype):
    model = FathomForCausalLM(config).to(dtype).eval()
    cache, ran = DynamicCache(), steps_run(model)
    with torch.no_grad():
        model(torch.randint(0, 97, (1, 5)), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    biases = [getattr(layer, "bias", None) for layer in cache.layers]
    held += sum(bias.nbytes for bias in biases if bias is not None)
    assert held == pytest.approx(5 * kv_bytes_per_token(config, dtype, ran()))


def test_kv_bytes_of_a_published_shape():
    """Llama 3 8B in bf16 keeps 128 KiB a token."""
    config = FathomConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    assert kv_bytes_per_token(config) == 128 * 1024


@every_family
def test_tiny_configs_separate_terms(family):
    """The shapes of this folder's tests: no two of d, H·D, f, V may coincide."""
    config = tiny_config(family)
    sizes = [config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size, 97]
    assert len(set(sizes)) == 4
