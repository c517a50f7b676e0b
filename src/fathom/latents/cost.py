"""Cost of a latent diffusion model: matrix-product FLOPs of its parts per token, a multiply-add counted as 2.

    denoiser   its blocks, all rows seen; W_in and W_out, 2·2kd;  "add": 2kd a layer       (N passes a sample)
    decoder    its blocks in causal order and the head;  cross-attention 2·(2·d·H·D + 2·d·G·D) and 4·L·H·D a layer;
               W of the memory, 2kd                                                        (once a token)

Both are for rows of `length` tokens. Work that depends on t alone is counted once a row.
"""

from __future__ import annotations

from typing import Any

from fathom.cost import forward_flops_per_token
from fathom.latents.configuration import FathomLatentConfig
from fathom.latents.denoiser import FREQUENCIES
from fathom.models.configuration import FathomConfig
from fathom.models.encoder_configs import FathomBartConfig, FathomLongT5Config


def encoder_flops(config: FathomLatentConfig, length: int) -> float:
    """FLOPs of one pass of the encoder, per token; 0 for embeddings. A stock encoder's: 24 d² and 4·L·d a layer."""
    encoder, options = config.encoder_config, config.options
    if options.source != "states":
        return 0.0
    if config.encoder["model_type"] == "fathom":
        terms = forward_flops_per_token(encoder, length)
        run = 1.0 if options.layer is None else options.layer / encoder.num_hidden_layers  # no layer behind it runs
        return run * (terms.linear + terms.attention)
    d = encoder.hidden_size
    inner = getattr(encoder, "intermediate_size", 4 * d)
    return encoder.num_hidden_layers * (2 * (4 * d * d + 2 * d * inner) + 4 * length * d)


def denoiser_flops(config: FathomLatentConfig, length: int, previous: bool = True) -> float:
    """FLOPs of one pass of the denoiser, per token; `previous`: with an estimate of the step before."""
    backbone, options, k = config.denoiser_config, config.options, config.latent_dim
    d, layers = backbone.hidden_size, backbone.num_hidden_layers
    terms = forward_flops_per_token(backbone, length)
    joined = 2 * k if options.self_conditioning == "concat" else k
    linear = 2 * (joined + k) * d
    if options.self_conditioning == "add" and previous:
        linear += 2 * k * layers * d
    parts = 6 if options.time == "adaln" else 1
    of_time = 2 * (2 * FREQUENCIES * d + d * d + d * layers * parts * d)
    return terms.linear + terms.attention + linear + of_time / length


def decoder_flops(config: FathomLatentConfig, length: int, memory: int | None = None) -> float:
    """FLOPs of the decoder, per token, with cross-attention over `memory` rows (None: as many as tokens)."""
    backbone, k = config.decoder_config, config.latent_dim
    rows = length if memory is None else memory
    if backbone.model_type != FathomConfig.model_type:
        kind: Any = FathomBartConfig if backbone.model_type == "bart" else FathomLongT5Config
        fields = {name: value for name, value in backbone.to_dict().items() if name != "model_type"}
        whole = kind(**fields).decoder_flops(length, rows, (length + 1) / 2)
        return (whole + 2 * k * backbone.d_model * rows) / length
    d, layers = backbone.hidden_size, backbone.num_hidden_layers
    wide, narrow = (n * backbone.head_dim for n in (backbone.num_attention_heads, backbone.num_key_value_heads))
    cross = 2 * 2 * d * wide + 4 * rows * wide  # of a token
    read = 2 * k * d + layers * 2 * 2 * d * narrow  # of a row of the memory
    if config.options.diagonal:
        read += 2 * k * d
    return forward_flops_per_token(backbone, length).matmul + layers * cross + read * rows / length


def cache_bytes(config: FathomLatentConfig, bytes_each: int) -> float:
    """Bytes that decoding keeps for a token: its keys and values, and those of its row of the memory."""
    backbone = config.decoder_config
    if backbone.model_type != FathomConfig.model_type:
        width = backbone.d_model if backbone.model_type == "bart" else backbone.num_heads * backbone.d_kv
        return 2 * 2 * config.num_hidden_layers * width * bytes_each
    return 2 * 2 * backbone.num_hidden_layers * backbone.num_key_value_heads * backbone.head_dim * bytes_each
