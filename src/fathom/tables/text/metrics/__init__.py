"""Scores of descriptions of tables. All functions take texts and tables; none downloads anything.

BLEURT is refused (`bleurt`): its checkpoints and its TensorFlow code are in no package registry.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

_PLACES = {
    "parent": "entailed",
    "bleu": "overlap",
    "rouge4": "overlap",
    "meteor": "overlap",
    "bert_score": "overlap",
    "distinct": "mentions",
    "mentioned": "mentions",
    "coverage": "mentions",
    "off_target": "mentions",
    "number_precision": "mentions",
    "plan_adherence": "mentions",
    "plan_distance": "mentions",
    "hallucination": "mentions",
    "CTRLEval": "ctrleval",
}
__all__ = [*_PLACES, "bleurt"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def bleurt(*arguments: Any, **options: Any) -> NoReturn:
    """Raises ValueError: the score cannot be computed here."""
    raise ValueError(
        "metric='bleurt': BLEURT's learned checkpoints and its code are in no package registry, so its score cannot be "
        "reproduced; use bert_score or CTRLEval with a model of your own"
    )
