"""Margin: the lead of the likeliest token over the second (Dream's topk_margin, arXiv 2508.15487)."""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import Policy


@dataclasses.dataclass(frozen=True)
class Margin(Policy):
    """Reveals the tokens with the largest lead of the likeliest token over the second; no options."""

    name = "margin"
    paper = "2508.15487"
    summary = "Reveal where the likeliest token leads the second by most."
    equation = "rank_j = p_j(first) − p_j(second)"
    fixed_shape = True

    def rank(self, view, memory):
        top = view.log_probs.topk(2, dim=-1).values.exp()
        return view.spread(top[:, 0] - top[:, 1])
