"""Continued pretraining of the dense model: the baseline that every mixture must beat at equal training FLOPs."""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.growth.base import DENSE, GrowthMethod
from fathom.growth.surgery import dense


@dataclasses.dataclass(frozen=True)
class Continued(GrowthMethod):
    """No options."""

    name = "continued"
    summary = "Continued training of the dense model: the baseline of every growth."
    equation = "y = F(x)"

    def section(self, config: Any, branches: int) -> dict[str, Any]:
        return {"name": "dense"}

    def network(self, base, branches, generator, config, seen=None):
        return dense(base)

    def start(self, branches: int) -> str:
        return DENSE
