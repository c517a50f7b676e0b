"""H2O (arXiv 2306.14048): keep the heavy hitters (most attention accumulated) and the most recent tokens."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fathom.caches.base import CacheShape, LayerContext
from fathom.caches.token_budget import Eviction, SlotState, TokenBudget, keep_highest


@dataclasses.dataclass(frozen=True)
class H2O(TokenBudget):
    """Keep the slots with the highest score h_s = Σ_queries a_s, accumulated and never normalised; the lowest slot that
    is not recent leaves.

    Heavy hitters: budget − n_recent (by default half of it). Sinks are not protected unless n_sink says so. Ties drop
    the oldest.
    """

    n_sink: int = 0

    name = "h2o"
    paper = "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs, arXiv 2306.14048"
    summary = "Keep the heavy hitters (tokens that received most attention so far) and the newest tokens."
    equation = "h_s = Σ_queries a_s;  a full cache drops argmin h_s over all but the newest n_recent"
    role = "baseline"
    variants = ({"budget": 16, "n_recent": 6},)
    identity = {"budget": 256, "n_recent": 64}  # noqa: RUF012

    def new_state(self, context: LayerContext) -> H2OState:
        return H2OState(self, context)

    def slot_statistics(self, shape: CacheShape) -> int:
        return shape.wide_bytes()  # the score


class H2OState(SlotState):
    """Tokens with the attention that each has received so far."""

    def observed(self, length: int) -> int:
        return length

    def observe(self, received: Tensor, last: int, length: int) -> None:
        if self.received is not None:
            received[..., : received.shape[2] - length].add_(self.received)
        self.grown = {"received": received}

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        score = self.grown["received"]
        score = score.mean(1, keepdim=True) if self.method.granularity == "layer" else score
        return keep_highest(score, excess, self.method.n_sink, self.method.n_recent), value

    def eviction(self) -> Eviction:
        return Eviction(self.method.n_sink, self.budget + 1 - self.method.n_sink - self.method.n_recent, "sum")
