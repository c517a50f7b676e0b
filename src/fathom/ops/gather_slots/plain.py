"""`slots_of` in PyTorch: the banks joined, then a gather for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import wants_gradient

KeyValue = tuple[Float[Tensor, "B G n D"], Float[Tensor, "B G n D"]]


def slots_of(banks: list[list[KeyValue]]) -> Callable[[Int[Tensor, "B m"]], Iterator[KeyValue]]:
    def each(index: Int[Tensor, "B m"]) -> Iterator[KeyValue]:
        for pairs in zip(*banks, strict=True):
            keys, values = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in zip(*pairs, strict=True))
            yield columns(keys, index), columns(values, index)

    return each


def columns(x: Float[Tensor, "#B G n D"], index: Int[Tensor, "B m"]) -> Float[Tensor, "B G m D"]:
    """Some slots of keys or values, of one row for all or of each row; as 64-bit numbers where they fit, as a gather
    costs by the number."""
    x = x.expand(len(index), -1, -1, -1)
    fit = x.shape[-1] * x.element_size() % 8 == 0 and x.stride(-1) == 1
    if wants_gradient(x) or not fit:  # a view in another dtype has no derivative
        return _gathered(x, index)
    return _gathered(x.view(torch.int64), index).view(x.dtype)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
