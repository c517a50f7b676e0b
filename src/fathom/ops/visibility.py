"""Who sees whom among the tokens of a row: one value, which mask builders, kernels and cost read.

    causal          key ≤ query                                   ordinary decoders
    bidirectional   every key                                     encoders, masked diffusion
    blocks          ⌊key/n⌋ ≤ ⌊query/n⌋                           all tokens of a block and of earlier ones
    prefix          key ≤ query or key < p                        the first p tokens see each other
    two streams     [noisy | clean]                               training of block diffusion (`TwoStreams`)

Queries and keys are numbers of tokens in their row, counted from its first real one. Where tokens have several slots
(`models/slots.py`), they are numbers of slots; where each token stops at its own step (`models/steps/stack.py`), all
slots of a token have its number. Padding and packed documents come on top: they hide keys from any of these. A
visibility is hashable, so that masks made of it can be kept.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Visibility:
    """`visibility(query, key)` says whether token `query` sees token `key`; the two broadcast.

    Attributes:
        is_causal: nobody sees a later token, and everybody all earlier ones: plain causal kernels serve it.
        is_full: everybody sees all: kernels without a mask serve it.
    """

    is_causal: ClassVar[bool] = False
    is_full: ClassVar[bool] = False

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        raise NotImplementedError  # abstract

    def mean_keys(self, length: float) -> float:
        """Keys that a query sees, the mean over a row of `length` tokens."""
        raise NotImplementedError  # abstract


@dataclasses.dataclass(frozen=True)
class Causal(Visibility):
    """A token sees itself and all earlier ones."""

    is_causal: ClassVar[bool] = True

    def __call__(self, query, key):
        return key <= query

    def mean_keys(self, length):
        return (length + 1) / 2


@dataclasses.dataclass(frozen=True)
class Bidirectional(Visibility):
    """A token sees all tokens of its row."""

    is_full: ClassVar[bool] = True

    def __call__(self, query, key):
        return (key == key) & (query == query)  # true, of the shape that both broadcast to

    def mean_keys(self, length):
        return length


@dataclasses.dataclass(frozen=True)
class Blocks(Visibility):
    """A token sees all tokens of its block of `size` and of earlier blocks."""

    size: int

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"Blocks(size={self.size}): must be at least 1")

    def __call__(self, query, key):
        return key // self.size <= query // self.size

    def mean_keys(self, length):
        whole, rest = divmod(int(length), self.size)
        return (self.size * self.size * whole * (whole + 1) / 2 + rest * length) / length


@dataclasses.dataclass(frozen=True)
class Prefix(Visibility):
    """A token sees itself and all earlier ones; the first `length` tokens see each other."""

    length: int

    def __post_init__(self):
        if self.length < 0:
            raise ValueError(f"Prefix(length={self.length}): must not be negative")

    def __call__(self, query, key):
        return (key <= query) | (key < self.length)

    def mean_keys(self, length):
        first = min(self.length, length)
        return (length * (length + 1) / 2 + first * (first - 1) / 2) / length


@dataclasses.dataclass(frozen=True)
class TwoStreams(Visibility):
    """Tokens 0 … length − 1 are a noisy copy of the clean tokens length … 2 · length − 1. A noisy token sees its own
    block of `size` there and the earlier blocks of the clean copy; a clean one its block and earlier ones, clean."""

    size: int
    length: int

    def __post_init__(self):
        if self.size < 1 or self.length < 1:
            raise ValueError(f"TwoStreams(size={self.size}, length={self.length}): both must be at least 1")

    def __call__(self, query, key):
        noisy, of_noisy = query < self.length, key < self.length
        own, other = query % self.length // self.size, key % self.length // self.size
        return (
            (noisy & of_noisy & (own == other))
            | (noisy & ~of_noisy & (other < own))
            | (~noisy & ~of_noisy & (other <= own))
        )

    def mean_keys(self, length):
        return Blocks(self.size).mean_keys(length / 2)  # of either copy: a noisy block stands in for the clean one


CAUSAL, BIDIRECTIONAL = Causal(), Bidirectional()
