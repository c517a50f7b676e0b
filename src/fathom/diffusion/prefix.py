"""Prefix block cache (Fast-dLLM, arXiv 2505.22618): keys and values before the block are kept from its first pass.

first step:   full pass, whose K, V of columns before the block are kept
later:        the columns from the block's start to the end
"""

from __future__ import annotations

import dataclasses

from fathom.diffusion.dual import Dual, DualState


@dataclasses.dataclass(frozen=True)
class Prefix(Dual):
    """Keeps the keys and values of the columns before the block; a step computes the block and all after it."""

    name = "prefix"
    summary = "Keep keys and values before the block; a step computes the block and what follows."
    equation = "K, V = [kept before the block; fresh from its start to the end]"

    def new_state(self, passes):
        return PrefixState(self, passes)


class PrefixState(DualState):
    """The state of a prefix cache. Columns after the block are rewritten in every step, so only the prefix
    is reused.
    """

    @property
    def last(self):
        return self.passes.length
