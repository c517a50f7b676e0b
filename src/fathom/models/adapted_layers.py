"""The matrix of a layer whose weight a method reads, as a call of the layer would use it.

Two things stand between a layer's `weight` and its call. peft puts a module around a layer: calling it adds the
adapter, its `weight` is still the layer's own. accelerate keeps the weights of offloaded layers elsewhere and loads
them for a call only: before it `weight` is on the meta device. A method that read `weight` would leave the adapter out,
or read nothing. So parameters are used in their own module's forward, or read here.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def plain_weight(layer: nn.Module, device: torch.device) -> Tensor | None:
    """The weight, on `device`, of a linear layer or an embedding that uses it as it is; None if only a call has it."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if type(layer) not in (nn.Linear, nn.Embedding) or (weight.is_meta and device.type != "meta"):
        return None
    return weight.to(device)


def linear_matrix(layer: nn.Module, device: torch.device) -> Float[Tensor, "out in"]:
    """W of y = W x, on `device`. Of an adapted or offloaded layer, what it makes of the unit vectors: as much work as
    `in` tokens."""
    weight = plain_weight(layer, device)
    if weight is not None:
        return weight
    return layer(torch.eye(layer.weight.shape[1], dtype=layer.weight.dtype, device=device)).T.to(device)  # type: ignore


def table_matrix(layer: nn.Module, device: torch.device) -> Float[Tensor, "V d"]:
    """The rows of an embedding, on `device`. Of an adapted or offloaded one, all its rows looked up."""
    weight = plain_weight(layer, device)
    return weight if weight is not None else layer(torch.arange(len(layer.weight), device=device)).to(device)  # type: ignore
