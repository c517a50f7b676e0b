"""The steps that a document goes through, in GeoGalactica's order. Each is a filter of datatrove's kind: it keeps a
document (True) or says why not ((False, reason)), and may leave a measured value in `metadata["detail"]`.

    1 language   2 parse   3 cleaning   4, 5 quality   7 decontamination   then datatrove's, if the config names any

Step 6, duplicates, needs all documents: it comes after these (`run.py`), so that a copy which is dropped for another
reason does not take the good one with it. Levels two and three of the quality control (`models.py`) come last.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import simplemma
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from simplemma.strategies.dictionaries.dictionary_factory import SUPPORTED_LANGUAGES

from fathom.curation.cleaning import clean
from fathom.curation.config import MODELS, Curation
from fathom.curation.decontaminate import ContaminationFilter, Questions
from fathom.curation.language import LanguageFilter, known_languages
from fathom.curation.quality import ParseFilter, QualityFilter
from fathom.models.local_paths import refuse_absent
from fathom.models.registry import nearest

ORDER = ("reading", "language", "parse", "cleaning", "quality", "decontamination", "duplicates")
_DATATROVE = "datatrove.pipeline.filters"


class CleaningFilter(BaseFilter):
    """Takes lines out of a document; drops it if nothing is left. The lines are in `metadata["removed"]`."""

    name = "cleaning"
    type = "curation"

    def __init__(self, rules: tuple[str, ...]):
        super().__init__()
        self.rules = rules

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        text, removed = clean(doc.text, self.rules)
        if not text.strip():
            return False, "nothing left"
        doc.text, doc.metadata["removed"] = text, removed
        return True


def filters(config: Curation) -> list[tuple[str, BaseFilter]]:
    """(step, filter) in their order."""
    found: list[tuple[str, BaseFilter]] = []
    if config.language:
        found.append(("language", LanguageFilter(config.language, config.language_confidence)))
    found.append(("parse", ParseFilter(config.min_sections, config.min_words)))
    if config.clean:
        found.append(("cleaning", CleaningFilter(config.clean)))
    found.append(("quality", QualityFilter(config)))
    if config.benchmarks:
        found.append(("decontamination", ContaminationFilter(Questions(config))))
    return found + [(name, _of_datatrove(name, options)) for name, options in (config.filters or {}).items()]


def _of_datatrove(name: str, options: dict) -> BaseFilter:
    known = vars(importlib.import_module(_DATATROVE))
    names = [key for key, value in known.items() if isinstance(value, type) and key.endswith("Filter")]
    if name not in names:
        raise ValueError(
            f"filters.{name}: datatrove has no such filter{nearest(name, names)}; it has {', '.join(names)}"
        )
    try:
        return known[name](**options)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"filters.{name}: {error}") from error


def check(config: Curation) -> None:
    """Raise ValueError or FileNotFoundError for what the config names and is not there."""
    if config.language and config.language not in known_languages():
        raise ValueError(
            f"language={config.language!r}: py3langid knows {', '.join(known_languages())}; give one of them, or null"
        )
    if config.language and config.max_unknown is not None and config.language not in SUPPORTED_LANGUAGES:
        raise ValueError(
            f"max_unknown={config.max_unknown}: simplemma {simplemma.__version__} has no words of language="
            f"{config.language!r}; set max_unknown to null"
        )
    for name in MODELS:
        if (checkpoint := getattr(config, name)) is not None:
            refuse_absent(checkpoint, f"{name}={checkpoint!r}")
    if config.known_words and not Path(config.known_words).is_file():
        raise FileNotFoundError(f"known_words={config.known_words!r}: no such file")
