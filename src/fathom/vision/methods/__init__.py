"""Compressors of vision tokens: one file a method, found by its name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from fathom.models.registry import nearest
from fathom.vision.base import Compressor


def _found() -> dict[str, type[Compressor]]:
    """Every class with a name in the files of this folder, the paper's method first."""
    files = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    classes = {cls for file in files for cls in vars(file).values() if isinstance(cls, type)}
    named = [cls for cls in classes if issubclass(cls, Compressor) and "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(named, key=lambda cls: (cls.role != "method", cls.name))}


METHODS = _found()


def from_dict(options: dict[str, Any]) -> Compressor:
    """The compressor that `to_dict` wrote: `{"name": "fourier_vlm", "tokens": 144}`.

    Raises:
        ValueError: unknown name or option (the nearest real one is named), or an option out of range.
    """
    options = dict(options)
    name = options.pop("name", None)
    if name not in METHODS:
        near = nearest(str(name), list(METHODS))
        raise ValueError(f"method {name!r} does not exist{near}; one of {', '.join(METHODS)}")
    known = [field.name for field in dataclasses.fields(METHODS[name])]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{METHODS[name].__name__} has no option {option!r}{nearest(option, known)}; it has {', '.join(known)}"
            )
    return METHODS[name](**options)
