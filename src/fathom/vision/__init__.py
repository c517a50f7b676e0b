"""The `vision` wing: how many tokens does an image take? Compressors of vision tokens for stock models.

`import fathom` imports only `configuration` from here; everything else is imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "METHODS": "methods",
    "from_dict": "methods",
    "Compressor": "base",
    "GridCompressor": "base",
    "compress_vision": "compress",
    "convert_vision": "checkpoints",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    """One of `__all__`, or the class of any method, such as `FourierVLM`."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name[:1].isupper():
        for cls in importlib.import_module(f"{__name__}.methods").METHODS.values():
            if cls.__name__ == name:
                return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
