"""Low-confidence remasking (LLaDA, arXiv 2502.09992): the tokens of highest probability are revealed first.

    rank_j = p(chosen token of j)

The probability is the model's, without sampling noise. Predictions that are not revealed are dropped.
"""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import Policy


@dataclasses.dataclass(frozen=True)
class LowConfidence(Policy):
    """Reveals the tokens of highest probability; no options."""

    name = "low_confidence"
    paper = "2502.09992"
    summary = "Reveal the tokens of highest probability: predictions of low confidence stay hidden."
    equation = "rank_j = p_j(x_j)"
    fixed_shape = True

    def rank(self, view, memory):
        return view.probability
