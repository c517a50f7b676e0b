"""Equal real bytes: the options of a method that keep a fraction of the full cache's bytes at a given length.

Budgets are matched on the closed forms (statistics, scales and indices included), never on nominal ratios. A method
that cannot go that low without changing its definition says so and names its minimum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fathom.caches.base import CacheMethod, CacheShape
from fathom.caches.methods.fourier_attention import FourierAttention
from fathom.caches.methods.freqkv import FreqKV
from fathom.caches.methods.full import Full
from fathom.caches.methods.h2o import H2O
from fathom.caches.methods.kivi import KIVI
from fathom.caches.methods.snapkv import PyramidKV, SnapKV
from fathom.caches.methods.streaming_llm import StreamingLLM
from fathom.caches.methods.tova import TOVA
from fathom.caches.methods.treekv import TreeKV
from fathom.caches.methods.vqkv import VQKV
from fathom.caches.methods.weightedkv import WeightedKV
from fathom.models.registry import nearest


@dataclasses.dataclass(frozen=True)
class NotReachable:
    """`minimum`: the smallest fraction of the full cache that the method reaches at this length."""

    minimum: float

    def __str__(self) -> str:
        return f"not reachable (minimum {self.minimum:.3f})"


# name → (options at a given number of slots, fewest slots at which the method is itself)
SLOTTED: dict[str, tuple[Callable[[int], CacheMethod], int]] = {
    "treekv": (lambda m: TreeKV(budget=m), 16),
    "weightedkv": (lambda m: WeightedKV(budget=m), 16),
    "streaming_llm": (lambda m: StreamingLLM(budget=m), 8),
    "h2o": (lambda m: H2O(budget=m), 8),
    "tova": (lambda m: TOVA(budget=m), 8),
    "snapkv": (lambda m: SnapKV(budget=m), 16),
    "pyramidkv": (lambda m: PyramidKV(budget=m), 16),
    "freqkv": (lambda m: FreqKV(budget=m), 16),
}
KNOWN = (*SLOTTED, "full", "kivi", "vqkv", "fourier_attention")


def unknown_method(name: str) -> ValueError:
    """The error of a name that `at_fraction` does not know."""
    return ValueError(f"method {name!r}{nearest(name, list(KNOWN))}: known are {', '.join(KNOWN)}")


def at_fraction(
    name: str, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **files: Any
) -> CacheMethod | NotReachable:
    """The method `name` with the most it can hold within `fraction` of the full cache's bytes after `tokens` tokens.

    chunk: tokens of a call; None for a text whose calls are all long enough to be compressed.
    `files`: codebooks=… for vqkv (whose sizes fix its bytes), channels=… for fourier_attention.

    Raises:
        ValueError: unknown name, or vqkv without codebooks.
    """
    if name in SLOTTED:
        make, fewest = SLOTTED[name]
        return _largest(make, fewest, fraction, shape, tokens, chunk)
    if name == "full":
        return Full() if fraction >= 1 else NotReachable(1.0)
    candidates: list[CacheMethod]
    if name == "kivi":
        candidates = [KIVI(bits=bits, residual=r) for bits in (8, 4, 2) for r in (128, 64, 32)]
    elif name == "fourier_attention":
        sizes = [(n, local) for n in (512, 256, 128, 64, 32) for local in (1024, 512, 256, 128, 64)]
        # texts are read in parts here, and the statistics of "affine" hold for the first part only
        common = {
            "window": tokens,
            "reconstruction": "projection",
            **{key: value for key, value in files.items() if key == "channels"},
        }
        candidates = [FourierAttention(frequencies=n, n_local=local, **common) for n, local in sizes if 2 * n < tokens]
    elif name == "vqkv":
        path = files.get("codebooks", "")
        candidates = [
            VQKV(codebooks=path, n_local=n, flush_every=min(n, 64), pack="bits")
            for n in (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16)
        ]
    else:
        raise unknown_method(name)
    full = Full().cache_bytes(shape, tokens)
    ratios = [(_most_held(method, shape, tokens) / full, method) for method in candidates]
    fitting = [pair for pair in ratios if pair[0] <= fraction]
    if not fitting:
        return NotReachable(min((ratio for ratio, _ in ratios), default=1.0))
    return max(fitting, key=lambda pair: pair[0])[1]


def _most_held(method: CacheMethod, shape: CacheShape, tokens: int) -> int:
    """The most bytes near the end of `tokens` tokens: those that wait for their batch to be coded are in full."""
    counts = [(tokens, 0)]
    if isinstance(method, VQKV):
        waiting = min(method.flush, tokens) - 1
        counts.append((tokens - waiting, waiting))
    if isinstance(method, KIVI):
        counts.append((max(1, tokens // method.residual * method.residual - 1), 0))
    return max(method.cache_bytes(shape, prompt, steps) for prompt, steps in counts)


def _largest(
    make: Callable[[int], CacheMethod],
    fewest: int,
    fraction: float,
    shape: CacheShape,
    tokens: int,
    chunk: int | None,
) -> CacheMethod | NotReachable:
    """Bisection on the bytes at capacity, the most that the method holds between calls."""
    full = Full().cache_bytes(shape, tokens)

    def ratio(slots: int) -> float:
        method = make(slots)
        if method.shortest_call > 1:  # the last call of a text may be too short to be compressed
            rest = tokens % chunk if chunk else 0
            tail = rest if rest < method.shortest_call else 0
            return method.cache_bytes(shape, tokens - tail, tail) / full
        return method.cache_bytes(shape, min(tokens, slots)) / full

    if ratio(fewest) > fraction:
        return NotReachable(ratio(fewest))
    low, high = fewest, max(fewest + 1, tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ratio(middle) <= fraction else (low, middle)
    return make(low)
