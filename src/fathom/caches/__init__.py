"""The `caches` wing: how much memory does a token keep? KV-cache compression for stock transformers models."""

import dataclasses
from typing import Any

from fathom.caches.base import CacheMethod, CacheShape, CompressedCache
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

OURS = (TreeKV, WeightedKV, FreqKV, VQKV, FourierAttention)
BASELINES = (Full, StreamingLLM, H2O, TOVA, SnapKV, PyramidKV, KIVI, Scored)
METHODS: dict[str, type[CacheMethod]] = {cls.name: cls for cls in OURS + BASELINES}


def from_dict(options: dict[str, Any]) -> CacheMethod:
    """The method that `to_dict` wrote: `{"name": "treekv", "budget": 1024, …}`; missing options take their defaults.

    Raises:
        ValueError: unknown name or option (the nearest real one is named), or an option out of range.
    """
    options = dict(options)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"method {name!r} does not exist{nearest(str(name), list(METHODS))}; one of {', '.join(METHODS)}"
        )
    cls = METHODS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{cls.__name__} has no option {option!r}{nearest(option, known)}; it has {', '.join(known) or 'none'}"
            )
    return cls(**options)


__all__ = [
    "BASELINES",
    "H2O",
    "KIVI",
    "METHODS",
    "OURS",
    "TOVA",
    "VQKV",
    "CacheMethod",
    "CacheShape",
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
    "prefill",
    "register_scorer",
    "rope_bands",
    "search_channels",
    "train_codebooks",
]
