"""The seam of the `feed_forward` section: the half of a layer that works on every token by itself."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from fathom.models.method import Counts, Method, NoOptions

__all__ = ["Counts", "FeedForward", "NoOptions"]


class FeedForward(Method):
    """One layer's feed-forward network; every layer has a module of its own, named `mlp`.

    `forward(x)` returns the output, or the output and a dict of tensors by name: what the layer says beside it (router
    statistics, losses). They leave the model's forward under these names (`Stack.auxiliary`).
    """

    wing: ClassVar[str] = "growth"
    losses: ClassVar[tuple[str, ...]] = ()  # names whose values, already weighted, are added to the training loss

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"] | tuple[Tensor, dict[str, Tensor]]:
        """x: [B, T, d], normalised."""
        raise NotImplementedError  # abstract

    @classmethod
    def counts(cls, config: Any, options: Any) -> Counts:
        """Cost of one forward of the stack for one slot, all layers; `parameters` of all layers."""
        raise NotImplementedError  # abstract
