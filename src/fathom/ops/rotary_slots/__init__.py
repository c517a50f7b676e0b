"""Rotation of stored keys or of queries by the slots they stand in: `rotary.rotate` with some rows of a table."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathom.ops.kernels import has_kernel
from fathom.ops.rotary_slots import plain


def rotate_slots(
    x: Float[Tensor, "B heads n D"], cos: Float[Tensor, "#B T R"], sin: Float[Tensor, "#B T R"], start: int
) -> Float[Tensor, "B heads n D"]:
    """x rotated at positions start … start + n − 1 < T; R ≤ D channels turn."""
    if has_kernel(x.device.type):
        from fathom.ops.rotary_slots import kernel

        if kernel.serves(x, cos):
            return kernel.rotate_slots(x, cos, sin, start)
    return plain.rotate_slots(x, cos, sin, start)
