"""Left to right: the order of an autoregressive model, within a block."""

from __future__ import annotations

import dataclasses

import torch

from fathom.diffusion.base import Policy


@dataclasses.dataclass(frozen=True)
class LeftToRight(Policy):
    """Reveals the first hidden tokens; no options."""

    name = "left_to_right"
    paper = ""
    summary = "Reveal the first hidden tokens of the block."
    equation = "rank_j = −j"
    fixed_shape = True

    def rank(self, view, memory):
        rows, length = view.candidates.shape
        return -torch.arange(length, device=view.candidates.device, dtype=torch.float32).expand(rows, -1)
