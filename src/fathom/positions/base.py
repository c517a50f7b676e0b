"""The seam of the `positions` section: how queries and keys learn where their tokens stand."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.models.method import Counts, Method, NoOptions

__all__ = ["Counts", "NoOptions", "Positions"]


class Positions(Method):
    """A positions method: what the decoder does with positions, once a forward and in every attention layer.

        E ← add(E, position_ids)                       before the first layer, in every pass
        t = tables(E, position_ids)                    once a forward; explicit tensors that all layers read
        q, k = rotate(options, t, …, q, k)             in every layer, after the QK-norm and before the mixer
        q, k = expand(options, t, q, k)                after the mixer, before the cache: what attention reads

    Mixers see what `rotate` gives, for the projected heads; the cache holds the keys that `expand` gives. Both are
    functions of their arguments alone, so that compiled and checkpointed layers read no state.

    A bias b_h(n, m) of head h on the score of query n and key m is part of the product q·k: `expand` appends channels
    to queries and keys whose product is the bias (`channels`, and positions/alibi.py). So it works with every backend,
    mask, cache and depth method, and a key keeps its position wherever a cache moves it.
    """

    wing: ClassVar[str] = "context"
    place: ClassVar[str] = "position_method"  # the module's name within the decoder, and so in checkpoints

    @classmethod
    def heads(cls, options: Any) -> int:
        """Query heads that attention sees for one projected query head."""
        return 1

    @classmethod
    def channels(cls, config: Any, options: Any) -> int:
        """Channels that `expand` appends to a head's keys and queries."""
        return 0

    def add(self, embeddings: Float[Tensor, "B T d"], position_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """The embeddings plus what the method adds to them."""
        return embeddings

    def tables(self, x: Tensor, position_ids: Int[Tensor, "#B T"]) -> tuple[Tensor, ...] | None:
        """The tensors that `rotate` and `expand` read, in x's dtype, each [B, T, …]; None if they read nothing."""
        return None

    @staticmethod
    def rotate(
        options: Any, tables: tuple[Tensor, ...], dtype: torch.dtype, *states: Float[Tensor, "B n T D"] | None
    ) -> tuple[Tensor | None, ...]:
        """Queries and keys rotated by their positions, in `dtype`; angles may differ by head. Called with tables only;
        an argument that is None stays None."""
        return states

    @staticmethod
    def expand(
        options: Any, tables: tuple[Tensor, ...] | None, query: Float[Tensor, "B H T D"], key: Float[Tensor, "B G T D"]
    ) -> tuple[Float[Tensor, "B n*H T E"], Float[Tensor, "B G T E"]]:
        """The queries and keys that attention reads: `heads(options)` query heads side by side for each projected one,
        and `channels` further channels."""
        return query, key

    @classmethod
    def unsupported(cls, config: Any, options: Any) -> str | None:
        """As of every method; here for methods that turn nothing, which stretched frequencies would not change."""
        rope = config.rope_parameters
        if rope and rope.get("rope_type", "default") != "default":
            return (
                f"rope_parameters={rope!r}: nothing turns by its frequencies; leave it out, or give its type 'default'"
            )
        return None

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
