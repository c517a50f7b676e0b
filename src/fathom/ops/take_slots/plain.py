"""`take_slots` in PyTorch; differentiable, which writes nowhere in place."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def take_slots(sources: list[Tensor], index: Int[Tensor, "#B #G k"], targets: list[Tensor]) -> list[Tensor]:
    taken = []
    for source, target in zip(sources, targets):
        chosen = index.expand(*source.shape[:2], -1)
        if source.ndim == 4:
            chosen = chosen.unsqueeze(-1).expand(target.shape)
        held = source.gather(2, chosen) if source.requires_grad else torch.gather(source, 2, chosen, out=target)
        taken.append(held)
    return taken
