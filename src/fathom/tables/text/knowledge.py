"""Training pairs of a knowledge adapter: sentences of the corpus with some words masked, and the full sentences.

    table_values   every maximal run of words of the sentence that occur in the table's values is one <MASK> (AKG)
    random_span    spans of Poisson(3) words, 30 % of them, as BART's infilling
    entity         runs of capitalised or numeric words

AKG released no code that made its templates: `table_values` follows the paper's figure, and leaves out stop words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fathom.tables.text.linearize import _WORD, MASK, STOP_WORDS, Table, words

SHARE, POISSON = 0.3, 3.0


def mask_runs(sentence: str, chosen: Sequence[bool], unit: str = "run") -> tuple[str, list[str]]:
    """The sentence with a mask for every run of chosen words, and what the masks stand for.

    A run goes on over spaces and ends at a mark of punctuation. unit: "word" gives every word a mask of its own.
    """
    spans: list[list[int]] = []
    for found, picked in zip(_words_of(sentence), chosen, strict=True):
        if not picked:
            continue
        joined = unit == "run" and spans and sentence[spans[-1][1] : found.start()].strip() == ""
        if joined and spans[-1][1] != found.start():
            spans[-1][1] = found.end()
        else:
            spans.append([found.start(), found.end()])
    text, hidden, at = "", [], 0
    for start, end in spans:
        text += sentence[at:start] + MASK
        hidden.append(sentence[start:end])
        at = end
    return text + sentence[at:], hidden


def _words_of(sentence: str) -> list[re.Match[str]]:
    """The words of a sentence, masks left out."""
    masks = [found.span() for found in re.finditer(re.escape(MASK), sentence)]
    return [w for w in _WORD.finditer(sentence) if not any(a <= w.start() < b for a, b in masks)]


def mask_fill(sentence: str, table: Table, unit: str = "run", source: str = "values") -> tuple[str, list[str]] | None:
    """The sentence with the table's words masked, and the masked words.

    None if no word, or every word, is the table's. Stop words are never masked, as they carry no content of a table.
    """
    texts = table.values if source == "values" else (*table.values, *table.keys)
    known = {word for text in texts for word in words(text)} - STOP_WORDS
    chosen = [found.group().lower() in known for found in _words_of(sentence)]
    return mask_runs(sentence, chosen, unit) if any(chosen) and not all(chosen) else None


def mask_entities(sentence: str, unit: str = "run") -> tuple[str, list[str]] | None:
    """The sentence without its capitalised and numeric words, but for a first word that is a stop word."""
    found = [word.group() for word in _words_of(sentence)]
    chosen = [(word[0].isupper() or word[0].isdigit()) and word.lower() not in STOP_WORDS for word in found]
    return mask_runs(sentence, chosen, unit) if any(chosen) and not all(chosen) else None


def mask_spans(sentence: str, random: np.random.Generator) -> tuple[str, list[str]] | None:
    """The sentence with spans of Poisson(3) words masked until 30 % of them are; at least one, never all."""
    count = len(_words_of(sentence))
    chosen = np.zeros(count, dtype=bool)
    wanted = min(max(1, round(SHARE * count)), count - 1)
    while chosen.sum() < wanted:
        length = min(max(1, int(random.poisson(POISSON))), wanted - int(chosen.sum()))
        start = int(random.integers(count))
        chosen[start : start + length] = True
    return mask_runs(sentence, chosen.tolist()) if count > 1 else None


def knowledge_pairs(
    tables: Iterable[tuple[Table, Sequence[str]]], task: str = "table_values", unit: str = "run",
    source: str = "values", seed: int = 0,
) -> Iterator[tuple[Table, str, str]]:  # fmt: skip
    """(table, masked sentence, sentence) of tables with the sentences found for them. Every such triple comes once."""
    seen: set[tuple[str, str]] = set()
    random = np.random.default_rng(seed)
    for table, found in tables:
        for sentence in found:
            if task == "table_values":
                masked = mask_fill(sentence, table, unit, source)
            else:
                masked = mask_entities(sentence, unit) if task == "entity" else mask_spans(sentence, random)
            if masked is not None and (masked[0], sentence) not in seen:
                seen.add((masked[0], sentence))
                yield table, masked[0], sentence
