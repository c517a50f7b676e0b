"""The full cache as a method of this wing: every token, nothing dropped. The reference of every comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fathom.caches.base import Appending, CacheMethod, CacheShape, LayerContext, concat
from fathom.caches.budgets import NotReachable
from fathom.ops.cached_attention import causal_attention


@dataclasses.dataclass(frozen=True)
class Full(CacheMethod):
    """Keep everything: bytes = tokens · 2·B·G·D·bytes. Equal to transformers' DynamicCache."""

    name = "full"
    paper = "Attention Is All You Need, arXiv 1706.03762"
    summary = "Keep everything: the reference of every comparison."
    equation = "O = softmax(q Kᵀ / √D) V over all tokens"
    role = "baseline"
    variants = ({},)
    identity = {}  # noqa: RUF012

    @property
    def plain(self) -> bool:
        return True

    @property
    def sequential(self) -> bool:
        return True

    @classmethod
    def at_fraction(
        cls, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **options: Any
    ) -> CacheMethod | NotReachable:
        return cls() if fraction >= 1 else NotReachable(1.0)

    def new_state(self, context: LayerContext) -> FullState:
        return FullState()

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        return (prompt + generated) * shape.token_bytes()


class FullState(Appending):
    """All tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def stored(self) -> int:
        return self.seen

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key, self.value = concat(self.key, key), concat(self.value, value)
        self.seen += key.shape[2]
        return self.key, self.value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        return causal_attention(query, *self.append(key, value), scaling, dropout)

    def kept_positions(self) -> Tensor | None:
        if self.key is None:
            return None
        return torch.arange(self.seen, device=self.key.device).expand(*self.key.shape[:2], -1)
