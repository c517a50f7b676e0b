"""Sparse upcycling (arXiv 2212.05055): every expert is a copy of the dense network, the router is random.

With renormalised gates the grown model starts as the dense one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import mixture, reinitialised, router
from fathom.models.method import check_range


@dataclasses.dataclass(frozen=True)
class SparseUpcycling(GrowthMethod):
    """experts: E, copies of the network.
    active: k, copies a token runs.
    norm_topk_prob: the gates of a token sum to 1; False is the paper's language recipe, and starts elsewhere.
    """

    experts: int = 8
    active: int = 2
    norm_topk_prob: bool = True

    name = "sparse_upcycling"
    summary = "Every expert is a copy of the dense network; a random router tells them apart."
    equation = "y = Σ_{e in top k} g_e F_e(x),  F_e = F"
    paper = "2212.05055"

    def __post_init__(self):
        check_range(self.name, "experts", self.experts, 1)
        check_range(self.name, "active", self.active, 1, self.experts)

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        return {
            "name": "moe", "experts": self.experts, "active": self.active, "shared": 0,
            "norm_topk_prob": self.norm_topk_prob,
        }  # fmt: skip

    @property
    def drawn_anew(self) -> float:
        """Share of every copy's neurons that is drawn anew."""
        return 0.0

    def network(self, base, branches, generator, config, seen=None):
        copies = branches or [base] * self.experts
        experts = [reinitialised(copy, self.drawn_anew, generator) for copy in copies]
        return mixture(router(self.experts, 1, base, generator, "random"), experts)

    def start(self, branches: int) -> str:
        if self.norm_topk_prob and not self.drawn_anew and not branches:
            return DENSE
        return f"not {DENSE}: its networks differ, or their gates do not sum to 1"
