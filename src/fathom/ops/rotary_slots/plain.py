"""`rotate_slots` in PyTorch."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathom.ops.rotary import rotate


def rotate_slots(
    x: Float[Tensor, "B heads n D"], cos: Float[Tensor, "#B T R"], sin: Float[Tensor, "#B T R"], start: int
) -> Float[Tensor, "B heads n D"]:
    stop = start + x.shape[2]
    return rotate(x, cos[:, start:stop], sin[:, start:stop])
