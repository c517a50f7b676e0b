"""Confidence threshold (Fast-dLLM, arXiv 2505.22618): all tokens above a probability are revealed at once.

A step reveals every candidate with p_j(x_j) ≥ θ, and at least the likeliest; the block's last step reveals all that are
left. So a block may need fewer steps than it has.
"""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import Policy, check_option


@dataclasses.dataclass(frozen=True)
class Threshold(Policy):
    """Reveals all tokens whose probability is at least `threshold`.

    threshold: θ, the least probability, in [0, 1]; the likeliest token is always revealed.
    """

    threshold: float = 0.9

    name = "threshold"
    paper = "2505.22618"
    summary = "Reveal every token of at least `threshold` probability, and at least one a step."
    equation = "revealed = {j: p_j(x_j) ≥ θ} ∪ {argmax_j p_j(x_j)}"
    fixed_shape = True

    def __post_init__(self):
        check_option(self.name, "threshold", self.threshold, 0 <= self.threshold <= 1, "between 0 and 1")

    def rank(self, view, memory):
        return view.probability

    def count(self, view, order, quota):
        sure = (view.candidates & (view.probability >= self.threshold)).sum(1)
        if view.step == view.steps - 1:
            return quota
        return sure.clamp(min=1)
