"""Step 7, decontamination: a document that holds a question of a benchmark is dropped.

It holds one if 13 words in a row are the same (case, punctuation and markup do not count). A question of 8 to 12 words
is searched for as a whole. Shorter ones occur in too many texts by chance; they are counted as unchecked.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter

from fathom.curation.config import Curation
from fathom.curation.words import identities, ngrams, words
from fathom.data.sources import Source

_SKIPPED = ("id", "subject", "source", "category", "type", "label", "answerkey")  # fields whose text is no question's


class Questions:
    """The n-grams of all benchmarks.

    Attributes:
        unchecked: benchmark -> rows of which no field is long enough.
        rows: benchmark -> rows.
    """

    def __init__(self, config: Curation):
        self.ngram, self.shortest = config.benchmark_ngram, config.benchmark_shortest
        self.rows: collections.Counter[str] = collections.Counter()
        self.unchecked: collections.Counter[str] = collections.Counter()
        found: dict[int, dict[int, str]] = collections.defaultdict(dict)  # words -> hash -> benchmark
        for name, file in (config.benchmarks or {}).items():
            for row, _ in Source(file, argument=f"benchmarks.{name}").rows(halves=True):
                self.rows[name] += 1
                lengths = [self._add(text, name, found) for text in _texts(row)]
                self.unchecked[name] += not any(lengths)
            if not self.rows[name]:
                raise ValueError(f"benchmarks.{name}={file!r}: holds no rows")
        self.names = dict(found)
        self.hashes = {n: np.sort(np.fromiter(by_hash, np.uint64, len(by_hash))) for n, by_hash in found.items()}

    def _add(self, text: str, name: str, found: dict[int, dict[int, str]]) -> bool:
        ids = identities(text)
        n = min(self.ngram, len(ids))
        if n < self.shortest:
            return False
        for key in ngrams(ids, n).tolist():
            found[n].setdefault(key, name)
        return True

    def find(self, text: str) -> tuple[str, str] | None:
        """(benchmark, the words that are its) of a text, or None."""
        ids = identities(text)
        for n, hashes in self.hashes.items():
            grams = ngrams(ids, n)
            if not len(grams):
                continue
            hit = hashes[np.minimum(np.searchsorted(hashes, grams), len(hashes) - 1)] == grams
            if hit.any():
                at = int(np.argmax(hit))
                return self.names[n][int(grams[at])], " ".join(words(text)[at : at + n])
        return None


def _texts(value: Any, field: str = "") -> list[str]:
    """All texts in a row, those in lists and mappings included."""
    if isinstance(value, str):
        return [] if field.lower() in _SKIPPED else [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in _texts(inner, str(key))]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner, field)]
    return []


class ContaminationFilter(BaseFilter):
    """A filter that drops documents with a question of a benchmark."""

    name = "decontamination"
    type = "curation"

    def __init__(self, questions: Questions):
        super().__init__()
        self.questions = questions

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        found = self.questions.find(doc.text)
        if found is None:
            return True
        doc.metadata["detail"] = f"{found[0]}: {found[1]}"
        return False, "benchmark"
