"""Virtual-group upcycling (arXiv 2410.07524): copies of the dense network, cut into slices, behind a router whose rows
are equal within a copy, so that whole copies are chosen.

    y = s · Σ_{e in top k} g_e F_e(x)

s compensates for the gates: it is G if they sum to 1 over the slices, else E·G/k, the right value for a uniform router.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import mixture, router, scaled, split
from fathom.models.method import check_choice, check_range


@dataclasses.dataclass(frozen=True)
class VirtualGroups(GrowthMethod):
    """copies: D, of the network.
    slices: G, experts that a copy is cut into; divides the network's width.
    active: k, experts a token runs, a multiple of G; None: one copy.
    norm_topk_prob: the gates of a token sum to 1.
    scale_mode: s is multiplied into W_down, "down", which is exact; or its third root into all three matrices,
        "cuberoot", as in Megatron-Core.
    """

    copies: int = 8
    slices: int = 8
    active: int | None = None
    norm_topk_prob: bool = True
    scale_mode: str = "down"

    name = "virtual_groups"
    summary = "Slices of copies of the dense network behind a router that picks whole copies at first."
    equation = "y = s · Σ_{e in top k} g_e F_e(x),  Σ_j F_{d·G+j} = F"
    paper = "2410.07524"

    def __post_init__(self):
        check_range(self.name, "copies", self.copies, 1)
        check_range(self.name, "slices", self.slices, 1)
        check_choice(self.name, "scale_mode", self.scale_mode, ("down", "cuberoot"))
        if self.k % self.slices:
            raise ValueError(
                f"virtual_groups option active={self.active!r}: must be a multiple of slices={self.slices}"
            )

    @property
    def k(self) -> int:
        return self.slices if self.active is None else self.active

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        return {
            "name": "moe", "experts": self.copies * self.slices, "active": self.k, "slices": self.slices, "shared": 0,
            "norm_topk_prob": self.norm_topk_prob, "selection": "group",
        }  # fmt: skip

    def network(self, base, branches, generator, config, seen=None):
        scale = self.slices if self.norm_topk_prob else self.copies * self.slices**2 / self.k
        experts = split(base, self.slices) * self.copies
        rows = router(self.copies, self.slices, base, generator, "group_tied")
        return mixture(rows, [scaled(expert, scale, self.scale_mode) for expert in experts])

    def start(self, branches: int) -> str:
        if self.norm_topk_prob and (self.scale_mode == "down" or self.slices == 1):
            return DENSE
        return f"near {DENSE}: the scale is that of a uniform router, or its third root in each of three matrices"
