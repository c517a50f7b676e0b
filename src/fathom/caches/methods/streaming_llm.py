"""StreamingLLM (arXiv 2309.17453): keep the first n_sink tokens and the most recent ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fathom.caches.base import LayerContext
from fathom.caches.token_budget import Eviction, SlotState, TokenBudget


@dataclasses.dataclass(frozen=True)
class StreamingLLM(TokenBudget):
    """Keep the first n_sink tokens and the newest budget − n_sink. `n_recent` is None or that number.

    evict: "after" (default: a step attends to budget + 1 slots, then drops one) or "before" (a slot is freed first, so
        attention sees at most `budget` slots; calls longer than `chunk` are split).
    """

    evict: str = "after"

    name = "streaming_llm"
    paper = "Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"
    summary = "Keep the first tokens (sinks) and a window of the newest."
    equation = "kept = first n_sink ∪ newest (budget − n_sink) tokens"
    role = "baseline"
    variants = ({"budget": 16, "n_sink": 2},)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("evict", ("after", "before"))
        if self.n_recent != self.budget - self.n_sink:
            raise self.refuse("n_recent", self.n_recent, f"use None or budget − n_sink = {self.budget - self.n_sink}")
        if self.evict == "before" and self.chunk > self.budget - self.n_sink:
            raise self.refuse("chunk", self.chunk, f"with evict='before' use at most {self.budget - self.n_sink}")

    def recent_of_budget(self) -> int:
        return max(0, self.budget - self.n_sink)

    @property
    def plain(self) -> bool:
        return self.positions == "original" and self.evict == "after"

    def call_length(self) -> int | None:
        return self.chunk if self.evict == "before" and self.prefill == "once" else super().call_length()

    def new_state(self, context: LayerContext) -> StreamingState:
        return StreamingState(self, context)


class StreamingState(SlotState):
    """The first tokens and the newest."""

    method: StreamingLLM

    def attend_part(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        room = self.budget - key.shape[2]
        if self.method.evict == "before" and self.key is not None and self.value is not None and self.stored > room:
            keys, values = self.key, self.value
            index, values = self.keep(values, self.stored - room, 0)
            self.touched = True
            position = self.position
            self.key, self.value = keys[:, :, index[0, 0]], values[:, :, index[0, 0]]
            if position is not None:
                self.position = position[:, :, index[0, 0]]
        return super().attend_part(query, key, value, scaling, dropout)

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        sinks = torch.arange(self.method.n_sink, device=value.device)
        window = torch.arange(self.method.n_sink + excess, value.shape[2], device=value.device)
        return torch.cat((sinks, window)).view(1, 1, -1), value

    def eviction(self) -> Eviction:
        return Eviction(self.method.n_sink, 1)
