"""The growth wing: a mixture of experts, or another model, made of a dense checkpoint. One file a method."""

from __future__ import annotations

import importlib
import pkgutil

from fathom.growth.base import GrowthMethod


def methods() -> dict[str, type[GrowthMethod]]:
    """Every method by name. The files are imported when this is first asked."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found = [GrowthMethod]
    for kind in found:
        found += kind.__subclasses__()
    return {kind.name: kind for kind in found if "name" in vars(kind)}
