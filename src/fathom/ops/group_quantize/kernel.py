"""`quantize`, which also packs, and `dequantize_block`, in one launch each: Triton kernels.

To quantise, a program takes ROWS groups. The divisions are exact to the last bit, as on a CPU; on a GPU PyTorch
multiplies by 1 / (2^b − 1), which can round a scale the other way. To rebuild, it takes TILE numbers and writes them
where a block [tokens, channels] has them; the product with the scale is rounded, then the sum, as in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from fathom.ops.group_quantize.plain import Quantized
from fathom.ops.kernels import FLOATS, wants_gradient

ROWS = 16  # groups of a program that quantises
TILE = 4096  # numbers of a program that rebuilds


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


def quantizes(x: Tensor, bits: int) -> bool:
    """Whether its kernel takes these: numbers of 16 or 32 bits, no gradient wanted, groups of 2ⁿ numbers and whole
    bytes."""
    return not wants_gradient(x) and x.dtype in FLOATS and packs(bits, x.shape[-1])


def packs(bits: int, group: int) -> bool:
    """Whether a group is 2ⁿ numbers and whole bytes."""
    return bits in (2, 4, 8) and group & (group - 1) == 0 and group * bits >= 8


def quantize(x: Float[Tensor, "*rows group"], bits: int) -> Quantized:
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


@triton.jit
def unpack_codes(packed, BITS: tl.constexpr):
    """Bytes [M, N, bytes of a group] → codes [M, N, bytes, 8 / BITS] in fp32, lowest bits first."""
    shift = tl.arange(0, 8 // BITS) * BITS
    return ((packed.to(tl.int32)[:, :, :, None] >> shift[None, None, None, :]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _dequantize(packed, scale, minimum, output, rows, packed_batch, packed_head, batch, head,
                G: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
                FIRST_STRIDE: tl.constexpr, SECOND_STRIDE: tl.constexpr, PLACE_STRIDE: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Program: groups, head of a row. Group row = (first, second), number `place` of a group: strides in `output`."""
    PER_BYTE: tl.constexpr = 8 // BITS
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    byte, in_byte = tl.arange(0, BYTES), tl.arange(0, PER_BYTE)
    held = packed + pair // G * packed_batch + pair % G * packed_head
    of = pair // G * batch + pair % G * head + row
    code = unpack_codes(
        tl.load(held + row[:, None, None] * BYTES + byte[None, None, :], mask=exists[:, None, None], other=0), BITS
    )
    step = tl.load(scale + of, mask=exists, other=0.0)
    low = tl.load(minimum + of, mask=exists, other=0.0).to(tl.float32)
    product = (code * step.to(tl.float32)[:, None, None, None]).to(step.dtype).to(tl.float32)
    start = row // SECOND * FIRST_STRIDE + row % SECOND * SECOND_STRIDE
    place = byte[:, None] * PER_BYTE + in_byte[None, :]
    at = start[:, None, None, None] + (place * PLACE_STRIDE)[None, None, :, :]
    x = (product + low[:, None, None, None]).to(step.dtype)
    # a multiple of the group that the compiler knows, so that stores are wide
    tl.store(output + pair * rows * (BYTES * PER_BYTE) + at, x, mask=exists[:, None, None, None])


def dequantizes(scale: Tensor, minimum: Tensor, bits: int, group: int) -> bool:
    """Whether the kernel of `dequantize_block` takes these."""
    return not wants_gradient(scale, minimum) and scale.dtype in FLOATS and packs(bits, group)


def dequantize_block(
    packed: UInt8[Tensor, "B G first second bytes"],
    scale: Float[Tensor, "B G first second 1"],
    minimum: Float[Tensor, "B G first second 1"],
    bits: int,
    along_tokens: bool,
) -> Float[Tensor, "B G tokens channels"]:
    """A block in the dtype of `scale`. along_tokens: first counts groups and second channels; otherwise first counts
    tokens and second groups. The tensors may be runs along `first` of longer ones."""
    batch, groups, first, second, size = packed.shape
    group = size * 8 // bits
    tokens, channels = (first * group, second) if along_tokens else (first, second * group)
    strides = (group * channels, 1, channels) if along_tokens else (channels, group, 1)
    output = scale.new_empty(batch, groups, tokens, channels)
    rows = max(1, TILE // group)
    _dequantize[(triton.cdiv(first * second, rows), batch * groups)](
        packed,
        scale,
        minimum,
        output,
        first * second,
        packed.stride(0),
        packed.stride(1),
        scale.stride(0),
        scale.stride(1),
        G=groups,
        SECOND=second,
        BITS=bits,
        BYTES=size,
        FIRST_STRIDE=strides[0],
        SECOND_STRIDE=strides[1],
        PLACE_STRIDE=strides[2],
        ROWS=rows,
        enable_fp_fusion=False,  # a product rounded of its own, in fp32 too
    )
    return output
