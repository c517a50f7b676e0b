"""How a long prompt is cut: so that what reading it needs, beside weights and cache, does not grow with its length.

A forward of n new tokens over all rows holds activations of n tokens. Cut into calls of `TOGETHER` tokens it holds
those of one call, and the logits of the last token only. Models whose cached forward equals the whole one give the
same numbers.
"""

from __future__ import annotations

TOGETHER = 8192  # new tokens of a call, over all rows: enough to keep a GPU's matrix units busy


def tokens_at_once(rows: int, length: int) -> int | None:
    """How many tokens of `rows` prompts of `length` tokens one call reads; None: all."""
    return None if rows * length <= TOGETHER else max(1, TOGETHER // rows)
