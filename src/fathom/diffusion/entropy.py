"""Entropy: the order of Dream (arXiv 2508.15487), most certain distributions first."""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import Policy


@dataclasses.dataclass(frozen=True)
class Entropy(Policy):
    """Reveals the tokens whose distribution has the least entropy; no options."""

    name = "entropy"
    paper = "2508.15487"
    summary = "Reveal where the predicted distribution has the least entropy."
    equation = "rank_j = Σ_v p_j(v) log p_j(v)"
    fixed_shape = True

    def rank(self, view, memory):
        return -view.entropy
