"""The `tables` wing: how does a model read structured data? Questions over a database to SQL, tables to text.

Nothing of the extra `fathom-lm[tables]` is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_FILES: tuple[str, ...] = ("picard",)  # files of this folder whose classes with a name are METHODS
_PLACES: dict[str, str] = {}
__all__ = ["METHODS", *_PLACES]


def _methods() -> dict[str, Any]:
    """The wing's own methods by name. Relations, a section of T5's config, are in the registry of that section."""
    found: dict[str, Any] = {}
    for file in _FILES:
        module = importlib.import_module(f"{__name__}.{file}")
        classes = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
        found |= {vars(cls)["name"]: cls for cls in classes if isinstance(vars(cls).get("name"), str)}
    return found


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        return _methods()
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
