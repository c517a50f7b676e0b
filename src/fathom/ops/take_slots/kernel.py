"""`take_slots` in one launch: a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from fathom.ops.kernels import wants_gradient

BLOCK = 16  # slots of a program


@triton.jit
def _rows(source, target, from_slot, to_slot, exists, slots, stays, pair, WIDTH: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)[None, :]
    mask = exists[:, None] & (lane < WIDTH)
    x = tl.load(source + (pair * slots + from_slot)[:, None] * WIDTH + lane, mask=mask, other=0)
    tl.store(target + (pair * stays + to_slot)[:, None] * WIDTH + lane, x, mask=mask)


@triton.jit
def _take(key, value, first, second, index, to_key, to_value, to_first, to_second, slots, stays, groups, row_stride,
          head_stride, KEYS: tl.constexpr, KEY_LANES: tl.constexpr, VALUES: tl.constexpr, VALUE_LANES: tl.constexpr,
          STATISTICS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    to_slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = to_slot < stays
    place = index + (pair // groups) * row_stride + (pair % groups) * head_stride
    from_slot = tl.load(place + to_slot, mask=exists, other=0)
    _rows(key, to_key, from_slot, to_slot, exists, slots, stays, pair, KEYS, KEY_LANES)
    _rows(value, to_value, from_slot, to_slot, exists, slots, stays, pair, VALUES, VALUE_LANES)
    if STATISTICS > 0:
        _rows(first, to_first, from_slot, to_slot, exists, slots, stays, pair, 1, 1)
    if STATISTICS > 1:
        _rows(second, to_second, from_slot, to_slot, exists, slots, stays, pair, 1, 1)


def serves(sources: list[Tensor], index: Tensor) -> bool:
    """Whether the kernel takes these: contiguous, key and value and at most two statistics, no gradient wanted."""
    in_order = index.stride(-1) == 1 and all(tensor.is_contiguous() for tensor in sources)
    return not wants_gradient(*sources) and in_order and len(sources) <= 4


def take_slots(sources: list[Tensor], index: Int[Tensor, "#B #G k"], targets: list[Tensor]) -> None:
    """targets [B,G,k,·] ← sources [B,G,n,·] at the slots of `index` (int64); key, value, then statistics [B,G,n]."""
    key, value = sources[:2]
    batch, groups, slots = key.shape[:3]
    stays = index.shape[2]
    index = index.expand(batch, groups, stays)
    statistics = [*zip(sources, targets)][2:]
    (first, to_first), (second, to_second) = [*statistics, *[(key, targets[0])] * 2][:2]  # one not there is not read
    _take[(triton.cdiv(stays, BLOCK), batch * groups)](
        key,
        value,
        first,
        second,
        index,
        targets[0],
        targets[1],
        to_first,
        to_second,
        slots,
        stays,
        groups,
        index.stride(0),
        index.stride(1),
        KEYS=key.shape[3],
        KEY_LANES=triton.next_power_of_2(key.shape[3]),
        VALUES=value.shape[3],
        VALUE_LANES=triton.next_power_of_2(value.shape[3]),
        STATISTICS=len(statistics),
        BLOCK=BLOCK,
    )
