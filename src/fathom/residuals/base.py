"""The seam of the `residual` section: how a layer reads its input from, and writes its output to, earlier layers."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from fathom.models.method import Counts, Method, check_range

__all__ = ["Counts", "ResidualTopology", "check_range"]


class ResidualTopology(Method):
    """How a layer reads its input from, and writes its output to, earlier layers.

    The stream is whatever the topology carries (a tensor, or a tuple of tensors). Sublayer 2ℓ is layer ℓ's attention,
    2ℓ+1 its MLP.
    """

    def start(self, hidden_states: Float[Tensor, "B T d"]) -> Any:
        """The stream before the first layer."""
        raise NotImplementedError  # abstract

    def read(self, stream: Any, sublayer: int) -> tuple[Float[Tensor, "B T d"], Any]:
        """The input of the sublayer's norm, and what `write` needs from this reading (such as gates)."""
        raise NotImplementedError  # abstract

    def write(self, stream: Any, sublayer: int, output: Float[Tensor, "B T d"], carry: Any) -> Any:
        """The stream with the sublayer's output added. With `parallel_residual` a layer writes once, as sublayer 2ℓ."""
        raise NotImplementedError  # abstract

    def finish(self, stream: Any) -> Float[Tensor, "B T d"]:
        """The input of the final norm."""
        raise NotImplementedError  # abstract
