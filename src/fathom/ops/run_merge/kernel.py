"""`fold_runs` in one launch and in place: a Triton kernel.

The recurrence  m_s = α_s m_{s−1} + (1 − α_s) v_s  over discarded slots p + 1 … i − 1 and the kept slot i after them
is a sum with known coefficients, taken from i backwards, a tile of slots at a time:

    m_i = Σ_{s = p+1 … i} c_s (1 − α_s) v_s,   c_i = 1,  c_s = α_{s+1} c_{s+1}

A program takes one kept slot of one head. It reads that slot's run and writes that slot only, so runs never meet. All
sums in fp32. Needs the package `triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import FLOATS, wants_gradient
from fathom.ops.run_merge.plain import SMALLEST

TILE = 16  # slots of a run that are read together


@triton.jit
def _fold(value, weight, kept, slots, stays, width, smallest, TILE: tl.constexpr, WIDTH: tl.constexpr):
    place, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    last = tl.load(kept + head * stays + place).to(tl.int32)
    before = tl.load(kept + head * stays + place - 1, mask=place > 0, other=-1).to(tl.int32)
    if last - before > 1:
        step = tl.arange(0, TILE)
        channel = tl.arange(0, WIDTH)
        weights, rows = weight + head * slots, value + head * slots * width
        total = tl.zeros([WIDTH], tl.float32)
        reached = 1.0
        newest = last
        while newest > before:
            slot = newest - step
            inside = slot > before
            ours = tl.load(weights + slot, mask=inside, other=0.0)
            older = tl.load(weights + slot - 1, mask=slot - 1 > before, other=0.0)
            newer = tl.load(weights + slot + 1, mask=inside & (slot < last), other=0.0)
            share = older / tl.maximum(older + ours, smallest)  # α_s: 0 for the oldest of the run
            onward = tl.where(slot < last, ours / tl.maximum(ours + newer, smallest), 1.0)  # α_{s+1}
            through = reached * tl.cumprod(onward, 0)
            part = tl.where(inside, through * (1 - share), 0.0)
            at = slot[:, None] * width + channel[None, :]
            v = tl.load(rows + at, mask=inside[:, None] & (channel < width)[None, :], other=0.0)
            total += tl.sum(part[:, None] * v.to(tl.float32), 0)
            reached = tl.sum(tl.where(step == TILE - 1, through, 0.0), 0)
            newest -= TILE
        tl.store(rows + last * width + channel, total.to(value.dtype.element_ty), mask=channel < width)


def serves(value: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these: numbers of 16 or 32 bits, no gradient wanted."""
    return not wants_gradient(value, weight) and value.dtype in FLOATS and value.is_contiguous()


def fold_runs_(
    value: Float[Tensor, "B G n D"], weight: Float[Tensor, "B G n"], kept: Int[Tensor, "B G k"]
) -> Float[Tensor, "B G n D"]:
    """`value` (contiguous), whose kept slots now hold their folds; discarded slots hold what they held.

    kept: the slots that stay, in order, the last one n − 1. weight: fp32.
    """
    batch, groups, slots, width = value.shape
    stays = kept.shape[2]
    _fold[(stays, batch * groups)](
        value,
        weight.contiguous(),
        kept.contiguous(),
        slots,
        stays,
        width,
        SMALLEST,
        TILE=TILE,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )
    return value
