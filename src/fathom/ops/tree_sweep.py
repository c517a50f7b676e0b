"""TreeKV's eviction (arXiv 2501.04987, Algorithm 1): a pointer sweeps over the slots; adjacent neighbours compete.

    while more than c slots are held:   r = p+1 if s[p] > s[p+1] else p;   delete slot r;   p ← (p + stride) mod c

With frozen scores a stretch of the sweep has disjoint pairs, so it is done at once: eviction k = 0, 1, … of the stretch
contests elements p + k(stride+1) and p + k(stride+1) + 1 of the order before the stretch. A wrap ends a stretch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def tree_sweep(
    score: Float[Tensor, "B G n"], capacity: int, pointer: int, stride: int = 1, newest_leaves: bool = False
) -> tuple[Int[Tensor, "B G c"], int]:
    """Evict n − capacity of n slots. Returns the slots that stay, in order, and the pointer.

    Ties evict the older slot of a pair; `newest_leaves` ignores the scores and always evicts the newer one.
    """
    slots = score.shape[2]
    index = torch.arange(slots, device=score.device).expand(score.shape)
    excess = slots - capacity
    while excess > 0:
        stretch = min(excess, -(-(capacity - pointer) // stride))
        stop = pointer + stretch * (stride + 1)
        pairs = index[..., pointer:stop]
        winner = pairs[..., :: stride + 1]
        if not newest_leaves:
            held = score.gather(2, pairs)
            newer = pairs[..., 1 :: stride + 1]
            winner = torch.where(held[..., :: stride + 1] > held[..., 1 :: stride + 1], winner, newer)
        stays = pairs.new_empty(*pairs.shape[:2], pairs.shape[2] - stretch)
        stays[..., ::stride] = winner
        for between in range(1, stride):  # contested by no one
            stays[..., between::stride] = pairs[..., between + 1 :: stride + 1]
        chosen = torch.cat((index[..., :pointer], stays, index[..., stop:]), dim=-1)
        index, excess = chosen, excess - stretch
        pointer = (pointer + stretch * stride) % capacity
    return index, pointer
