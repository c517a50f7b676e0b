"""Random order, over which the training objective is an average."""

from __future__ import annotations

import dataclasses

import torch

from fathom.diffusion.base import Policy


@dataclasses.dataclass(frozen=True)
class RandomOrder(Policy):
    """Reveals hidden tokens in random order; no options."""

    name = "random"
    paper = "2502.09992"
    summary = "Reveal hidden tokens of the block in random order."
    equation = "rank_j ~ U(0, 1)"

    def rank(self, view, memory):
        length, device = view.candidates.shape[1], view.candidates.device
        return torch.stack([torch.rand(length, generator=g, device=device) for g in view.generators])
