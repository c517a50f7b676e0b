"""Entropy-bounded unmasking (EB-sampler, arXiv 2505.24857): as many tokens at once as their joint error allows.

Candidates in the order of their entropies h_(1) ≤ h_(2) ≤ …: a step reveals the first k, with the largest k for which

    h_(1) + … + h_(k−1) ≤ γ

The sum leaves out the largest entropy of the revealed tokens; it bounds the loss of predicting them independently. At
least one token is revealed, and the block's last step reveals all that are left.
"""

from __future__ import annotations

import dataclasses

import torch

from fathom.diffusion.base import Policy, check_option


@dataclasses.dataclass(frozen=True)
class EntropyBounded(Policy):
    """Reveals the most certain tokens up to a bound on their entropy.

    bound: γ, nats, at least 0.
    """

    bound: float = 0.1

    name = "entropy_bounded"
    paper = "2505.24857"
    summary = "Reveal the most certain tokens, as many as keep their summed entropy within `bound`."
    equation = "k = max {k: h_(1) + … + h_(k−1) ≤ γ}"
    fixed_shape = True

    def __post_init__(self):
        check_option(self.name, "bound", self.bound, 0 <= self.bound < float("inf"), "finite and at least 0")

    def rank(self, view, memory):
        return -view.entropy

    def count(self, view, order, quota):
        if view.step == view.steps - 1:
            return quota
        inside = view.candidates.gather(1, order)
        entropies = torch.where(inside, view.entropy.gather(1, order), torch.inf)
        return (entropies.cumsum(1)[:, :-1] <= self.bound).sum(1) + 1
