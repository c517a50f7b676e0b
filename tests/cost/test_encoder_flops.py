"""Closed forms of encoders against torch's FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fathom import (
    FathomBartConfig,
    FathomBartForConditionalGeneration,
    FathomEncoderConfig,
    FathomForSequenceClassification,
    FathomLongT5Config,
    FathomLongT5ForConditionalGeneration,
)
from fathom.cost.encoders import classifier_flops, encoder_flops, memory_bytes, seq2seq_flops
from tiny import SIZES

BART = {
    "vocab_size": 41, "d_model": 24, "encoder_layers": 4, "decoder_layers": 2, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_position_embeddings": 48,
}  # fmt: skip
LONGT5 = {
    "vocab_size": 41, "d_model": 24, "d_kv": 16, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 3,
    "local_radius": 7, "global_block_size": 4, "decoder_start_token_id": 0,
}  # fmt: skip


def counted(model, **inputs) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(**inputs)
    return counter.get_total_flops()


def ids(*shape):
    return torch.full(shape, 5)


@pytest.mark.parametrize(
    "encoder",
    ["full", "mean_pool", "strided", "truncation", {"name": "fourier", "ratio": 0.3, "filter_layers": [1, 3]},
     {"name": "fourier", "global_residual": False}],
    ids=str,
)  # fmt: skip
def test_bart(encoder):
    config = FathomBartConfig(**BART, encoder=encoder)
    config._attn_implementation = "eager"
    model = FathomBartForConditionalGeneration(config)
    assert counted(model, input_ids=ids(1, 21), labels=ids(1, 7)) == seq2seq_flops(config, 21, 7, causal=False)
    assert counted(model.get_encoder(), input_ids=ids(1, 21)) == encoder_flops(config, 21)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("kind", "encoder", "length"),
    [("local", "full", 29), ("transient-global", "full", 29),
     ("local", {"name": "fovea", "block_len": 4, "stop_level": 1}, 18),
     ("transient-global", {"name": "fovea", "block_len": 4}, 7)],
)  # fmt: skip
def test_longt5(kind, encoder, length, gated):
    act = "gated-gelu" if gated else "relu"
    config = FathomLongT5Config(**LONGT5, encoder_attention_type=kind, encoder=encoder, feed_forward_proj=act)
    model = FathomLongT5ForConditionalGeneration(config)
    assert counted(model, input_ids=ids(1, length), labels=ids(1, 7)) == seq2seq_flops(config, length, 7, causal=False)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("encoder", ["full", {"name": "fourier", "residual": "filtered", "ratio": 0.3}, "mean_pool"])
def test_classifiers(family, towers, pooling, encoder):
    config = FathomEncoderConfig(
        backbone=family, **{**SIZES, "num_key_value_heads": 2}, towers=towers, pooling=pooling, encoder=encoder,
        num_labels=3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    given = ids(1, 13) if towers == 1 else ids(1, 2, 13)
    assert counted(FathomForSequenceClassification(config), input_ids=given) == classifier_flops(config, 13)


def test_fovea_reads_the_sheets_share_of_all_keys():
    """Attention alone at 16,384 tokens: 1,426 keys a query, 8.7 % of full attention."""
    sizes = {"d_model": 768, "d_ff": 2048, "num_layers": 1, "num_heads": 12}
    attention = []
    for stop_level in (20, 1):
        config = FathomLongT5Config(**sizes, encoder={"name": "fovea", "stop_level": stop_level})
        attention.append(encoder_flops(config, 16384) - config.layer_flops(16384, 0))
    assert attention[0] == 4 * 16384 * 1426 * 768 and round(attention[0] / attention[1], 3) == 0.087


def test_cross_attention_keeps_less_where_the_output_is_short():
    whole = memory_bytes(FathomBartConfig(**BART, encoder="fourier"), 40)
    assert whole == 2 * 2 * 40 * 24 * 2
    assert memory_bytes(FathomBartConfig(**BART, encoder="truncation"), 40) * 2 == whole
