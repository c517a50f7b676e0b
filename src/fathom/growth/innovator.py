"""Innovator (arXiv 2507.18671): the dense network stays as a shared expert; copies of it, trained on a discipline each,
are cut into small routed ones.

    y = a · F(x) + ρ · Σ_{e in top k} g_e F_e(x),      Σ_j F_{d·G + j} = F_d

Its four stages: train the networks of a branch for each discipline (all else frozen); this surgery; train the router
alone; train everything on a mixture of texts. The paper does not publish gates, router start or losses: those here are
`moe`'s defaults, and a choice of this project.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import clustered, mixture, permutation, reinitialised, router, split
from fathom.models.method import check_choice, check_number, check_range


@dataclasses.dataclass(frozen=True)
class Innovator(GrowthMethod):
    """disciplines: D, groups of experts, one a branch; copies of the base where there is no branch.
    slices: G, experts that a group is cut into; divides the network's width.
    active: k, experts a token runs; None: one group. A multiple of G, unless router="random".
    split: neurons of a slice: "contiguous", "permuted" at random, or "clustered": those that fire together in the base
        on a sample of texts (MoEfication, arXiv 2110.01786).
    router: its rows: "group_tied", one drawn for each group; "prompt", one for each group, in the direction of the
        network's mean input on a text of its discipline; or "random" ones.
    shared_gate: a, the factor of the dense network.
    routed_scaling: ρ, a number, or "G", "k" or "match": (1 − a)·G, with which copies start as the dense model.
    norm_topk_prob: the gates of a token sum to 1.
    reinit_ratio: share of the neurons of every copy that is drawn anew.
    """

    disciplines: int = 8
    slices: int = 8
    active: int | None = None
    split: str = "contiguous"
    router: str = "group_tied"
    shared_gate: float = 1.0
    routed_scaling: float | str = 1.0
    norm_topk_prob: bool = True
    reinit_ratio: float = 0.0

    name = "innovator"
    summary = "The dense network as a shared expert beside slices of copies that learned one discipline each."
    equation = "y = a · F(x) + ρ · Σ_{e in top k} g_e F_e(x),  Σ_j F_{d·G+j} = F_d"
    paper = "2507.18671"
    branches = "some"

    def __post_init__(self):
        check_range(self.name, "disciplines", self.disciplines, 1)
        check_range(self.name, "slices", self.slices, 1)
        check_choice(self.name, "split", self.split, ("contiguous", "permuted", "clustered"))
        check_choice(self.name, "router", self.router, ("group_tied", "prompt", "random"))
        check_number(self.name, "reinit_ratio", self.reinit_ratio, 0.0, 1.0)
        if self.router != "random" and self.k % self.slices:
            raise ValueError(
                f"innovator option active={self.active!r}: must be a multiple of slices={self.slices} with "
                f"router={self.router!r}, whose rows are equal within a group; or use router='random'"
            )

    @property
    def k(self) -> int:
        return self.slices if self.active is None else self.active

    @property
    def reads(self) -> int | None:
        if self.router == "prompt":
            return self.disciplines
        return None if self.split == "clustered" else 0

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        if branches and branches != self.disciplines:
            raise ValueError(f"innovator option disciplines={self.disciplines}: but there are {branches} branches")
        return {
            "name": "moe", "experts": self.disciplines * self.slices, "active": self.k, "slices": self.slices,
            "shared_gate": self.shared_gate, "routed_scaling": self.routed_scaling,
            "norm_topk_prob": self.norm_topk_prob,
            "selection": "expert" if self.router == "random" else "group",
        }  # fmt: skip

    def network(self, base, branches, generator, config, seen=None):
        experts = []
        together = clustered(seen.fired, self.slices, generator) if self.split == "clustered" else None
        for copy in branches or [base] * self.disciplines:
            copy = reinitialised(copy, self.reinit_ratio, generator)
            order = permutation(copy, generator) if self.split == "permuted" else together
            experts += split(copy, self.slices, order)
        if self.router == "prompt":
            rows = seen.inputs.repeat_interleave(self.slices, 0).to(base.gate.dtype)
        else:
            rows = router(self.disciplines, self.slices, base, generator, self.router)
        return mixture(rows, experts, shared=base)

    def start(self, branches: int) -> str:
        if self.routed_scaling == 0.0 and self.shared_gate == 1.0:
            return DENSE
        tied = self.router != "random" and self.norm_topk_prob and not self.reinit_ratio and not branches
        if tied and self.routed_scaling == "match":
            return DENSE
        if branches:
            return "the dense network times a, and slices of the branches as the router picks them"
        return f"not {DENSE}: a slice of every copy that the router picks is added to the network"
