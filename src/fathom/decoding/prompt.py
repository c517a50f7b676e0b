"""Cutting a long prompt into calls, so that the memory for activations does not grow with its length.

A forward of n new tokens holds activations of n tokens, over all rows. Cut into calls of `TOGETHER` tokens, reading
holds those of one call, and logits of the last token only. Results are the same for models whose cached forward equals
the whole one.
"""

from __future__ import annotations

TOGETHER = 8192  # new tokens of a call, over all rows: enough to keep a GPU's matrix units busy


def tokens_at_once(rows: int, length: int) -> int | None:
    """The number of tokens a row that one call reads, for `rows` prompts of `length` tokens; None: all."""
    return None if rows * length <= TOGETHER else max(1, TOGETHER // rows)
