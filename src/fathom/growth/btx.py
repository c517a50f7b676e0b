"""Branch-Train-MiX (arXiv 2403.07816): the networks of branches, trained apart, become experts of full width; all other
weights are the mean of the branches' own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import mixture, router
from fathom.models.method import check_range
from fathom.ops.merging import linear


@dataclasses.dataclass(frozen=True)
class BTX(GrowthMethod):
    """active: k, branches a token runs; at most as many as there are.
    include_base: the base's own network is an expert too, and counts in the mean.
    """

    active: int = 2
    include_base: bool = True

    name = "btx"
    summary = "Whole networks of branches as experts; everything else is their mean."
    equation = "y = Σ_{e in top k} g_e F_e(x);  θ = (1/B) Σ_b θ_b outside the networks"
    paper = "2403.07816"
    branches = "needed"
    changes = "everything"

    def __post_init__(self):
        check_range(self.name, "active", self.active, 1)

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        return {"name": "moe", "experts": branches + self.include_base, "active": self.active, "shared": 0}

    def network(self, base, branches, generator, config, seen=None):
        experts = [base] * self.include_base + list(branches)
        return mixture(router(len(experts), 1, base, generator, "random"), experts)

    def other(self, base, branches):
        tensors = [base] * self.include_base + list(branches)
        wide = [tensor.float() if tensor.dtype != base.dtype or tensor.itemsize < 4 else tensor for tensor in tensors]
        return linear(wide, [1 / len(wide)] * len(wide)).to(base.dtype)

    def start(self, branches: int) -> str:
        return f"not {DENSE}, unless the branches are"
