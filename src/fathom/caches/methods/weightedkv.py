"""WeightedKV (arXiv 2503.01330): drop the least attended key, fold its value into the right neighbour."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fathom.caches.base import CacheShape, LayerContext
from fathom.caches.token_budget import COUNT_BYTES, Eviction, SlotState, TokenBudget, keep_highest, without_one
from fathom.ops.run_merge import SMALLEST, discarded_slots, fold_runs, run_merge


@dataclasses.dataclass(frozen=True)
class WeightedKV(TokenBudget):
    """When the cache overflows, the key with the lowest ā leaves. ā = A / count, attention received per query that saw
    the slot:

        j = argmin ā over slots n_sink … min(n − n_recent − 1, n − 2)        (ties: the oldest)
        v_{j+1} ← (ā_j v_j + ā_{j+1} v_{j+1}) / (ā_j + ā_{j+1});   slot j leaves, slot j + 1 keeps key and statistics

    A call of several tokens computes ā once, discards the slots with the lowest, and folds runs of discarded values
    left to right.

    prefill: "chunked" (default, `chunk` tokens at a time), "exact" (token by token), "once" (the whole call).
    merge: False drops the value too (plain eviction).
    merge_stats: "keep" the survivor's statistics or "sum" both.
    merge_into_recent: False folds a value whose right neighbour is protected into its left neighbour instead.

    With budget = n_sink + n_recent only one token may leave, and it is folded into the oldest recent one. Keys are then
    those of StreamingLLM; values are only with merge=False.
    Bytes per layer at capacity M: 2·B·G·M·D·bytes + (f + 4)·B·G·M (statistics), f = 4 or 8 (float64).
    """

    prefill: str = "chunked"
    merge: bool = True
    merge_stats: str = "keep"
    merge_into_recent: bool = True

    name = "weightedkv"
    paper = "WeightedKV: Attention Scores Weighted Key-Value Cache Merging for LLMs, arXiv 2503.01330"
    summary = "Merge the value of an evicted token into its neighbour, weighted by received attention."
    equation = "j = argmin ā;  v_{j+1} ← (ā_j v_j + ā_{j+1} v_{j+1}) / (ā_j + ā_{j+1});  slot j leaves"
    variants = ({"budget": 16, "n_sink": 2, "n_recent": 6, "chunk": 5},)
    identity = {"budget": 256, "n_recent": 64}  # noqa: RUF012
    fewest = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("merge_stats", ("keep", "sum"))
        self.check_flag("merge")
        self.check_flag("merge_into_recent")

    def new_state(self, context: LayerContext) -> WeightedState:
        return WeightedState(self, context)

    def slot_statistics(self, shape: CacheShape) -> int:
        return shape.wide_bytes() + COUNT_BYTES


class WeightedState(SlotState):
    """Tokens whose values also hold those of dropped neighbours."""

    method: WeightedKV

    def observed(self, length: int) -> int:
        return length

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        method, slots = self.method, value.shape[2]
        average = self.grown["received"] / self.grown["queries"]
        if method.budget == method.n_sink:  # sinks only, nothing to merge into: StreamingLLM
            return keep_highest(average[:, :1], excess, method.n_sink, 0), value
        protected = max(method.n_recent, 1)
        if method.granularity == "layer":
            average = average.mean(1, keepdim=True).expand_as(average)
        if excess == 1 and method.merge and method.merge_stats == "keep" and method.merge_into_recent:
            return self.step(value, average, slots, protected)
        index = keep_highest(average, excess, method.n_sink, protected)
        if not method.merge:
            return index, value
        if method.merge_into_recent and method.merge_stats == "keep":
            return index, fold_runs(value, average, index)  # `value` is this call's own copy
        discarded = discarded_slots(index, slots)
        to_left = torch.zeros_like(discarded)
        if not method.merge_into_recent:  # the run that ends at the protected window
            edge = slots - protected
            unbroken = discarded[..., method.n_sink : edge].flip(-1).long().cumprod(-1).flip(-1).bool()
            to_left[..., method.n_sink : edge] = unbroken
        value = run_merge(value, average, discarded & ~to_left, excess)
        if not method.merge_into_recent:
            value = run_merge(value.flip(2), average.flip(2), to_left.flip(2), excess).flip(2)
        if method.merge_stats == "sum":
            self.sum_statistics(index, discarded, to_left)
        return index, value

    def eviction(self) -> Eviction | None:
        method = self.method
        candidates = self.budget + 1 - method.n_sink - max(method.n_recent, 1)
        simple = not method.merge or (method.merge_stats == "keep" and method.merge_into_recent)
        return Eviction(method.n_sink, candidates, "average", merge=method.merge) if simple and candidates > 0 else None

    def step(self, value: Tensor, average: Tensor, slots: int, protected: int) -> tuple[Tensor, Tensor]:
        """One token in, one out: merge the pair (j, j + 1) only."""
        n_sink = self.method.n_sink
        leaves = average[..., n_sink : slots - protected].argmin(-1, keepdim=True) + n_sink
        pair = torch.cat((leaves, leaves + 1), dim=-1)
        weight = average.gather(2, pair)
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=SMALLEST)
        where = pair.unsqueeze(-1).expand(*pair.shape, value.shape[-1])
        merged = (weight.unsqueeze(-1) * value.gather(2, where).to(weight.dtype)).sum(2, keepdim=True)
        return without_one(leaves.squeeze(-1), slots), value.scatter(2, where[:, :, 1:], merged.to(value.dtype))

    def sum_statistics(self, index: Tensor, discarded: Tensor, to_left: Tensor) -> None:
        """Add the statistics of discarded slots to the slot that took their value."""
        kept_before = (~discarded).long().cumsum(-1) - (~discarded).long()
        target = index.gather(2, (kept_before - to_left.long()).clamp(0, index.shape[2] - 1))
        for name in ("received", "queries"):
            held = self.grown[name]
            self.grown[name] = torch.zeros_like(held).scatter_add(2, target, held)
