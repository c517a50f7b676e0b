"""Folding the values of discarded slots into the next kept one (WeightedKV, arXiv 2503.01330), all runs at once.

    for i = 0, 1, …:  if slot i is discarded:  v_{i+1} ← (a_i v_i + a_{i+1} v_{i+1}) / (a_i + a_{i+1})

A first-order linear recurrence  v_i = α_i v_{i−1} + (1 − α_i) v_i,  α_i = a_{i−1}/(a_{i−1} + a_i) where slot i − 1 is
discarded and 0 elsewhere. Every output is a convex combination of a run, computed in fp32 or wider.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.ops.kernels import has_kernel
from fathom.ops.run_merge.plain import SMALLEST, run_merge

__all__ = ["SMALLEST", "discarded_slots", "fold_runs", "run_merge"]


def fold_runs(
    value: Float[Tensor, "B G n D"], weight: Float[Tensor, "B G n"], kept: Int[Tensor, "B G k"]
) -> Float[Tensor, "B G n D"]:
    """Values whose kept slots hold their folds, left to right; drop the others. `value` may be written to.

    kept: the slots that stay, in order, the last one n − 1.
    """
    if has_kernel(value.device.type):
        from fathom.ops.run_merge import kernel

        if kernel.serves(value, weight):
            return kernel.fold_runs_(value, weight, kept)
    return run_merge(value, weight, discarded_slots(kept, value.shape[2]), value.shape[2] - kept.shape[2])


def discarded_slots(kept: Int[Tensor, "B G k"], slots: int) -> Bool[Tensor, "B G n"]:
    """Which of so many slots are not kept."""
    gone = torch.ones(*kept.shape[:2], slots, dtype=torch.bool, device=kept.device)
    return gone.scatter(2, kept, False)
