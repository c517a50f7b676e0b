"""Innovator's mixture trained from scratch, without weights of the dense model: shows what a warm start is worth."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fathom.growth.base import DENSE
from fathom.growth.innovator import Innovator


@dataclasses.dataclass(frozen=True)
class MoEScratch(Innovator):
    """disciplines: D, groups of experts.
    slices: G, experts of a group; divides the network's width.
    active: k, experts a token runs; None: one group.
    shared_gate: a, what the shared expert is multiplied by.
    routed_scaling: ρ, a number, or "G", "k" or "match".
    norm_topk_prob: the gates of a token sum to 1.
    """

    # nothing is cut or copied, so these are no options here
    split: ClassVar[str] = "contiguous"  # type: ignore[misc]
    router: ClassVar[str] = "random"  # type: ignore[misc]
    reinit_ratio: ClassVar[float] = 0.0  # type: ignore[misc]

    name = "moe_scratch"
    summary = "The same mixture from random weights: the baseline without the dense model's."
    equation = "y = a · F(x) + ρ · Σ_{e in top k} g_e F_e(x), all random"
    paper = ""
    branches = "none"
    fresh = True

    def start(self, branches: int) -> str:
        return f"not {DENSE}: its weights are random"
