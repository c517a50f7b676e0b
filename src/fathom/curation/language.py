"""Step 1, language: a document is kept if it is in the wanted one (by py3langid, whose model is in its package)."""

from __future__ import annotations

import functools
import re
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from py3langid.langid import MODEL_FILE, LanguageIdentifier

_SAMPLE = 200  # characters that are looked at, of the beginning, the middle and the end each
_MARKER = re.compile(r"\[(?:START|END)_[A-Z_]+\]")


@functools.cache
def _identifier() -> Any:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def identify(text: str) -> tuple[str, float]:
    """(language, confidence between 0 and 1), ISO 639-1, of the text by three samples of it."""
    middle = (len(text) - _SAMPLE) // 2
    sample = text if len(text) <= 3 * _SAMPLE else text[:_SAMPLE] + text[middle:][:_SAMPLE] + text[-_SAMPLE:]
    return _identifier().classify(_MARKER.sub(" ", sample))


def known_languages() -> list[str]:
    """The languages that `identify` can return."""
    return list(_identifier().labels)


class LanguageFilter(BaseFilter):
    """A filter that drops documents in another language than `wanted`, or in it with less than `confidence`."""

    name = "language"
    type = "curation"

    def __init__(self, wanted: str, confidence: float):
        super().__init__()
        self.wanted, self.confidence = wanted, confidence

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        language, sure = identify(doc.text)
        doc.metadata["language"] = language
        if language == self.wanted and sure >= self.confidence:
            return True
        doc.metadata["detail"] = f"{language}, {sure:.2f}"
        return False, "language"
