"""AKG (arXiv 2302.12468): prototypes beside the table, and an adapter that has learned the domain's sentences.

Three stages, each with the parameters of the others untouched:

1. the selector learns from the few pairs which sentences of the corpus look like a description (`prototypes.py`);
2. the knowledge adapter learns to fill in words of a table in the corpus' sentences, with the host frozen
(`knowledge.py`); 3. the host learns from the few pairs, with the adapter active and frozen.

Differences from the released code: the adapter is frozen in stage 3, as the paper says (`trains="all"` is the code's);
values with ":" or a tab are escaped; the last batch of an evaluation is not filled up.
"""

from __future__ import annotations

import dataclasses

from fathom.tables.text.base import SlotMethod


@dataclasses.dataclass(frozen=True)
class AKG(SlotMethod):
    """A host with a knowledge adapter that reads the table and three prototypes."""

    prototypes: int = 3
    adapter: bool = True

    name = "akg"
    paper = "2302.12468"
    summary = "Prototypes beside the table, and a bottleneck adapter that learned from an unlabelled corpus."
    equation = (
        "source = table ⊕ prototypes;  A(h) = h + W_up ReLU(W_down h + b_down) + b_up after every feed-forward network"
    )
    variants = ({"reduction": 4}, {"placement": "last_layer", "reduction": 4}, {"planner": "oracle", "reduction": 4})
