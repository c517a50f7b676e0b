"""Asymmetric min/max quantisation in groups (KIVI, arXiv 2402.02750), packed into bytes.

    scale = (max − min) / (2^b − 1),   code = round((x − min) / scale),   x̂ = code · scale + min

Half rounds to even; a group of equal numbers has scale 0 and codes 0.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathom.ops.group_quantize import plain
from fathom.ops.group_quantize.plain import Quantized, dequantize
from fathom.ops.kernels import has_kernel

__all__ = ["Quantized", "dequantize", "dequantize_block", "quantize"]


def quantize(x: Float[Tensor, "*rows group"], bits: int) -> Quantized:
    """Packed codes [*rows, bytes], scale and minimum [*rows, 1] in the dtype of x; one group a row, the last axis."""
    if has_kernel(x.device.type):
        from fathom.ops.group_quantize import kernel

        if kernel.quantizes(x, bits):
            return kernel.quantize(x, bits)
    return plain.quantize(x, bits)


def dequantize_block(coded: Quantized, bits: int, group: int, along_tokens: bool) -> Float[Tensor, "B G t D"]:
    """x̂ of a block, in the dtype of its scales.

    coded: codes [B,G,·,·,bytes], scale and minimum [B,G,·,·,1] of groups along tokens [B,G,t/group,D] or along channels
        [B,G,t,D/group].
    """
    codes, scale, minimum = coded
    if has_kernel(codes.device.type):
        from fathom.ops.group_quantize import kernel

        if kernel.dequantizes(scale, minimum, bits, group):
            return kernel.dequantize_block(codes, scale, minimum, bits, along_tokens)
    return plain.dequantize_block(coded, bits, group, along_tokens)
