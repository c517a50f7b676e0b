"""`weigh` in one pass and in place: a Triton kernel.

A program takes a few queries of all heads of a group, with their whole rows in registers. All sums in fp32. Needs the
package `triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fathom.ops.kernels import FLOATS, wants_gradient

QUERIES = 4  # of a program
LARGEST = 2**15  # numbers that a program holds: 64 a thread


@triton.jit
def _softmax(scores, received, scaling, queries, slots, HEADS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
             REDUCE: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, head = tl.arange(0, SLOTS), tl.arange(0, ROWS)
    total = tl.zeros([SLOTS], tl.float32)
    for i in range(QUERIES):
        query = block * QUERIES + i
        real = (head < HEADS) & (query < queries)
        place = scores + ((pair * HEADS + head) * queries + query)[:, None] * slots + slot[None, :]
        there = real[:, None] & (slot < slots)[None, :]
        visible = (slot <= slots - queries + query)[None, :]
        x = tl.load(place, mask=there & visible, other=float("-inf")).to(tl.float32) * scaling
        x = tl.where(real[:, None], x, 0.0)
        e = tl.exp(x - tl.max(x, 1)[:, None])
        p = e / tl.sum(e, 1)[:, None]
        tl.store(place, p.to(scores.dtype.element_ty), mask=there)
        p = tl.where(real[:, None], p, 0.0)
        if REDUCE == "max":
            total += tl.max(p, 0)
        else:
            total += tl.sum(p, 0)
    if REDUCE == "mean":
        total = total / HEADS
    out = pair * tl.num_programs(0) + block
    tl.store(received + out * slots + slot, total, mask=slot < slots)


def serves(scores: Tensor, m: int) -> bool:
    """Whether the kernel takes these: 16 or 32 bits, in order, no gradient wanted, rows that fit in registers."""
    held = triton.next_power_of_2(scores.shape[2] // m) * triton.next_power_of_2(scores.shape[3])
    return scores.dtype in FLOATS and scores.is_contiguous() and held <= LARGEST and not wants_gradient(scores)


def weigh_(
    scores: Float[Tensor, "B G hm n"], m: int, scaling: float, reduce: str
) -> tuple[Float[Tensor, "B G hm n"], Float[Tensor, "B G n"]]:
    """The weights, in the place of the scores (contiguous, a head's m queries together), and r in fp32."""
    batch, groups, rows, slots = scores.shape
    blocks, heads = triton.cdiv(m, QUERIES), rows // m
    received = scores.new_empty(batch, groups, blocks, slots, dtype=torch.float32)
    held = triton.next_power_of_2(heads) * triton.next_power_of_2(slots)
    _softmax[(blocks, batch * groups)](
        scores,
        received,
        scaling,
        m,
        slots,
        HEADS=heads,
        ROWS=triton.next_power_of_2(heads),
        SLOTS=triton.next_power_of_2(slots),
        REDUCE=reduce,
        QUERIES=QUERIES,
        num_warps=4 if held <= LARGEST // 8 else 8 if held <= LARGEST // 2 else 16,
    )
    return scores, received.squeeze(2) if blocks == 1 else received.sum(2)
