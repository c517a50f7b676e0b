"""Min/max quantisation of `group_quantize` in one launch: a Triton kernel that also packs.

    scale = (max − min) / (2^b − 1),   code = round((x − min) / scale)     (half to even; a group of equal numbers: 0)

A program takes ROWS groups. The divisions are exact to the last bit, as on a CPU; on a GPU PyTorch multiplies by
1 / (2^b − 1), which can round a scale the other way. Needs the package `triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fathom.ops.group_quantize.plain import Quantized
from fathom.ops.kernels import FLOATS, wants_gradient

ROWS = 16  # groups of a program


@triton.jit
def _quantize(x, packed, scale, minimum, rows, HIGHEST: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
              ROWS: tl.constexpr):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    ROUNDER: tl.constexpr = 12582912.0  # 1.5 · 2²³: fp32 numbers above it are whole
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    byte, place = tl.arange(0, BYTES), tl.arange(0, PER_BYTE)
    at = (row[:, None, None] * BYTES + byte[None, :, None]) * PER_BYTE + place[None, None, :]
    wide = tl.load(x + at, mask=exists[:, None, None], other=0.0).to(tl.float32)
    lowest, highest = tl.min(tl.min(wide, 2), 1), tl.max(tl.max(wide, 2), 1)
    highest += tl.sum(tl.sum(wide * 0.0, 2), 1)  # NaN where a number is not finite: min and max pass over NaN
    low = lowest.to(minimum.dtype.element_ty)
    step = tl.div_rn(highest - lowest, tl.full([ROWS], HIGHEST, tl.float32)).to(scale.dtype.element_ty)
    tl.store(minimum + row, low, mask=exists)
    tl.store(scale + row, step, mask=exists)
    divisor = tl.where(step.to(tl.float32) > 0, step.to(tl.float32), 1.0)
    from_low = wide - low.to(tl.float32)[:, None, None]
    code = tl.div_rn(from_low, tl.broadcast_to(divisor[:, None, None], from_low.shape))
    code = tl.minimum(tl.maximum((code + ROUNDER) - ROUNDER, 0.0), HIGHEST).to(tl.int32)
    total = tl.sum(code << (place * BITS)[None, None, :], 2)
    tl.store(packed + row[:, None] * BYTES + byte[None, :], total.to(tl.uint8), mask=exists[:, None])


def serves(x: Tensor, bits: int) -> bool:
    """Whether the kernel takes these: numbers of 16 or 32 bits, no gradient wanted, groups of 2ⁿ numbers and whole
    bytes."""
    return not wants_gradient(x) and x.dtype in FLOATS and packs(bits, x.shape[-1])


def packs(bits: int, group: int) -> bool:
    """Whether a group is 2ⁿ numbers and whole bytes."""
    return bits in (2, 4, 8) and group & (group - 1) == 0 and group * bits >= 8


def quantize_groups(x: Float[Tensor, "*rows group"], bits: int) -> Quantized:
    """Packed codes [*rows, group · bits / 8], scale and minimum [*rows, 1] in the dtype of x."""
    shape, size = x.shape[:-1], x.shape[-1] * bits // 8
    packed = torch.empty(*shape, size, dtype=torch.uint8, device=x.device)
    scale, minimum = (torch.empty(*shape, 1, dtype=x.dtype, device=x.device) for _ in range(2))
    rows = scale.numel()
    _quantize[(triton.cdiv(rows, ROWS),)](
        x.contiguous(),
        packed,
        scale,
        minimum,
        rows,
        HIGHEST=float(2**bits - 1),
        BITS=bits,
        BYTES=size,
        ROWS=ROWS,
    )
    return packed, scale, minimum
