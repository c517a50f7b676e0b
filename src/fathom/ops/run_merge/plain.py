"""`fold_runs` in PyTorch: the recurrence solved by doubling, in ⌈log₂(longest run + 1)⌉ steps."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SMALLEST = 1e-12  # weights can underflow: keeps 0/0 at an equal split of nothing


def run_merge(
    value: Float[Tensor, "B G n D"], weight: Float[Tensor, "B G n"], discarded: Bool[Tensor, "B G n"], longest_run: int
) -> Float[Tensor, "B G n D"]:
    """`fold_runs` for any slots, the last one too; discarded ones hold partial folds. `longest_run` bounds runs."""
    wide = torch.promote_types(value.dtype, torch.float32)
    weight = weight.to(wide)
    share = torch.zeros_like(weight)
    pair = (weight[..., :-1] + weight[..., 1:]).clamp(min=SMALLEST)
    share[..., 1:] = torch.where(discarded[..., :-1], weight[..., :-1] / pair, 0.0)
    share = share.unsqueeze(-1)
    merged = (1 - share) * value.to(wide)
    reach = 1
    while reach <= longest_run and share.any():  # runs are short, their bound is not
        previous = torch.zeros_like(merged)
        previous[..., reach:, :] = merged[..., :-reach, :]
        merged = merged + share * previous
        earlier = torch.zeros_like(share)
        earlier[..., reach:, :] = share[..., :-reach, :]
        share = share * earlier
        reach *= 2
    return merged.to(value.dtype)
