"""Words as numbers, and n-grams of them, which near duplicates and planted benchmark questions are found by.

    g_n(i) = Σ_{j<n} id(w_{i+j}) · B^j   mod 2^64,   as (H_{i+n} − H_i) · B^{−i},   H_i = Σ_{j<i} id(w_j) · B^j

A word is a run of letters and digits without its case; punctuation and markup do not count.
"""

from __future__ import annotations

import functools
import re
import unicodedata

import numpy as np
import xxhash

_WORD = re.compile(r"\w+")
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse mod 2^64
_BLOCK = 1 << 16


def words(text: str) -> list[str]:
    """The words of a text in order, in lower case."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).lower())


@functools.lru_cache(maxsize=1 << 18)
def _identity(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))


def identities(text: str) -> np.ndarray:
    """Word ids [n], uint64: the same for a word in every process and run."""
    found = words(text)
    return np.fromiter(map(_identity, found), dtype=np.uint64, count=len(found))


def ngrams(ids: np.ndarray, n: int) -> np.ndarray:
    """Hashes [max(len(ids) − n + 1, 0)] of the n-grams, in their order."""
    if len(ids) < n:
        return np.zeros(0, dtype=np.uint64)
    powers, inverses = _powers(-(-len(ids) // _BLOCK) * _BLOCK)
    with np.errstate(over="ignore"):  # sums wrap: that is the modulus
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(ids * powers[: len(ids)], dtype=np.uint64)])
        return (sums[n:] - sums[:-n]) * inverses[: len(ids) - n + 1]


@functools.lru_cache(maxsize=4)
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """B^i and B^−i mod 2^64, i < length."""
    tables = []
    for factor in (_BASE, pow(_BASE, -1, 1 << 64)):
        table = np.full(length, factor, dtype=np.uint64)
        table[0] = 1
        with np.errstate(over="ignore"):
            tables.append(np.multiply.accumulate(table))
    return tables[0], tables[1]
