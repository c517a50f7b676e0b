"""The matrix of a layer whose weight a method reads, as adapters change it.

peft puts a module around a layer: calling it adds the adapter, its `weight` is still the layer's own. A method that
reads `weight` would leave the adapter out, and get it all at once when it is merged.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def linear_matrix(layer: nn.Module) -> Float[Tensor, "out in"]:
    """W of y = W x. Of an adapted layer, what it makes of the unit vectors: as much work as `in` tokens."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if type(layer) is nn.Linear:
        return weight
    return layer(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)).T


def table_matrix(layer: nn.Module) -> Float[Tensor, "V d"]:
    """The rows of an embedding. Of an adapted one, all its rows looked up."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if type(layer) is nn.Embedding:
        return weight
    return layer(torch.arange(weight.shape[0], device=weight.device))
