"""`quantize` and `dequantize_block` in PyTorch; `dequantize` of groups one a row."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathom.ops.bitpack import pack, unpack

Quantized = tuple[Tensor, Tensor, Tensor]


def quantize(
    x: Float[Tensor, "*rows group"], bits: int
) -> tuple[UInt8[Tensor, "*rows bytes"], Float[Tensor, "*rows 1"], Float[Tensor, "*rows 1"]]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    lowest, highest = wide.aminmax(dim=-1, keepdim=True)
    minimum = lowest.to(x.dtype)
    scale = ((highest - lowest) / (2**bits - 1)).to(x.dtype)
    step = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((wide - minimum) / step).round().clamp(0, 2**bits - 1)
    return pack(codes.to(torch.int32), bits), scale, minimum


def dequantize(codes: UInt8[Tensor, "*rows bytes"], scale: Tensor, minimum: Tensor, bits: int, group: int) -> Tensor:
    """x̂ [*rows, group] in the dtype of `scale`."""
    return unpack(codes, bits, group).to(scale.dtype) * scale + minimum


def dequantize_block(coded: Quantized, bits: int, group: int, along_tokens: bool) -> Float[Tensor, "B G t D"]:
    groups = dequantize(*coded, bits, group)
    return groups.transpose(3, 4).flatten(2, 3) if along_tokens else groups.flatten(3)
