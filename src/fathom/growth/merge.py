"""Branches merged back into one dense model: no expert, no router, no further cost.

linear (Σ w_i θ_i), SLERP of two, TIES (arXiv 2306.01708) and DARE (arXiv 2311.03099) of what branches changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import Network, dense
from fathom.models.method import check_choice, check_number
from fathom.ops import merging


@dataclasses.dataclass(frozen=True)
class Merge(GrowthMethod):
    """how: "linear" mean of the branches, "slerp" of two, or "ties" or "dare" of their changes to the base.
    weight: of the second branch in "slerp"; of every branch's change in "ties" and "dare".
    density: share of the changes that "ties" and "dare" keep, above 0.
    """

    how: str = "linear"
    weight: float = 0.5
    density: float = 0.5

    name = "merge"
    summary = "The branches' weights as one dense model: mean, SLERP, TIES or DARE."
    equation = "θ = Σ_i w_i θ_i;  TIES, DARE: θ_0 + merged(w (θ_i − θ_0))"
    paper = "2306.01708"
    branches = "needed"
    changes = "everything"

    def __post_init__(self):
        check_choice(self.name, "how", self.how, ("linear", "slerp", "ties", "dare"))
        check_number(self.name, "weight", self.weight, 0.0)
        check_number(self.name, "density", self.density, 1e-6, 1.0)
        for option, read_by in (("weight", ("slerp", "ties", "dare")), ("density", ("ties", "dare"))):
            if getattr(self, option) != getattr(type(self), option) and self.how not in read_by:
                raise ValueError(
                    f"merge option {option}={getattr(self, option)!r}: how={self.how!r} does not read it; leave it "
                    f"out, or use {' or '.join(read_by)}"
                )

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        if self.how == "slerp" and branches != 2:
            raise ValueError(f"merge option how='slerp': needs two branches, got {branches}")
        return {"name": "dense"}

    def network(self, base, branches, generator, config, seen=None):
        return dense(Network(*(self.merged(*parts, generator) for parts in zip(base, zip(*branches, strict=True)))))

    def other(self, base, branches):
        return self.merged(base, branches, torch.Generator().manual_seed(0))

    def merged(self, base: Tensor, branches: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """One tensor of the merged model, computed in fp32 or wider."""
        wide = torch.promote_types(base.dtype, torch.float32)
        first, others = base.to(wide), [branch.to(wide) for branch in branches]
        if self.how == "linear":
            return merging.linear(others, [1 / len(others)] * len(others)).to(base.dtype)
        if self.how == "slerp":
            one, two = others
            return merging.slerp(one, two, self.weight).to(base.dtype)
        tasks = [self.weight * (other - first) for other in others]
        if self.how == "ties":
            return (first + merging.ties(tasks, self.density)).to(base.dtype)
        return (first + merging.dare(tasks, self.density, generator)).to(base.dtype)

    def start(self, branches: int) -> str:
        return f"a dense model, not {DENSE}"
