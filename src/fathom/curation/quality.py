"""Steps 2, 4 and 5, quality of a document by rules: its measures, and their bounds.

These are the first of Innovator's three levels (arXiv 2507.18671) and steps 2, 4 and 5 of GeoGalactica's cleaning. A
rule is a pure function of the text, so the documents that are kept do not depend on the order of the rules; only
which of several reasons is named does.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from pathlib import Path

import simplemma
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter

from fathom.curation.config import Curation

_MARKER = re.compile(r"\[(?:START|END)_[A-Z_]+\]")
_SYMBOL = re.compile(r"[^\w\s]|_")
_WORD = re.compile(r"[^\W\d_]{3,}")  # of letters alone: what a dictionary can know


RULES = {  # reason -> option, what is measured, whether the option is a least value
    "too short": ("min_characters", "characters", True),
    "too long": ("max_characters", "characters", False),
    "symbols": ("max_symbols", "symbols", False),
    "few words with letters": ("min_alphabetic", "alphabetic", True),
    "short words": ("min_word_length", "word_length", True),
    "long words": ("max_word_length", "word_length", False),
    "duplicate lines": ("max_duplicate_lines", "duplicate_lines", False),
    "repeated bigram": ("max_top_bigram", "top_bigram", False),
    "unknown words": ("max_unknown", "unknown", False),
}


def measure(text: str, language: str | None = "en", known: frozenset[str] = frozenset()) -> dict[str, float]:
    """The measures that `RULES` bound, of a text without its scientific markers.

    language: of the dictionary; None: no word is asked for.   known: words beside the dictionary's, in lower case.
    """
    text = _MARKER.sub(" ", text) if "[START_" in text else text
    tokens = text.split()
    spaceless = sum(map(len, tokens))
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    bigrams = collections.Counter(itertools.pairwise(tokens))
    (first, second), often = max(bigrams.items(), key=lambda item: item[1], default=(("", ""), 0))
    asked = collections.Counter(_WORD.findall(text)) if language else {}
    unknown = sum(n for word, n in asked.items() if not (_is_known(word, language or "") or word.lower() in known))
    return {
        "characters": len(text),
        "symbols": len(_SYMBOL.findall(text)) / max(1, spaceless),
        "alphabetic": sum(token.isalpha() or any(map(str.isalpha, token)) for token in tokens) / max(1, len(tokens)),
        "word_length": spaceless / max(1, len(tokens)),
        "duplicate_lines": 1 - len(set(lines)) / max(1, len(lines)),
        "top_bigram": often * (len(first) + len(second)) / max(1, spaceless) if often > 1 else 0.0,
        "unknown": unknown / max(1, sum(asked.values())),
    }


def refusal(config: Curation, measured: dict[str, float]) -> tuple[str, str] | None:
    """(reason, measured value against the bound) of the first rule that is broken; None if none is."""
    for reason, (option, what, least) in RULES.items():
        bound, value = getattr(config, option), measured[what]
        if bound is not None and (value < bound if least else value > bound):
            return reason, f"{value:.4g} {'<' if least else '>'} {bound:g}"
    return None


@functools.lru_cache(maxsize=1 << 18)
def _is_known(word: str, language: str) -> bool:
    return simplemma.is_known(word, lang=language) or simplemma.is_known(word.lower(), lang=language)


class QualityFilter(BaseFilter):
    """A filter that drops documents by the rules."""

    name = "quality"
    type = "curation"

    def __init__(self, config: Curation):
        super().__init__()
        asked = config.max_unknown is not None
        self.config, self.language = config, config.language if asked else None
        text = Path(config.known_words).read_text(encoding="utf-8") if config.known_words and asked else ""
        self.known = frozenset(text.lower().split())

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        refused = refusal(self.config, measure(doc.text, self.language, self.known))
        if refused is None:
            return True
        doc.metadata["detail"] = refused[1]
        return False, refused[0]


class ParseFilter(BaseFilter):
    """A filter that drops badly parsed papers: without a title, or with too few sections and words. Texts that no
    parser made always pass.
    """

    name = "parse"
    type = "curation"

    def __init__(self, min_sections: int, min_words: int):
        super().__init__()
        self.min_sections, self.min_words = min_sections, min_words

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        if "sections" not in doc.metadata:
            return True
        if not doc.metadata.get("title"):
            return False, "no title"
        sections, words = doc.metadata["sections"], len(doc.text.split())
        if sections >= self.min_sections or words >= self.min_words:
            return True
        doc.metadata["detail"] = f"{sections} sections, {words} words"
        return False, "parsed badly"
