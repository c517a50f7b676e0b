"""Options with which a method keeps a given fraction of the full cache's real bytes at a given length.

Budgets are matched on the closed forms (statistics, scales and indices included), never on nominal ratios. A method
says in `at_fraction` how it is sized: by one of the two rules here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathom.caches.base import CacheMethod, CacheShape


@dataclasses.dataclass(frozen=True)
class NotReachable:
    """The fraction asked for is too small. `minimum` is the smallest one that the method reaches at this length."""

    minimum: float

    def __str__(self) -> str:
        return f"not reachable (minimum {self.minimum:.3f})"


def largest_budget(
    make: Callable[[int], CacheMethod], fewest: int, fraction: float, shape: CacheShape, tokens: int, chunk: int | None
) -> CacheMethod | NotReachable:
    """`make(budget)` with the largest budget, at least `fewest`, that fits; found by bisection."""
    full = shape.full_bytes(tokens)

    def ratio(budget: int) -> float:
        return make(budget).most_bytes(shape, tokens, chunk) / full

    if ratio(fewest) > fraction:
        return NotReachable(ratio(fewest))
    low, high = fewest, max(fewest + 1, tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ratio(middle) <= fraction else (low, middle)
    return make(low)


def fullest(
    candidates: Iterable[CacheMethod], fraction: float, shape: CacheShape, tokens: int, chunk: int | None
) -> CacheMethod | NotReachable:
    """The candidate that fits and holds the most."""
    full = shape.full_bytes(tokens)
    ratios = [(method.most_bytes(shape, tokens, chunk) / full, method) for method in candidates]
    fitting = [pair for pair in ratios if pair[0] <= fraction]
    if not fitting:
        return NotReachable(min((ratio for ratio, _ in ratios), default=1.0))
    return max(fitting, key=lambda pair: pair[0])[1]
