"""Dual block cache (Fast-dLLM, arXiv 2505.22618): all keys and values outside the block are kept from its first pass.

    step < delay:   full pass
    step = delay:   full pass, whose K, V of all columns are kept        (and every `refresh` steps after it)
    later:          only the block's columns, which rewrite their own K, V and read all

Fast-dLLM keeps unrotated keys and rotates all of them in every step; here rotated keys are kept. Its index of replaced
positions mixes the rows of a batch.
"""

from __future__ import annotations

import dataclasses

from fathom.diffusion.base import BlockCache, BlockState
from fathom.diffusion.passes import Columns, Store
from fathom.models.method import check_range


@dataclasses.dataclass(frozen=True)
class Dual(BlockCache):
    """Keeps the keys and values of all columns; a step computes the block.

    delay_steps: full passes of a block before the one whose keys and values are kept.
    refresh: steps from one such pass to the next within a block; None: one a block.
    """

    delay_steps: int = 0
    refresh: int | None = None

    name = "dual"
    paper = "2505.22618"
    summary = "Keep keys and values outside the block, before and after it, for the steps of a block."
    equation = "K, V = [kept outside the block; fresh in it]"

    def __post_init__(self):
        check_range(self.name, "delay_steps", self.delay_steps, 0)
        if self.refresh is not None:
            check_range(self.name, "refresh", self.refresh, 1)

    def new_state(self, passes):
        return DualState(self, passes)


class DualState(BlockState):
    """Keys and values of all columns, as the last full pass left them."""

    def __init__(self, method, passes):
        super().__init__(method, passes)
        self.store = Store(passes)

    def states(self, canvas, hidden, step, quota):
        since = step - self.method.delay_steps
        if since < 0:
            return self.passes.full(canvas)
        if since == 0 or (self.method.refresh and since % self.method.refresh == 0):
            return self.store.fill(canvas)
        return self.store.update(canvas, Columns.stretch(self.block.first, self.last, len(canvas), canvas.device))

    @property
    def last(self) -> int:
        """The end of the columns that a step computes."""
        return self.block.stop

    def nbytes(self):
        return self.store.nbytes()
