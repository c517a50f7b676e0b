"""A model that reads the table and nothing else: what every other method is compared with."""

from __future__ import annotations

import dataclasses

from fathom.tables.text.base import SlotMethod


@dataclasses.dataclass(frozen=True)
class TablePlain(SlotMethod):
    """Reads the table alone."""

    name = "table_plain"
    summary = "Fine-tune on the linearised table alone."
    equation = "source = key is value ; key is value ; …"
