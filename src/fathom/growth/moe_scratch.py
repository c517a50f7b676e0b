"""Innovator's mixture trained from scratch, without weights of the dense model: shows what a warm start is worth."""

from __future__ import annotations

import dataclasses

from fathom.growth.base import DENSE
from fathom.growth.innovator import Innovator


@dataclasses.dataclass(frozen=True)
class MoEScratch(Innovator):
    """disciplines: D, groups of experts.
    slices: G, experts of a group; divides the network's width.
    active: k, experts a token runs; None: one group.
    split: not used: there is nothing to cut.
    router: rows "random"; the only choice.
    shared_gate: a, what the shared expert is multiplied by.
    routed_scaling: ρ, a number, or "G", "k" or "match".
    norm_topk_prob: the gates of a token sum to 1.
    reinit_ratio: not used: all is random.
    """

    router: str = "random"

    name = "moe_scratch"
    summary = "The same mixture from random weights: the baseline without the dense model's."
    equation = "y = a · F(x) + ρ · Σ_{e in top k} g_e F_e(x), all random"
    paper = ""
    branches = "none"
    fresh = True

    def __post_init__(self):
        super().__post_init__()
        for option, only in (("split", "contiguous"), ("router", "random"), ("reinit_ratio", 0.0)):
            if getattr(self, option) != only:
                raise ValueError(
                    f"moe_scratch option {option}={getattr(self, option)!r}: all weights are random; leave it out"
                )

    def start(self, branches: int) -> str:
        return f"not {DENSE}: its weights are random"
