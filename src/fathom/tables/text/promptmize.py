"""PromptMize (arXiv 2302.04415): a planner says which slots to tell in which order, and an adapter knows the domain.

No code and no text of the method is public beyond its abstract: the planner (`plan.py`) and its training are our
reconstruction from the authors' next system (AKG) and from PlanGen. The stages:

1. the planner learns the order in which references tell the slots;
2. the knowledge adapter learns from the corpus, as in AKG;
3. the host learns with the references' own plans as prompts; at inference the planner's plan is the prompt.
"""

from __future__ import annotations

import dataclasses

from fathom.tables.text.base import Planner, SlotMethod


@dataclasses.dataclass(frozen=True)
class PromptMize(SlotMethod):
    """Reads the table and a plan of its slots, through a host with a knowledge adapter."""

    planner: Planner = "auto"
    adapter: bool = True

    name = "promptmize"
    paper = "2302.04415"
    summary = "A plan of the slots beside the table, and a bottleneck adapter that learned from an unlabelled corpus."
    equation = "source = table ⊕ <content_start> item …,  items = planner(table)"
    variants = (
        {"reduction": 4},
        {"planner": "oracle", "plan_item": "key_value", "reduction": 4},
        {"planner": "prefix", "prefix_tokens": 3, "adapter": False},
        {"planner": "free_prefix", "prefix_tokens": 3, "adapter": False},
    )
