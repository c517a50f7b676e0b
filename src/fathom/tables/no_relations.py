"""T5 without relations, the baseline of methods that give attention relations between tokens."""

from __future__ import annotations

from fathom.models.registry import register
from fathom.tables.base import Relations


@register("relations", "none")
class NoRelations(Relations):
    """Encoder self-attention without relations."""

    summary = "T5's encoder self-attention as it is."
    equation = "a = softmax(q kᵀ + b),  o = a v"
