"""T5 as it is, the baseline of every method that tells attention about pairs of tokens."""

from __future__ import annotations

from fathom.models.registry import register
from fathom.tables.base import Relations


@register("relations", "none")
class NoRelations(Relations):
    """Encoder self-attention without relations."""

    summary = "T5's encoder self-attention as it is."
    equation = "a = softmax(q kᵀ + b),  o = a v"
