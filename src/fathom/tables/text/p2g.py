"""Prototype-to-Generate (arXiv 2108.12516): sentences of a corpus that look like a description, beside the table."""

from __future__ import annotations

import dataclasses

from fathom.tables.text.base import SlotMethod


@dataclasses.dataclass(frozen=True)
class P2G(SlotMethod):
    """Reads the table and the best prototypes."""

    prototypes: int = 3

    name = "p2g"
    paper = "2108.12516"
    summary = "Read sentences of an unlabelled corpus, chosen by a reranker, beside the table."
    equation = "source = table ⊕ <context_start> prototype …;  L = mean_n max(0, δ − s(T, y) + s(T, c_n))"
    variants = ({}, {"content_aware": 0.5})
