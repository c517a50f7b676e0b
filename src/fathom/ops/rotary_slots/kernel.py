"""`rotate_slots` in one launch: a Triton kernel. fp32 between loading and storing, one rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fathom.ops.kernels import FLOATS, wants_gradient

BLOCK = 16  # tokens of a program


@triton.jit(do_not_specialize=["start", "tokens"])
def _rotate(x, cos, sin, turned, start, tokens, heads, row_stride, head_stride, token_stride, WIDTH: tl.constexpr,
            HALF: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = (token < tokens)[:, None]
    lane = tl.arange(0, LANES)
    mask = exists & (lane < HALF)[None, :]
    first = x + (head // heads) * row_stride + (head % heads) * head_stride
    source = first + token.to(tl.int64)[:, None] * token_stride
    target = turned + (head * tokens + token)[:, None] * WIDTH
    angle = (start + token)[:, None] * (2 * HALF) + lane[None, :]
    low = tl.load(source + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    low_cos = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + HALF + angle, mask=mask, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + HALF + angle, mask=mask, other=0.0).to(tl.float32)
    kind = turned.dtype.element_ty
    tl.store(target + lane[None, :], (low * low_cos - high * low_sin).to(kind), mask=mask)
    tl.store(target + HALF + lane[None, :], (high * high_cos + low * high_sin).to(kind), mask=mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = exists & (rest < WIDTH)
        tl.store(target + rest, tl.load(source + rest, mask=mask, other=0.0), mask=mask)


def serves(x: Tensor, cos: Tensor) -> bool:
    """Whether the kernel takes these: one type of 16 or 32 bits, no gradient wanted, one table for all rows."""
    return (
        not wants_gradient(x) and x.dtype == cos.dtype and x.dtype in FLOATS and x.stride(-1) == 1 and cos.shape[0] == 1
    )


def rotate_slots(
    x: Float[Tensor, "B heads n D"], cos: Float[Tensor, "1 T R"], sin: Float[Tensor, "1 T R"], start: int
) -> Float[Tensor, "B heads n D"]:
    """x rotated at positions start … start + n − 1 < T, contiguous; R ≤ D channels turn."""
    batch, heads, tokens, width = x.shape
    half = cos.shape[2] // 2
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(triton.cdiv(tokens, BLOCK), batch * heads)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        turned,
        start,
        tokens,
        heads,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        WIDTH=width,
        HALF=half,
        LANES=triton.next_power_of_2(half),
        REST=0 if width == 2 * half else triton.next_power_of_2(width - 2 * half),
        BLOCK=BLOCK,
    )
    return turned
