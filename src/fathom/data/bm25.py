"""The package bm25s, without JAX: importing it runs JAX where that is installed, which then holds most of a GPU."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load_bm25s() -> Any:
    """The package, which ranks with NumPy. Raises ImportError where it is not installed.

    JAX stays if the program has already imported it.
    """
    if "jax" in sys.modules:
        return importlib.import_module("bm25s")
    sys.modules["jax"] = None  # type: ignore[assignment]  # an import of it now says that it is not installed
    try:
        return importlib.import_module("bm25s")
    finally:
        del sys.modules["jax"]
