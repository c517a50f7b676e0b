"""TOVA (arXiv 2401.06104): keep the tokens that the last query attends to most."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fathom.caches.base import LayerContext
from fathom.caches.token_budget import Eviction, SlotState, TokenBudget, keep_highest


@dataclasses.dataclass(frozen=True)
class TOVA(TokenBudget):
    """Keep the tokens with the highest attention weights of the last query, averaged over all heads of a layer.

    All heads of a layer keep the same tokens. There is no recent window, so the newest token may leave; sinks are
    optional. Ties drop the oldest.
    """

    n_sink: int = 0
    n_recent: int = 0
    granularity: str = "layer"

    name = "tova"
    paper = "Transformers are Multi-State RNNs, arXiv 2401.06104"
    summary = "Keep the tokens that the newest query attends to most, one set for all heads of a layer."
    equation = "a full cache drops argmin_s of the last query's weights, mean over all heads"
    role = "baseline"
    variants = ({"budget": 16},)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_recent:
            raise self.refuse("n_recent", self.n_recent, "TOVA has no recent window; use 0")

    def new_state(self, context: LayerContext) -> TOVAState:
        return TOVAState(self, context)


class TOVAState(SlotState):
    """Tokens, ranked by the attention of the newest query alone."""

    def observed(self, length: int) -> int:
        return 1

    def observe(self, received: Tensor, last: int, length: int) -> None:
        self.score = received  # of this call only: nothing is kept between calls

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        score = self.score.mean(1, keepdim=True) if self.method.granularity == "layer" else self.score
        return keep_highest(score, excess, self.method.n_sink, 0), value

    def eviction(self) -> Eviction:
        return Eviction(self.method.n_sink, self.budget + 1 - self.method.n_sink)

    def compress(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().compress(keys, values, length)
        del self.score
