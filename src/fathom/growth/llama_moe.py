"""LLaMA-MoE (arXiv 2406.16554): the dense network itself is cut into experts, of which a token runs some.

    y = ρ · Σ_{e in top k} g_e F_e(x),      Σ_e F_e = F

No weight is added but the router's. With all experts active and ρ = k, equal gates give the dense model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import mixture, permutation, router, split
from fathom.models.method import check_choice, check_number, check_range


@dataclasses.dataclass(frozen=True)
class LlamaMoE(GrowthMethod):
    """experts: E, into which the network is cut; divides its width.
    active: k, experts a token runs.
    routed_scaling: ρ, a number or "k": the gates sum to 1, and the slices to the network.
    split: neurons of an expert: "contiguous", or "permuted" at random, as in the paper's best variant.
    router_std: deviation of the router's rows; 0 gives equal gates.
    """

    experts: int = 16
    active: int = 4
    routed_scaling: float | str = "k"
    split: str = "permuted"
    router_std: float = 0.02

    name = "llama_moe"
    summary = "The dense network cut into experts, of which a token runs some: fewer FLOPs, no new network."
    equation = "y = ρ · Σ_{e in top k} g_e F_e(x),  Σ_e F_e = F"
    paper = "2406.16554"

    def __post_init__(self):
        check_range(self.name, "experts", self.experts, 1)
        check_range(self.name, "active", self.active, 1, self.experts)
        check_choice(self.name, "split", self.split, ("contiguous", "permuted"))
        check_number(self.name, "router_std", self.router_std, 0.0)

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        return {
            "name": "moe", "experts": self.experts, "active": self.active, "shared": 0,
            "width": config.intermediate_size // self.experts, "routed_scaling": self.routed_scaling,
        }  # fmt: skip

    def network(self, base, branches, generator, config, seen=None):
        order = permutation(base, generator) if self.split == "permuted" else None
        rows = router(self.experts, 1, base, generator, "random", self.router_std)
        return mixture(rows, split(base, self.experts, order))

    def start(self, branches: int) -> str:
        if self.active == self.experts and self.routed_scaling in ("k", float(self.active)) and not self.router_std:
            return DENSE
        return f"not {DENSE}: of its {self.experts} slices a token runs {self.active}"
