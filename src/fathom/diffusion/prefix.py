"""Prefix block cache (Fast-dLLM, arXiv 2505.22618): keys and values before the block are kept from its first pass.

first step:   full pass, whose K, V of columns before the block are kept
later:        the columns from the block's start to the end
"""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import BlockCache
from fathom.diffusion.dual import DualState
from fathom.models.method import check_range


@dataclasses.dataclass(frozen=True)
class Prefix(BlockCache):
    """Keeps the keys and values of the columns before the block; a step computes the block and all after it.

    delay_steps: full passes of a block before the one whose keys and values are kept.
    refresh: steps from one such pass to the next within a block; None: one a block.
    """

    delay_steps: int = 0
    refresh: int | None = None

    name = "prefix"
    paper = "2505.22618"
    summary = "Keep keys and values before the block; a step computes the block and what follows."
    equation = "K, V = [kept before the block; fresh from its start to the end]"

    def __post_init__(self):
        check_range(self.name, "delay_steps", self.delay_steps, 0)
        if self.refresh is not None:
            check_range(self.name, "refresh", self.refresh, 1)

    def new_state(self, passes):
        return PrefixState(self, passes)


class PrefixState(DualState):
    """Columns after the block are rewritten in every step, so the store holds the same as of the prefix alone."""

    @property
    def last(self):
        return self.passes.length
