"""Table to text: from a table to a description, with few labelled pairs.

Methods are frozen dataclasses, one file each, and settings of the same parts: `TableLinearizer`, `PrototypeSelector`,
`ContentPlanner`, the knowledge adapter (a PEFT method) and `TableGenerator`.
"""

from __future__ import annotations

import importlib
from typing import Any

from fathom.tables.text.akg import AKG
from fathom.tables.text.base import SlotMethod, TableMethod, from_dict
from fathom.tables.text.ctrlscitab import CTRLSciTab
from fathom.tables.text.linearize import Grid, Table, TableLinearizer
from fathom.tables.text.p2g import P2G
from fathom.tables.text.plain import TablePlain
from fathom.tables.text.promptmize import PromptMize

METHODS: dict[str, type[TableMethod]] = {cls.name: cls for cls in (AKG, CTRLSciTab, P2G, PromptMize, TablePlain)}
_PLACES = {
    "KnowledgeAdapterConfig": "adapter",
    "TableGenerator": "generator",
    "PrototypeSelector": "prototypes",
    "ContentPlanner": "plan",
}
__all__ = [
    "AKG", "METHODS", "P2G", "CTRLSciTab", "Grid", "PromptMize", "SlotMethod", "Table", "TableLinearizer",
    "TableMethod", "TablePlain", "from_dict", *_PLACES,
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
