"""Links from words of a question to tables, columns and cells: RASAT's schema linking and BRIDGE's values.

Names: spans of the question up to the longest name, shortest first. The whole name, lemma by lemma, is "exact"; one
word of it or a longer part is "partial". Cells: one word of the question that is a word of a cell, or the same number,
where the name did not match. BRIDGE (arXiv 2012.12627) finds cells that nearly stand in the question, to write them
beside their column.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fathom.tables.database import Database
from fathom.tables.schema import STAR, Schema
from fathom.tables.words import STOP_WORDS, Word, lemmas, number

NONE, PARTIAL, EXACT, VALUE = range(4)
_SEPARATORS = frozenset("'\"()`,.?! ")
_COMMON = frozenset(("no", "yes", "many"))


def link_names(words: Sequence[Word], names: Sequence[str]) -> np.ndarray:
    """NONE, PARTIAL or EXACT of every word [words] to every name [names]."""
    found = np.zeros((len(words), len(names)), dtype=np.uint8)
    split = [lemmas(name) for name in names]
    whole = [" ".join(name) for name in split]
    longest = max(map(len, split), default=0)
    for size in range(1, longest + 1):
        for start in range(len(words) - size + 1):
            phrase = " ".join(word.lemma for word in words[start : start + size])
            if phrase in STOP_WORDS:
                continue
            for index, name in enumerate(whole):
                if phrase == name:
                    found[start : start + size, index] = EXACT
                elif phrase in split[index] if size == 1 else phrase in name:
                    found[start : start + size, index] = PARTIAL
    return found


def link_columns(words: Sequence[Word], schema: Schema, database: Database | None) -> np.ndarray:
    """NONE, PARTIAL, EXACT, or VALUE (a cell has the word), of every word to every column; "*" has no links."""
    found = link_names(words, [column.words for column in schema.columns])
    found[:, STAR] = NONE
    if database is None:
        return found
    spoken = [number(word.text) or word.text.lower() for word in words]
    for index in range(1, len(schema.columns)):
        cells = _cell_words(database, index)
        if not cells:
            continue
        for place, word in enumerate(spoken):
            if found[place, index] == NONE and word in cells and word not in STOP_WORDS:
                found[place, index] = VALUE
    return found


@functools.lru_cache(maxsize=10_000)
def _cell_words(database: Database, index: int) -> frozenset[str]:
    """The words and numbers of a column's cells; none for a column whose name has the word "id"."""
    if "id" in lemmas(database.schema.columns[index].words):
        return frozenset()
    found: set[str] = set()
    for value in database.values(index):
        as_number = number(str(value))
        found.update([as_number] if as_number is not None else str(value).lower().split())
    return frozenset(found)


def bridge_values(question: str, database: Database, column: int, threshold: float = 0.85, most: int = 2) -> list[str]:
    """Cells of a column that nearly match words of the question, the best first, at most `most`."""
    values = [value for value in database.values(column) if isinstance(value, str)]
    best: dict[str, tuple[float, int, str]] = {}  # of cells that share a match with the question the last counts
    grams = _trigrams(question.lower())
    lower = question.lower()
    if len(lower) != len(question):  # a character with a longer lower case would move the places
        question = lower
    for value in values:
        scored = _score(question, lower, grams, value, threshold)
        if scored is not None:
            best[scored[2]] = (scored[0], scored[1], value)
    exact_alone = "name" in database.schema.columns[column].name
    ranked = sorted(best.values(), key=lambda entry: entry[:2], reverse=True)
    return [value for score, _, value in ranked if score == 1 or not exact_alone][:most]


def _score(
    question: str, lower: str, grams: frozenset[str], value: str, threshold: float
) -> tuple[float, int, str] | None:
    """(score, length of the match, the match) of one cell, or None below the threshold."""
    from rapidfuzz import fuzz

    cell = value.strip().lower()
    # A match below 3 characters ends in a span too short for the threshold, unless the cell is short itself.
    if not cell or (len(cell) > 5 and not any(cell[i : i + 3] in grams for i in range(len(cell) - 2))):
        return None
    match = difflib.SequenceMatcher(None, lower, cell).find_longest_match(0, len(lower), 0, len(cell))
    span = _to_words(lower, match.a, match.a + match.size) if match.size else None
    if span is None or span[1] - span[0] < 2:
        return None
    matched, source = cell[match.b : match.b + match.size].strip(), lower[span[0] : span[1]].strip()
    if not matched or number(matched.replace(",", "")) is not None or matched == "id":
        return None
    if STOP_WORDS & {matched, source, cell}:
        return None
    if source.endswith(matched + "'s"):
        score = 1.0
    else:
        score = fuzz.ratio(cell, source) / 100 if _first(cell) == _first(source) else 0.0
    must_be_equal = bool(_COMMON & {matched, source, cell}) or value.isupper()
    return (score, match.size, matched) if score >= (1 if must_be_equal else threshold) else None


def _to_words(text: str, start: int, stop: int) -> tuple[int, int] | None:
    """The match up to a separator, at most one character before it and three behind; None where there is none."""
    first = next((i for i in range(start, start - 2, -1) if i < 0 or text[i] in _SEPARATORS), None)
    last = next((i for i in range(stop - 1, stop + 3) if i >= len(text) or text[i] in _SEPARATORS), None)
    if first is None or last is None:
        return None
    first, last = max(first, 0), min(last, len(text) - 1)
    while first < len(text) and text[first] in _SEPARATORS:
        first += 1
    while last >= 0 and text[last] in _SEPARATORS:
        last -= 1
    return first, last + 1


def _first(text: str) -> str:
    return next((c for c in text if c not in _SEPARATORS), "")


@functools.lru_cache(maxsize=64)
def _trigrams(text: str) -> frozenset[str]:
    return frozenset(text[i : i + 3] for i in range(len(text) - 2))


def values_of(question: str, database: Database | None) -> dict[int, list[str]]:
    """BRIDGE's cells of every column of text, by the column's number."""
    if database is None:
        return {}
    found: dict[int, Any] = {n: bridge_values(question, database, n) for n in range(1, len(database.schema.columns))}
    return {column: values for column, values in found.items() if values}
