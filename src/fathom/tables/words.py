"""Words of a question and of names: where they stand, their lemmas, and which of them say nothing."""

from __future__ import annotations

import dataclasses
import functools
import re

WORD = re.compile(r"\d+(?:[.,:/-]\d+)*|[’']s\b|[^\W\d_]+(?:[’'](?!s\b)[^\W\d_]+)*|\w+|[^\w\s]")
# NLTK's English stop words, which the official code and BRIDGE use.
_LIST = """
a about above after again against ain all am an and any are aren aren't as at be because been before being below
between both but by can couldn couldn't d did didn didn't do does doesn doesn't doing don don't down during each
few for from further had hadn hadn't has hasn hasn't have haven haven't having he her here hers herself him
himself his how i if in into is isn isn't it it's its itself just ll m ma me mightn mightn't more most mustn
mustn't my myself needn needn't no nor not now o of off on once only or other our ours ourselves out over own re
s same shan shan't she she's should should've shouldn shouldn't so some such t than that that'll the their
theirs them themselves then there these they this those through to too under until up ve very was wasn wasn't we
were weren weren't what when where which while who whom why will with won won't wouldn wouldn't y you you'd
you'll you're you've your yours yourself yourselves
"""
STOP_WORDS = frozenset(_LIST.split())


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of a text: as it is there, its lemma in lower case, and the characters [start, stop)."""

    text: str
    lemma: str
    start: int
    stop: int


def split(text: str) -> list[Word]:
    """The words of a text, with lemmas and places."""
    return [Word(m.group(), lemma(m.group().lower()), m.start(), m.end()) for m in WORD.finditer(text)]


@functools.lru_cache(maxsize=100_000)
def lemma(word: str) -> str:
    """The lemma of an English word in lower case, by simplemma."""
    import simplemma

    return simplemma.lemmatize(word, "en").lower() if word.isalpha() else word


@functools.lru_cache(maxsize=100_000)
def lemmas(name: str) -> tuple[str, ...]:
    """The lemmas of a name's words."""
    return tuple(word.lemma for word in split(name))


def number(text: str) -> str | None:
    """A number as `str(float)` writes it, by which 3 and 3.0 are one; None for what is no number."""
    try:
        return str(float(text))
    except (ValueError, OverflowError):
        return None
