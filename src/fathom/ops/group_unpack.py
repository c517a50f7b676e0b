"""Numbers of packed min/max codes, `group_quantize.dequantize`, in one launch: a Triton kernel for KIVI's blocks.

    x̂ = code · scale + minimum          (the product is rounded to the type of `scale`, then the sum, as in PyTorch)

A program takes ROWS groups and writes their numbers where a block [tokens, channels] has them, for groups along
channels (values) and along tokens (keys). Needs the package `triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from fathom.ops.group_quantize.kernel import packs
from fathom.ops.kernels import FLOATS, wants_gradient

TILE = 4096  # numbers of a program


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


def serves(scale: Tensor, minimum: Tensor, bits: int, group: int) -> bool:
    """Whether the kernel takes these: numbers of 16 or 32 bits, no gradient wanted, groups of 2ⁿ numbers and whole
    bytes."""
    return not wants_gradient(scale, minimum) and scale.dtype in FLOATS and packs(bits, group)


def dequantize_groups(
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
