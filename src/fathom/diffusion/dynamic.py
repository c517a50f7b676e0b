"""Dynamic low confidence (SDAR, arXiv 2510.06303): the schedule's quota, or more where the model is sure.

A step reveals every candidate with p_j(x_j) > θ if these are at least the quota, else the quota.
"""

from __future__ import annotations

import dataclasses

import torch

from fathom.diffusion.base import Policy, check_option


@dataclasses.dataclass(frozen=True)
class Dynamic(Policy):
    """Reveals the schedule's quota, or all tokens above a probability if these are more.

    threshold: θ, in [0, 1]; the paper uses 0.85 to 0.9.
    """

    threshold: float = 0.9

    name = "dynamic"
    paper = "2510.06303"
    summary = "Reveal the schedule's quota, or every token above `threshold` probability where these are more."
    equation = "revealed = top max(n_i, |{j: p_j(x_j) > θ}|) by p_j(x_j)"
    fixed_shape = True

    def __post_init__(self):
        check_option(self.name, "threshold", self.threshold, 0 <= self.threshold <= 1, "between 0 and 1")

    def rank(self, view, memory):
        return view.probability

    def count(self, view, order, quota):
        return torch.maximum(quota, (view.candidates & (view.probability > self.threshold)).sum(1))
