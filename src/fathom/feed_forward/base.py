"""The seam of the `feed_forward` section: the half of a layer that works on every token by itself."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from fathom.models.method import Counts, Method, NoOptions
from fathom.models.token_facts import TokenFacts

__all__ = ["Counts", "FeedForward", "NoOptions", "TokenFacts"]


class FeedForward(Method):
    """One layer's feed-forward network; every layer has a module of its own, named `mlp`.

    `forward(x)` returns the output, or the output and a dict of tensors by name (router statistics, losses). These
    leave the model's forward under their names (`Stack.auxiliary`).
    """

    wing: ClassVar[str] = "growth"
    losses: ClassVar[tuple[str, ...]] = ()  # names whose values, already weighted, are added to the training loss
    by_layer: ClassVar[tuple[str, ...]] = ()  # names whose values metrics keep apart by layer, for `describe`
    routers: ClassVar[tuple[str, ...]] = ()  # modules that only decide which parts run: a warm-up trains these alone
    # `forward(x, tokens)` takes `TokenFacts`, and says something, in training and where `output_auxiliary` asks for it.
    reads_tokens: ClassVar[bool] = False

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"] | tuple[Tensor, dict[str, Tensor]]:
        """The output for normalised x [B, T, d], alone or with a dict of tensors."""
        raise NotImplementedError  # abstract

    @property
    def communicates(self) -> bool:
        """Whether a call waits for calls of other processes."""
        return False

    @classmethod
    def describe(cls, means: dict[str, Tensor]) -> dict[str, Any]:
        """What metrics.jsonl gets from the values `by_layer`, each [layers, …] and a mean over forwards."""
        return {name: value.tolist() for name, value in means.items()}

    @classmethod
    def counts(cls, config: Any, options: Any) -> Counts:
        """Cost of one forward of the stack for one slot, all layers; `parameters` of all layers."""
        raise NotImplementedError  # abstract
