"""The seam of the `mixer` section: cross-layer mixing, what attention reads from earlier layers."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from fathom.models.method import Counts, Method, check_choice, check_range

__all__ = ["Counts", "Mixer", "check_choice", "check_range"]


class Mixer(Method):
    """Cross-layer mixing between the rotation and the cache write: what keys and values attention reads.

    Layers are counted across passes: index = pass·L + layer. States travel as explicit tensors, so activation
    checkpointing and torch.compile see pure functions.
    """

    @classmethod
    def k_norm_after_rotation(cls, options: Any) -> bool:
        """Whether the QK-norm of keys follows the rotation instead of preceding it."""
        return False

    def source_layers(self, index: int) -> tuple[int, ...]:
        """Indices (all < index) whose states this layer mixes in."""
        raise NotImplementedError  # abstract

    def is_source(self, index: int) -> bool:
        """Whether any later layer reads this one's state."""
        raise NotImplementedError  # abstract

    def ask(
        self, query: Float[Tensor, "B T H D"], sources: tuple[tuple[Tensor, ...], ...]
    ) -> Float[Tensor, "B T n D"] | None:
        """What `forward` needs from the queries, taken before the rotation, and gets rotated, as [B, n, T, D].
        None: `forward` gets the rotated queries themselves."""
        return None

    def forward(
        self,
        query: Float[Tensor, "B n T D"],
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
        sources: tuple[tuple[Tensor, ...], ...],
        layer: int,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Returns the key and value that attention and the cache get, and this layer's state for later layers."""
        raise NotImplementedError  # abstract
