"""Step 6, duplicates: of texts that are equal, or nearly, the first is kept.

Nearly equal: the Jaccard similarity of the sets of 5-grams of words, J = |A ∩ B| / |A ∪ B|, is at least 0.8, by
MinHash. Each of 128 permutations keeps the least hash of a set, and two sets agree in one with probability J. Pairs are
looked for by bands (LSH): with 16 bands of 8 permutations a pair is found with probability 1 − (1 − J^8)^16, 0.95 at
J = 0.8. What is found is held against the threshold by all 128, so a pair that merely shares a band stays.

datasketch makes the signatures. Its LSH keeps every band in a dictionary and datatrove's keeps no signature to check a
pair by, nor names the original: here a band is one sort of a column. Pairs are counted band by band, so that memory
holds one at a time: 4 bytes for each of its permutations and document, and what sorts them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from datasketch import MinHash

from fathom.curation.config import Curation
from fathom.curation.words import ngrams

_SCHEME = "affine32"
_EMPTY = np.uint32(2**32 - 1)  # the least hash of no n-gram
_CHUNK = 4096  # n-grams that are permuted at once: 2 MiB
_PAIRS = 65536  # that are compared at once
Band = Callable[[int], np.ndarray]


@functools.cache
def _permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    return MinHash(number, scheme=_SCHEME).permutations


def signature(ids: np.ndarray, config: Curation) -> np.ndarray:
    """MinHash signature [permutations], uint32, of a text's word ids. A text of fewer words is one n-gram of all."""
    hashes = ngrams(ids, max(1, min(config.ngram, len(ids))))
    folded = (np.unique(hashes) >> np.uint64(32)).tolist()  # 32 bits, as the scheme takes
    made = MinHash(config.permutations, scheme=_SCHEME, hashfunc=_same, permutations=_permutations(config.permutations))
    for start in range(0, len(folded), _CHUNK):
        made.update_batch(folded[start : start + _CHUNK])
    return made.hashvalues


def _same(hashed: int) -> int:
    return hashed


def digest(text: str) -> bytes:
    """A digest of 16 bytes, equal for texts that differ at most in spaces."""
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Match:
    """Document `number` is dropped for document `original`, which comes before it."""

    number: int
    original: int
    similarity: float | None  # None: the texts are equal


def matches(digests: Sequence[bytes] | np.ndarray, band: Band | None, config: Curation) -> list[Match]:
    """The documents to drop, in order: all of a group of duplicates but its first.

    digests: 16 bytes each.   band: gives the columns of the signatures that a band compares, [documents, columns].
    Without one: equal texts alone. Near duplicates are joined in chains: A ~ B ~ C is one group.
    """
    first = _firsts(np.asarray(digests, dtype="V16"))
    found = {int(n): Match(int(n), int(first[n]), None) for n in np.flatnonzero(first != np.arange(len(first)))}
    if config.near_duplicates and band is not None and len(first):
        unique = np.flatnonzero(first == np.arange(len(first)))
        unique = unique[(band(0)[unique] != _EMPTY).any(axis=1)]  # texts without a word have nothing in common
        group: dict[int, int] = {}  # document -> one before it that it is grouped with

        def root(number: int) -> int:
            while number in group:
                group[number] = group.get(group[number], group[number])  # halve the path
                number = group[number]
            return number

        pairs = _pairs(band, unique, config)
        for a, b in pairs[_similarity(band, pairs, config) >= config.similarity].tolist():
            low, high = sorted((root(a), root(b)))
            if low != high:
                group[high] = low
        near = np.array([(number, root(number)) for number in sorted(group)], dtype=np.int64).reshape(-1, 2)
        for (number, original), alike in zip(near.tolist(), _similarity(band, near, config).tolist(), strict=True):
            found[number] = Match(number, original, alike)
        for number, match in found.items():  # equal to one that is dropped
            if match.similarity is None and match.original in group:
                found[number] = Match(number, found[match.original].original, None)
    return [found[number] for number in sorted(found)]


def _runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that sorts keys [n], equal ones in theirs, and where in it each one's run of equal keys begins."""
    order = np.argsort(keys, kind="stable")
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = keys[order[1:]] != keys[order[:-1]]
    return order, np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))


def _firsts(keys: np.ndarray) -> np.ndarray:
    """The number of the first key that equals each of keys [n]."""
    order, start = _runs(keys)
    first = np.empty(len(keys), dtype=np.int64)
    first[order] = order[start]
    return first


def _pairs(band: Band, unique: np.ndarray, config: Curation) -> np.ndarray:
    """Pairs [n, 2] of the documents `unique` that share a band: each with the first of its bucket, and with the one
    before it there."""
    found, rows = np.zeros(0, dtype=np.int64), config.permutations // config.bands
    for number in range(config.bands):
        columns = np.ascontiguousarray(band(number)[unique])
        order, start = _runs(columns.view(np.dtype((np.void, columns.dtype.itemsize * rows))).ravel())
        later = np.flatnonzero(start != np.arange(len(order)))
        for earlier in (start[later], later - 1):
            found = np.union1d(found, order[earlier] * len(unique) + order[later])
    return unique[np.stack(np.divmod(found, max(1, len(unique))), axis=1)]


def _similarity(band: Band, pairs: np.ndarray, config: Curation) -> np.ndarray:
    """Share [n] of the permutations in which the signatures of pairs [n, 2] agree."""
    equal = np.zeros(len(pairs), dtype=np.int64)
    for number in range(config.bands if len(pairs) else 0):
        columns = band(number)
        for begin in range(0, len(pairs), _PAIRS):
            some = pairs[begin : begin + _PAIRS]
            equal[begin : begin + _PAIRS] += (columns[some[:, 0]] == columns[some[:, 1]]).sum(axis=1)
    return equal / config.permutations
