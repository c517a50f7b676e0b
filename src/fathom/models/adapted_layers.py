"""The matrix that a call of a layer would use, for methods that read a layer's weight.

A layer's `weight` may differ from what its call uses. peft wraps a layer in a module whose call adds the adapter, while
its `weight` is still the layer's own. accelerate loads the weights of an offloaded layer only for a call; before it,
`weight` is on the meta device. A method that read `weight` would miss the adapter, or read nothing. So parameters are
used in their own module's forward, or read by these functions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def plain_weight(layer: nn.Module, device: torch.device) -> Tensor | None:
    """The weight, on `device`, of a linear layer or embedding whose call uses just that weight; else None."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if type(layer) not in (nn.Linear, nn.Embedding) or (weight.is_meta and device.type != "meta"):
        return None
    return weight.to(device)


def linear_matrix(layer: nn.Module, device: torch.device) -> Float[Tensor, "out in"]:
    """The matrix W of y = W x, on `device`. An adapted or offloaded layer is called on the unit vectors, which costs as
    much as a call on `in` tokens."""
    weight = plain_weight(layer, device)
    if weight is not None:
        return weight
    return layer(torch.eye(layer.weight.shape[1], dtype=layer.weight.dtype, device=device)).T.to(device)  # type: ignore


def table_matrix(layer: nn.Module, device: torch.device) -> Float[Tensor, "V d"]:
    """The rows of an embedding, on `device`. In an adapted or offloaded one all rows are looked up by a call."""
    weight = plain_weight(layer, device)
    return weight if weight is not None else layer(torch.arange(len(layer.weight), device=device)).to(device)  # type: ignore
