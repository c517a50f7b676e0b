"""`quantized_attention` in PyTorch, by blocks: the whole cache is never rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.cached_attention import blockwise_attention
from fathom.ops.filled_attention.plain import plain_filled_attention
from fathom.ops.group_quantize import Quantized, dequantize_block

TOKENS_AT_ONCE = 4096  # rebuilt at a time


def quantized_attention(
    query: Float[Tensor, "B H m Dk"],
    key_codes: Quantized,
    value_codes: Quantized | None,
    key: Float[Tensor, "B G nk_full Dk"],
    value: Float[Tensor, "B G nv_full Dv"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H m Dv"]:
    """The reference: codes are rebuilt a few tokens at a time, and softmax runs over the blocks."""
    blocks = partial(rebuilt_blocks, key_codes, value_codes, value, bits, group)
    newest = key, value[:, :, value.shape[2] - key.shape[2] :]
    return blockwise_attention(query, blocks, newest, scaling)


def ring_quantized_attention(
    query: Float[Tensor, "B H 1 Dk"],
    key_codes: Quantized,
    value_codes: Quantized,
    key: Float[Tensor, "B G r Dk"],
    value: Float[Tensor, "B G r1 Dv"],
    newest: Int[Tensor, " 1"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The reference: everything is rebuilt, and a mask shows what counts."""
    residual = key.shape[2]
    token = torch.arange(value_codes[0].shape[2], device=query.device)
    coded = (token < newest // residual * residual)[:, None], (token < newest - residual)[:, None]
    rebuilt = dequantize_block(key_codes, bits, group, True), dequantize_block(value_codes, bits, group, False)
    full = key[:, :, token % residual], value[:, :, token % (residual + 1)]
    keys, values = (torch.where(is_code, x, y) for is_code, x, y in zip(coded, rebuilt, full, strict=True))
    return plain_filled_attention(query, keys, values, (token <= newest).view(1, 1, 1, -1), scaling)


def rebuilt_blocks(
    key_codes: Quantized, value_codes: Quantized | None, value: Float[Tensor, "B G nv_full Dv"], bits: int, group: int
) -> Iterator[tuple[Float[Tensor, "B G t Dk"], Float[Tensor, "B G t Dv"]]]:
    """Keys and values of the tokens whose keys are codes, a few at a time. The values of some are in full."""
    tokens, coded = key_codes[0].shape[2] * group, 0 if value_codes is None else value_codes[0].shape[2]
    step = max(1, TOKENS_AT_ONCE // group) * group
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        keys = dequantize_block(_part(key_codes, start // group, stop // group), bits, group, along_tokens=True)
        values = value[:, :, max(start - coded, 0) : max(stop - coded, 0)]
        if value_codes is not None and start < coded:
            part = _part(value_codes, start, min(stop, coded))
            rebuilt = dequantize_block(part, bits, group, along_tokens=False)
            values = torch.cat((rebuilt, values), dim=2) if values.shape[2] else rebuilt
        yield keys, values


def _part(coded: Quantized, start: int, stop: int) -> Quantized:
    codes, scale, minimum = (x[:, :, start:stop] for x in coded)
    return codes, scale, minimum
