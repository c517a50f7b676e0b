"""Cost of encoders in closed form: matrix-product FLOPs, a multiply-add counted as 2, and bytes.

    encoder:  Σ_ℓ layer(T_ℓ, keys_ℓ)  +  the maps between lengths
    seq2seq:  encoder(S)  +  decoder(t, memory)  +  head,   memory S, or K where the output stays short

The cost of one layer is the config's (`layer_flops`); the cost of all layers under a method is the method's
(`Encoder.flops`).
"""

from __future__ import annotations

from typing import Any

import torch

from fathom.models.registry import ENCODER, build_options, lookup


def encoder_flops(config: Any, length: int) -> float:
    """FLOPs of the encoder's layers on one source of `length` tokens (texts of a classifier: with its CLS token)."""
    if length < 1:
        raise ValueError(f"length={length!r}: must be at least 1")
    method: Any = lookup(ENCODER, config.encoder["name"])
    return method.flops(config, build_options(ENCODER, config.encoder), length)


def memory_length(config: Any, length: int) -> int:
    """Positions that the decoder reads of a source of `length` tokens."""
    method: Any = lookup(ENCODER, config.encoder["name"])
    return method.memory(config, build_options(ENCODER, config.encoder), length)


def seq2seq_flops(config: Any, source: int, target: int, causal: bool = True) -> float:
    """FLOPs of one forward on a source and a target; `causal=False` counts all target tokens as keys, as FLOP
    counters do."""
    keys = (target + 1) / 2 if causal else target
    return encoder_flops(config, source) + config.decoder_flops(target, memory_length(config, source), keys)


def classifier_flops(config: Any, length: int) -> float:
    """FLOPs of one example of texts of `length` tokens each."""
    read = config.hidden_size * (1 if config.towers == 1 else 4)
    head = 2 * config.intermediate_size * (read + (config.num_labels or 2))
    return config.towers * encoder_flops(config, length + config.first) + head


def memory_bytes(config: Any, source: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the cross-attention cache of one source: keys and values of every decoder layer."""
    if config.host == "bart":
        layers, width = config.decoder_layers, config.d_model
    else:
        layers, width = config.num_decoder_layers, config.inner
    return 2 * layers * memory_length(config, source) * width * dtype.itemsize
