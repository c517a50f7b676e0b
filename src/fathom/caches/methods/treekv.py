"""TreeKV (arXiv 2501.04987): few old tokens, many new ones, with a smooth transition along an implicit binary tree."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fathom.caches.base import CacheShape, LayerContext
from fathom.caches.token_budget import COUNT_BYTES, Eviction, SlotState, TokenBudget, with_protected, without_one
from fathom.ops.tree_sweep import tree_sweep


@dataclasses.dataclass(frozen=True)
class TreeKV(TokenBudget):
    """A pointer sweeps over the c = budget − n_sink − n_recent tree slots, and the two slots at the pointer compete.

        s̄ = S / C;   of slots n_sink + p and n_sink + p + 1 the one with lower s̄ leaves (ties: the older);
        p ← (p + stride) mod c

    S is the attention that a slot received and C the number of queries that saw it. Every sweep halves the older slots.
    c = 0 is StreamingLLM.

    block: None is the largest of 1 … 32 that three times fits the tree slots.
    score: "avg" (S/C), "sum" (S), "last" (the last query's weights), "none" (always keep the older of the pair).
    stride: slots that the pointer moves in a step: 1, as in the paper, or 2.
    scope: slots that compete at a time; the method is defined for 2.
    prefill: "block" (default: a long first call is swept in blocks of `block` tokens, scored by the last block's
        queries; later calls are swept by token with frozen scores), "chunked" (frozen scores per `chunk`), "sequential"
        (token by token: the rule itself).
    Bytes per layer at capacity M: 2·B·G·M·D·bytes + (f + 4)·B·G·M + 8·B (statistics, pointer), f = 4 or 8 (float64).
    """

    score: str = "avg"
    stride: int = 1
    scope: int = 2
    prefill: str = "block"
    block: int = None  # type: ignore[assignment]  # None only until __post_init__

    name = "treekv"
    paper = "TreeKV: Smooth Key-Value Cache Compression with Tree Structures, arXiv 2501.04987"
    summary = "Thin the past like a tree: the further back, the sparser, by local comparisons of attention."
    equation = (
        "at pointer p the slot of p, p + 1 with the lower S/C leaves;  "
        "p ← (p + stride) mod (budget − n_sink − n_recent)"
    )
    variants = ({"budget": 16, "n_sink": 2, "n_recent": 6, "block": 3},)
    identity = {"budget": 256, "n_recent": 64}  # noqa: RUF012
    fewest = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("score", ("avg", "sum", "last", "none"))
        if self.block is None:
            object.__setattr__(self, "block", max(1, min(32, self.tree_slots // 3)))
        self.check_at_least("block", 1)
        self.check_at_least("stride", 1)
        if self.stride not in (1, 2):
            raise self.refuse("stride", self.stride, "use 1 (the paper's walk) or 2")
        self.check_at_least("scope", 1)
        if self.scope != 2:
            raise self.refuse("scope", self.scope, "the method is defined for pairs; use 2")
        if self.prefill == "block" and 0 < self.tree_slots < self.block_loss() + self.block:
            raise self.refuse(
                "block",
                self.block,
                f"the {self.tree_slots} tree slots (budget − n_sink − n_recent) must hold "
                f"{self.block_loss() + self.block} for this block length; use a smaller block, a larger budget or "
                "prefill='chunked'",
            )

    def prefill_modes(self) -> tuple[str, ...]:
        return ("block", "chunked", "sequential")

    def call_length(self) -> int | None:
        return {"chunked": self.chunk, "sequential": 1}.get(self.prefill)

    @property
    def tree_slots(self) -> int:
        return self.budget - self.n_sink - self.n_recent

    def block_loss(self) -> int:
        """The most tree slots that the protected tail of the block sweep can take."""
        return max(0, self.block - self.n_recent) + self.block - 1

    def new_state(self, context: LayerContext) -> TreeState:
        return TreeState(self, context)

    def slot_statistics(self, shape: CacheShape) -> int:
        return shape.wide_bytes() + COUNT_BYTES

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        slots = min(prompt + generated, self.budget)
        if self.prefill == "block" and prompt > self.budget:
            slots = min(self.kept_of_prompt(prompt) + generated, self.budget)
        of_a_slot = shape.token_bytes() + self.slot_statistics(shape) * shape.batch * shape.kv_heads
        return slots * of_a_slot + 8 * shape.batch

    def block_plan(self, slots: int) -> tuple[int, int]:
        """(Blocks that compete, blocks that stay) when a first call leaves `slots` > budget slots."""
        tail = max(self.n_recent, self.block)
        competing, left_over = divmod(slots - self.n_sink - tail, self.block)
        return competing, max(0, self.budget - self.n_sink - tail - left_over) // self.block

    def kept_of_prompt(self, slots: int) -> int:
        if self.tree_slots == 0:
            return self.budget
        competing, staying = self.block_plan(slots)
        return slots - max(0, competing - staying) * self.block


class TreeState(SlotState):
    """Tokens, and the place at which the next one is dropped."""

    method: TreeKV

    def __init__(self, method: TreeKV, context: LayerContext):
        super().__init__(method, context)
        self.pointer: Tensor | None = None  # [B], equal in all rows; on the device, so that a graph can advance it

    def observed(self, length: int) -> int:
        if self.method.score == "last":
            return 1
        return min(length, self.method.block) + self.trailing(length) if self.method.prefill == "block" else length

    def trailing(self, length: int) -> int:
        """Number of tokens after the last whole block; their queries are observed with that block's."""
        return length % self.method.block if length > self.method.block else 0

    def observe(self, received: Tensor, last: int, length: int) -> None:
        latest = received.clone() if self.method.score == "last" else received
        super().observe(received, last, length)
        self.grown["received"] = latest
        if self.pointer is None:
            self.pointer = torch.zeros(received.shape[0], dtype=torch.long, device=received.device)

    def wanted(self, length: int, slots: int) -> int:
        if self.blockwise(length, slots):
            return self.method.kept_of_prompt(slots)
        return min(slots, self.budget)

    def blockwise(self, length: int, slots: int) -> bool:
        return self.method.prefill == "block" and length == slots > self.budget and self.method.tree_slots > 0

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        method, slots = self.method, value.shape[2]
        assert self.pointer is not None
        received, queries = self.grown["received"], self.grown["queries"]
        score = received / queries if method.score == "avg" else received
        if method.granularity == "layer":
            score = score.mean(1, keepdim=True)
        if method.tree_slots == 0:
            score = score[:, :1]
            middle = score.new_zeros((*score.shape[:2], 0), dtype=torch.long)
        elif self.blockwise(length, slots):
            middle = self.sweep_blocks(score, slots)
        elif excess == 1:
            return without_one(self.contest(score), slots), value
        else:
            region = score[..., method.n_sink : slots - method.n_recent]
            pointer = int(self.pointer[0])  # one sync a call of several tokens
            middle, pointer = tree_sweep(region, method.tree_slots, pointer, method.stride, method.score == "none")
            self.pointer.fill_(pointer)
        rest = slots - excess - method.n_sink - middle.shape[2]
        return with_protected(middle, slots, method.n_sink, rest), value

    def eviction(self) -> Eviction:
        method = self.method
        score = {"avg": "average", "last": "latest"}.get(method.score, "sum")
        if method.tree_slots == 0:
            return Eviction(method.n_sink, 1, score)
        first, candidates = (method.n_sink + 1, 1) if method.score == "none" else (method.n_sink, 2)
        return Eviction(first, candidates, score, pointer=self.pointer, stride=method.stride, cycle=method.tree_slots)

    def contest(self, score: Tensor) -> Tensor:
        """The decode step: which slot of the pair at the pointer leaves, [B,G]; advances the pointer. No sync."""
        assert self.pointer is not None
        older = (self.method.n_sink + self.pointer).view(-1, 1, 1).expand(*score.shape[:2], 1)
        if self.method.score == "none":
            leaves = older + 1
        else:
            leaves = older + (score.gather(2, older) > score.gather(2, older + 1)).long()
        self.pointer.add_(self.method.stride).remainder_(self.method.tree_slots)
        return leaves.squeeze(-1)

    def sweep_blocks(self, score: Tensor, slots: int) -> Tensor:
        """Token indices after the sinks that a first call keeps: the same rule over blocks, with fixed scores."""
        method = self.method
        assert self.pointer is not None
        competing, staying = method.block_plan(slots)
        tokens = score[..., method.n_sink : method.n_sink + competing * method.block]
        of_block = tokens.unflatten(-1, (competing, method.block)).mean(-1)
        blocks, pointer = tree_sweep(of_block, staying, 0, method.stride, method.score == "none")
        self.pointer.fill_(pointer * method.block % method.tree_slots)
        inside = torch.arange(method.block, device=score.device)
        return (blocks.unsqueeze(-1) * method.block + inside).flatten(-2)
