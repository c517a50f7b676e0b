"""SnapKV (arXiv 2404.14469) and PyramidKV (arXiv 2406.02069): the prompt's last queries choose which keys stay."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from fathom.caches.base import Appending, CacheShape, LayerContext
from fathom.caches.token_budget import SlotState, TokenBudget, keep_highest


@dataclasses.dataclass(frozen=True)
class SnapKV(TokenBudget):
    """Keep a prompt's last w tokens, and the budget − w others with the highest s = pool(Σ over the last w queries
    of softmax weights).

    n_recent: the window w; None: 32, at most half the budget.
    kernel: width of the average pooling along tokens, odd.

    A call shorter than w, or of one token, is decoding and drops nothing: the cache grows with what is
    generated. Long prompts read in chunks are compressed after every chunk of at least w tokens.
    """

    n_sink: int = 0
    positions: str = "original"
    kernel: int = 5

    name = "snapkv"
    paper = "SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469"
    summary = "Compress the prompt to what its last queries attend to."
    equation = "s = pool(Σ_{last w queries} softmax(q Kᵀ));  kept = top (budget − w) by s ∪ last w tokens"
    role = "baseline"
    variants = ({"budget": 16, "n_recent": 4},)
    fewest = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least("kernel", 1)
        self.check_at_least("n_recent", 1)
        if self.kernel % 2 == 0:
            raise self.refuse("kernel", self.kernel, "use an odd width")

    def recent_of_budget(self) -> int:
        return min(32, max(1, self.budget // 2))

    def prefill_modes(self) -> tuple[str, ...]:
        return ("once", "chunked")

    def new_state(self, context: LayerContext) -> SnapState:
        return SnapState(self, context)

    @property
    def shortest_call(self) -> int:
        return max(2, self.n_recent)

    def prompt_part(self, rows: int, length: int, padded: bool) -> int | None:
        """None: the window that chooses is the end of the whole prompt, not of each part."""
        return None

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        context = LayerContext(layer, shape.layers, None)
        kept = self.kept_of_prompt(prompt, context) if prompt >= self.shortest_call else prompt
        return (kept + generated) * shape.token_bytes()

    def most_bytes(self, shape: CacheShape, tokens: int, chunk: int | None = None) -> int:
        rest = tokens % chunk if chunk else 0  # the last call of a text may be too short to be compressed
        tail = rest if rest < self.shortest_call else 0
        return self.cache_bytes(shape, tokens - tail, tail)

    def kept_of_prompt(self, slots: int, context: LayerContext) -> int:
        return min(slots, self.budget)


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget that falls with depth; `budget` is the mean over layers. With w = window + sinks:

        low = (budget − w) // beta;   high = 2(budget − w) − low;   layer l keeps w + high − l·((high − low) // (L − 1))

    If high ≥ T − w then high = T − w and low = 2(budget − w) − high. T < budget: nothing is dropped;
    budget ≤ T < 2(budget − w): every layer keeps `budget`.

    beta: how steeply budgets fall: the last layer gets (budget − w) / beta slots beside the window.
    """

    beta: int = 20

    name = "pyramidkv"
    paper = "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069"
    summary = "SnapKV with budgets that fall with depth."
    equation = "SnapKV with budget_l falling linearly over layers l, mean(budget_l) = budget"
    variants = ({"budget": 16, "n_recent": 4, "beta": 4},)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least("beta", 1)

    def kept_of_prompt(self, slots: int, context: LayerContext) -> int:
        window = self.n_sink + self.n_recent
        middle = self.budget - window
        if slots < max(self.budget, 2 * middle):
            return min(slots, self.budget)
        low = middle // self.beta
        high = 2 * middle - low
        if high >= slots - window:
            high = slots - window
            low = 2 * middle - high
        step = (high - low) // max(1, context.layers - 1)
        return high - context.index * step + window


class SnapState(SlotState, Appending):
    """Tokens chosen of the prompt, and all that came after it."""

    method: SnapKV

    @property
    def appends(self) -> bool:
        return self.context.rope is None and not self.track_positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        return super().attend(query, key, value, scaling, dropout)

    def compresses(self, length: int) -> bool:
        return length >= self.method.shortest_call

    def observed(self, length: int) -> int:
        return self.method.n_recent if self.compresses(length) else 0

    def wanted(self, length: int, slots: int) -> int:
        if not self.compresses(length):
            return slots
        return min(slots, self.method.kept_of_prompt(self.seen + length, self.context))  # T: all tokens so far

    def observe(self, received: Tensor, last: int, length: int) -> None:
        self.score = received  # of this call only

    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        window = self.method.n_recent
        before = self.score[..., : value.shape[2] - window]
        pooled = F.avg_pool1d(before, self.method.kernel, stride=1, padding=self.method.kernel // 2)
        if self.method.granularity == "layer":
            pooled = pooled.mean(1, keepdim=True)
        score = F.pad(pooled, (0, window))
        return keep_highest(score, excess, self.method.n_sink, window), value

    def compress(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().compress(keys, values, length)
        if hasattr(self, "score"):
            del self.score
