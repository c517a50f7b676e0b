"""The seam of the `positions` section: how queries and keys learn where their tokens stand."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.models.method import Counts, Method, NoOptions

__all__ = ["Counts", "NoOptions", "Positions"]


class Positions(Method):
    """Positions of the tokens, as the decoder uses them: once a forward, then in every attention layer.

        E ← add(E, position_ids)                       before the first layer, in every pass
        t = tables(E, position_ids)                    once a forward; explicit tensors that all layers read
        q, k = rotate(options, t, …, q, k)             in every layer, after the QK-norm and before the mixer
        q = expand(options, q)                         after the mixer: the heads that attention sees

    Cache and mixers hold what `rotate` gives. `rotate` and `expand` are functions of their arguments alone, so that
    compiled and checkpointed layers read no state.
    """

    wing: ClassVar[str] = "context"
    place: ClassVar[str] = "position_method"  # the module's name within the decoder, and so in checkpoints

    @classmethod
    def heads(cls, options: Any) -> int:
        """Query heads that attention sees for one projected query head."""
        return 1

    def add(self, embeddings: Float[Tensor, "B T d"], position_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """The embeddings with what the method adds to them."""
        return embeddings

    def tables(self, x: Tensor, position_ids: Int[Tensor, "#B T"]) -> tuple[Tensor, ...] | None:
        """What `rotate` reads of the positions, in x's dtype, each [B, T, …]; None if it reads nothing."""
        return None

    @staticmethod
    def rotate(
        options: Any, tables: tuple[Tensor, ...], dtype: torch.dtype, *states: Float[Tensor, "B n T D"] | None
    ) -> tuple[Tensor | None, ...]:
        """Queries and keys by their positions, in `dtype`; only called with tables. What is None stays None."""
        return states

    @staticmethod
    def expand(options: Any, query: Float[Tensor, "B H T D"]) -> Float[Tensor, "B n*H T D"]:
        """The heads that attention sees, `heads(options)` for each projected one, side by side."""
        return query

    @classmethod
    def turned_channels(cls, config: Any, options: Any) -> int:
        """Channels of a head that `rotate` turns."""
        return 0

    @classmethod
    def added(cls, config: Any, options: Any) -> int:
        """Elementwise FLOPs of `add` for one slot."""
        return 0

    @classmethod
    def counts(cls, config: Any, options: Any) -> Counts:
        """Cost of one forward of the stack for one slot, all layers; `parameters` count as embeddings."""
        return Counts()
