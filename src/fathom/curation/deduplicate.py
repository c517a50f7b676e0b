"""Step 6, duplicates: of texts that are equal, or nearly, the first is kept.

Nearly equal: the Jaccard similarity of the sets of 5-grams of words, J = |A ∩ B| / |A ∪ B|, is at least 0.8, by
MinHash. Each of 128 permutations keeps the least hash of a set, and two sets agree in one with probability J. Pairs are
looked for by bands (LSH): with 16 bands of 8 permutations a pair is found with probability 1 − (1 − J^8)^16, 0.95 at
J = 0.8. What is found is held against the threshold by all 128, so a pair that merely shares a band stays.

datasketch makes the signatures. Its LSH keeps every band in a dictionary and datatrove's keeps no signature to check a
pair by, nor names the original: here a band is one sort of a column, and memory is 4 bytes a permutation and document.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from datasketch import MinHash

from fathom.curation.config import Curation
from fathom.curation.words import ngrams

_SCHEME = "affine32"
_EMPTY = np.uint32(2**32 - 1)  # the least hash of no n-gram
_CHUNK = 4096  # n-grams that are permuted at once: 2 MiB


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


def matches(digests: Sequence[bytes], signatures: np.ndarray | None, config: Curation) -> list[Match]:
    """The documents to drop, in order: all of a group of duplicates but its first.

    signatures: [documents, permutations], or None. Near duplicates are joined in chains: A ~ B ~ C is one group.
    """
    first: dict[bytes, int] = {}
    found: dict[int, Match] = {}
    for number, key in enumerate(digests):
        original = first.setdefault(key, number)
        if original != number:
            found[number] = Match(number, original, None)
    if config.near_duplicates and signatures is not None:
        unique = np.fromiter(first.values(), dtype=np.int64, count=len(first))
        unique = unique[(signatures[unique] != _EMPTY).any(axis=1)]  # texts without a word have nothing in common
        group: dict[int, int] = {}  # document -> one before it that it is grouped with

        def root(number: int) -> int:
            while number in group:
                group[number] = group.get(group[number], group[number])  # halve the path
                number = group[number]
            return number

        for a, b in _pairs(signatures, unique, config):
            low, high = sorted((root(a), root(b)))
            if low != high:
                group[high] = low
        for number in sorted(group):
            original = root(number)
            alike = float(np.mean(signatures[number] == signatures[original]))
            found[number] = Match(number, original, alike)
        for number, match in found.items():  # equal to one that is dropped
            if match.similarity is None and match.original in group:
                found[number] = Match(number, found[match.original].original, None)
    return [found[number] for number in sorted(found)]


def _pairs(signatures: np.ndarray, unique: np.ndarray, config: Curation) -> Iterator[tuple[int, int]]:
    """Pairs of documents that share a band and are as similar as asked: each with the first of its bucket, and with
    the one before it there."""
    rows = config.permutations // config.bands
    for band in range(config.bands):
        columns = np.ascontiguousarray(signatures[unique, band * rows : (band + 1) * rows])
        keys = columns.view(np.dtype((np.void, columns.dtype.itemsize * rows))).ravel()
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        if not same.any():
            continue
        place = np.arange(len(order))
        start = np.maximum.accumulate(np.where(np.concatenate([[True], ~same]), place, 0))  # of each one's bucket
        later = place[1:][same]
        pairs = np.unique(np.concatenate([
            np.stack([order[start[later]], order[later]], axis=1), np.stack([order[later - 1], order[later]], axis=1)
        ]), axis=0)  # fmt: skip
        for some in np.array_split(pairs, -(-len(pairs) // 65536)):
            a, b = unique[some[:, 0]], unique[some[:, 1]]
            alike = np.mean(signatures[a] == signatures[b], axis=1) >= config.similarity
            yield from zip(a[alike].tolist(), b[alike].tolist())
