"""dKV-Cache (arXiv 2505.15781): a token's keys and values are kept once it has been computed as a revealed one.

    every `cache_steps` steps of a block, from its first:   full pass
    other steps:   the tokens without kept K, V: hidden ones, and those revealed in the step before ("delayed")

`mode` "greedy" computes only the tokens that were revealed in the step before and hidden ones of the block within
`window`/2 of them, and predicts only these. If they are fewer than the schedule's quota, the nearest others of the
block are added; the paper does not cover this case. Nothing is kept from one block to the next.
"""

from __future__ import annotations

import dataclasses

import torch

from fathom.diffusion.base import BlockCache, BlockState
from fathom.diffusion.passes import Columns, Store
from fathom.models.method import check_choice, check_range


@dataclasses.dataclass(frozen=True)
class DKVCache(BlockCache):
    """Keeps revealed tokens, one step after they were revealed.

    mode: "decode": a step computes all tokens that are not kept; "greedy": only neighbours of the newest ones.
    cache_steps: steps of a block from one full pass to the next.
    window: width of the neighbourhood in tokens (greedy).
    """

    mode: str = "decode"
    cache_steps: int = 8
    window: int = 4

    name = "dkv_cache"
    paper = "2505.15781"
    summary = "Keep a token's keys and values from the step after it was revealed; recompute all others."
    equation = "computed = {j: hidden, or revealed in the step before};  K, V of the others are kept"
    whole_block = False

    def __post_init__(self):
        check_choice(self.name, "mode", self.mode, ("decode", "greedy"))
        check_range(self.name, "cache_steps", self.cache_steps, 1)
        check_range(self.name, "window", self.window, 0)

    def new_state(self, passes):
        return DKVState(self, passes)


class DKVState(BlockState):
    """Keys and values of revealed tokens, renewed every `cache_steps` steps."""

    def __init__(self, method, passes):
        super().__init__(method, passes)
        self.store = Store(passes)

    def begin(self, block):
        self.block = block
        self.store.layers = []

    def states(self, canvas, hidden, step, quota):
        known = ~hidden | ~self.passes.real
        if step % self.method.cache_steps == 0:
            self.kept = known
            return self.store.fill(canvas)
        fresh = known & ~self.kept  # revealed in the step before
        block = slice(self.block.start, self.block.stop)
        chosen = torch.zeros_like(hidden)
        if self.method.mode == "decode":
            chosen = hidden.clone()
            computed = chosen | fresh
        else:
            chosen[:, block] = self.near(fresh[:, block], hidden[:, block], quota)
            computed = chosen | fresh
        if self.block.shift:  # and the columns whose states predict the chosen tokens of the block
            computed[:, self.block.first : self.block.stop - 1] |= chosen[:, self.block.first + 1 : self.block.stop]
        self.kept = self.kept | (known & computed)
        return self.store.update(canvas, Columns.where(computed))

    def near(self, fresh, hidden, quota):
        """The hidden tokens of the block that a greedy step predicts."""
        places = torch.arange(fresh.shape[1], device=fresh.device)
        apart = (places[:, None] - places).abs().expand(len(fresh), -1, -1)
        nearest = torch.where(fresh[:, None], apart, fresh.shape[1]).amin(-1)
        order = torch.where(hidden, nearest, 2 * fresh.shape[1]).argsort(dim=1, stable=True)
        rank = order.argsort(dim=1)
        return hidden & ((nearest <= self.method.window // 2) | (rank < quota.clamp(min=1)[:, None]))

    def nbytes(self):
        return self.store.nbytes()
