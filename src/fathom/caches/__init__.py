"""The `caches` wing: how much memory does a token keep? KV-cache compression for stock transformers models."""

import dataclasses
import importlib
import pkgutil
from typing import Any

from fathom.caches import methods
from fathom.caches.base import CacheMethod, CacheShape, Calibration, CompressedCache
from fathom.caches.channels import ChannelSets, load_channels, search_channels
from fathom.caches.codebooks import Codebooks, CodebookTraining, load_codebooks, rope_bands, train_codebooks
from fathom.caches.compress import build_cache, cache_shape, compress, prefill
from fathom.caches.methods.fourier_attention import FourierAttention
from fathom.caches.methods.freqkv import FreqKV
from fathom.caches.methods.full import Full
from fathom.caches.methods.h2o import H2O
from fathom.caches.methods.kivi import KIVI
from fathom.caches.methods.scorer import Scored, register_scorer
from fathom.caches.methods.snapkv import PyramidKV, SnapKV
from fathom.caches.methods.streaming_llm import StreamingLLM
from fathom.caches.methods.tova import TOVA
from fathom.caches.methods.treekv import TreeKV
from fathom.caches.methods.vqkv import VQKV
from fathom.caches.methods.weightedkv import WeightedKV
from fathom.caches.report import compression_report
from fathom.models.registry import nearest

ROLES = ("method", "baseline", "adapter")


def _found() -> dict[str, type[CacheMethod]]:
    """Every class with a name in the files of `methods/`."""
    files = (
        importlib.import_module(f"{methods.__name__}.{file.name}") for file in pkgutil.iter_modules(methods.__path__)
    )
    classes = {cls for file in files for cls in vars(file).values() if isinstance(cls, type)}
    named = [cls for cls in classes if issubclass(cls, CacheMethod) and "name" in vars(cls)]
    return {cls.name: cls for cls in sorted(named, key=lambda cls: (ROLES.index(cls.role), cls.name))}


METHODS = _found()  # name → class: methods, then baselines, then adapters


def __getattr__(name: str) -> Any:
    """The class of a method in `methods/` that this file does not import by name."""
    for cls in METHODS.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def method_class(name: Any) -> type[CacheMethod]:
    """The class of the method `name`. Raises ValueError, with the nearest real name, if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"method {name!r} does not exist{nearest(str(name), list(METHODS))}; one of {', '.join(METHODS)}"
        )
    return METHODS[name]


def from_dict(options: dict[str, Any]) -> CacheMethod:
    """The method that `to_dict` described, as `{"name": "treekv", "budget": 1024}`; missing options have their
    defaults.

    Raises:
        ValueError: unknown name or option (the nearest real one is named), or an option out of range.
    """
    options = dict(options)
    cls = method_class(options.pop("name", None))
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{cls.__name__} has no option {option!r}{nearest(option, known)}; it has {', '.join(known) or 'none'}"
            )
    return cls(**options)


__all__ = [
    "H2O",
    "KIVI",
    "METHODS",
    "TOVA",
    "VQKV",
    "CacheMethod",
    "CacheShape",
    "Calibration",
    "ChannelSets",
    "CodebookTraining",
    "Codebooks",
    "CompressedCache",
    "FourierAttention",
    "FreqKV",
    "Full",
    "PyramidKV",
    "Scored",
    "SnapKV",
    "StreamingLLM",
    "TreeKV",
    "WeightedKV",
    "build_cache",
    "cache_shape",
    "compress",
    "compression_report",
    "from_dict",
    "load_channels",
    "load_codebooks",
    "method_class",
    "prefill",
    "register_scorer",
    "rope_bands",
    "search_channels",
    "train_codebooks",
]
