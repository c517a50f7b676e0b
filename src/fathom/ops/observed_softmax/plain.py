"""`weigh` in PyTorch: the softmax in fp32, or wider for float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(2),
    "sum": lambda weights: weights.sum(2),
    "max": lambda weights: weights.amax(2),
}


def weigh(
    scores: Float[Tensor, "B G hm n"], m: int, scaling: float, reduce: str
) -> tuple[Float[Tensor, "B G hm n"], Float[Tensor, "B G n"]]:
    scaled, n = scores.unflatten(2, (-1, m)) * scaling, scores.shape[3]
    if m > 1:  # every query sees what is older than the first of them
        hidden = torch.ones(m, m, dtype=torch.bool, device=scores.device).triu(1)
        scaled[..., n - m :].masked_fill_(hidden, float("-inf"))
    weights = F.softmax(scaled, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.flatten(2, 3), REDUCE[reduce](weights).sum(2)
