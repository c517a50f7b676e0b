"""Scores of your own: a function of keys and values decides what stays (the way over from kvpress' `ScorerPress`).

    from fathom.caches import Scored, compress, register_scorer

    @register_scorer("my_score")                       # higher stays; keys, values [B,G,n,D] → [B,G,n]
    def my_score(keys, values):
        return -keys.norm(dim=-1)

    with compress(model, Scored(scorer="my_score", compression_ratio=0.5, acts_on="prompt")):
        model.generate(**inputs)

What changes against kvpress: batches and chunked prompts work; `acts_on="always"` also compresses while decoding; and
kept tokens stay in order. Scores that need queries or attention weights are methods of their own here: H2O, TOVA,
SnapKV, PyramidKV. (kvpress' ObservedAttention keeps the highest mean attention, H2O the highest sum and the newest.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.caches.base import CacheShape, LayerContext, portion
from fathom.caches.token_budget import SlotState, TokenBudget, keep_highest

Scorer = Callable[[Tensor, Tensor], Tensor]
SCORERS: dict[str, Scorer] = {}


def register_scorer(name: str) -> Callable[[Scorer], Scorer]:
    """A decorator that makes a function available as `Scored(scorer=name)`."""

    def add(function: Scorer) -> Scorer:
        SCORERS[name] = function
        return function

    return add


def _wide(x: Tensor) -> Tensor:
    """In fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@register_scorer("knorm")
def knorm(keys: Tensor, values: Tensor) -> Tensor:
    """Keys of low norm stay: −‖k‖ (arXiv 2406.11430)."""
    return -_wide(keys).norm(dim=-1)


@register_scorer("keydiff")
def keydiff(keys: Tensor, values: Tensor) -> Tensor:
    """Keys unlike the mean direction stay: −cos(k, mean of k/‖k‖) (arXiv 2504.15364)."""
    directions = F.normalize(_wide(keys), dim=-1)
    return -F.cosine_similarity(directions, directions.mean(2, keepdim=True), dim=-1)


@dataclasses.dataclass(frozen=True)
class Scored(TokenBudget):
    """Keep the tokens with the highest scores. Scores need no attention, so `build_cache(model, Scored(…))` works
    without `compress`.

    scorer: name of the scoring function, as `register_scorer` got it.
    compression_ratio: fraction of a prompt that is dropped, as in kvpress; None uses `budget`. Of the n tokens so far
        ⌊n·(1 − ratio)⌋ stay, and at least 1; a prompt read in chunks therefore ends with as many as one read whole.
    acts_on: "prompt" (calls of several tokens) or "always"; a compression_ratio acts on prompts.
    """

    n_sink: int = 0
    n_recent: int = 0
    positions: str = "original"
    scorer: str = "knorm"
    compression_ratio: float | None = None
    acts_on: str = "always"

    name = "scored"
    paper = ""
    summary = "Adapter: keep the tokens that a kvpress-style scoring function ranks highest."
    equation = "kept = the highest score(keys, values)"
    role = "adapter"
    variants = ({"budget": 16, "n_recent": 2, "scorer": "keydiff"},)  # knorm ties where a token repeats

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("acts_on", ("prompt", "always"))
        if not isinstance(self.scorer, str) or self.scorer not in SCORERS:
            raise self.refuse("scorer", self.scorer, f"registered are {', '.join(SCORERS)}; see register_scorer")
        if self.compression_ratio is not None:
            self.check_ratio("compression_ratio", "use 0 ≤ ratio < 1")
            if self.acts_on != "prompt":
                raise self.refuse("acts_on", self.acts_on, "a compression_ratio acts on prompts: use acts_on='prompt'")

    @property
    def plain(self) -> bool:
        return self.positions == "original"

    def new_state(self, context: LayerContext) -> ScoredState:
        return ScoredState(self, context)

    def kept(self, slots: int) -> int:
        if self.compression_ratio is None:
            return min(slots, self.budget)
        kept = portion(1 - Fraction(str(self.compression_ratio)), slots)
        return min(slots, max(1, self.n_sink + self.n_recent, kept))

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        if self.acts_on == "always":
            return super().layer_bytes(shape, prompt, generated, layer)
        return ((self.kept(prompt) if prompt > 1 else prompt) + generated) * shape.token_bytes()


class ScoredState(SlotState):
    """Tokens of the highest scores by the caller's function."""

    method: Scored

    def wanted(self, length: int, slots: int) -> int:
        if self.method.acts_on == "prompt" and length == 1:
            return slots
        return min(
            slots, self.method.kept(self.seen + length)
        )  # a ratio is of all tokens so far, not of what is left of them

    def compress(self, keys: Tensor, values: Tensor, length: int) -> None:
        self.keys_of_call = keys
        try:
            super().compress(keys, values, length)
        finally:  # a scorer may fail
            del self.keys_of_call

    @torch.no_grad()
    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        score = SCORERS[self.method.scorer](self.keys_of_call, value)
        if score.shape != value.shape[:3]:
            shapes = f"{tuple(score.shape)}, expected {tuple(value.shape[:3])}"
            raise ValueError(f"scorer {self.method.scorer!r} returned {shapes}")
        if self.method.granularity == "layer":
            score = score.mean(1, keepdim=True)
        return keep_highest(score, excess, self.method.n_sink, self.method.n_recent), value
