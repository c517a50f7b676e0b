"""Asymmetric min/max quantisation in groups (KIVI, arXiv 2402.02750), packed into bytes.

scale = (max − min) / (2^b − 1),   code = round((x − min) / scale),   x̂ = code · scale + min
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathom.ops.bitpack import pack, unpack

Quantized = tuple[Tensor, Tensor, Tensor]


def quantize(
    x: Float[Tensor, "*rows group"], bits: int
) -> tuple[UInt8[Tensor, "*rows bytes"], Float[Tensor, "*rows 1"], Float[Tensor, "*rows 1"]]:
    """Quantise along the last axis, one group a row. Returns packed codes, scale and minimum in the dtype of x."""
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
