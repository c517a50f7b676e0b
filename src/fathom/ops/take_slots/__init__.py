"""The slots that stay, of keys, values and statistics together: one gather along the slots for each.

y[b, g, i, ·] = x[b, g, index[b, g, i], ·]
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from fathom.ops.kernels import has_kernel
from fathom.ops.take_slots import plain


def take_slots(sources: list[Tensor], index: Int[Tensor, "#B #G k"], places: list[Tensor | None]) -> list[Tensor]:
    """The chosen slots of keys and values [B,G,n,D], then of statistics [B,G,n]: each [B,G,k,·].

    places: tensors that the results may be written into where they fit, so that a full cache keeps its address (CUDA
    graphs); None for those that have none.
    """
    targets = [_target(source, place, index.shape[2]) for source, place in zip(sources, places, strict=True)]
    if has_kernel(index.device.type):
        from fathom.ops.take_slots import kernel

        if kernel.serves(sources, index):
            kernel.take_slots(sources, index, targets)
            return targets
    return plain.take_slots(sources, index, targets)


def _target(source: Tensor, place: Tensor | None, stays: int) -> Tensor:
    shape = (*source.shape[:2], stays, *source.shape[3:])
    fits = place is not None and place.shape == shape and place.is_contiguous() and not place.requires_grad
    return place if fits else source.new_empty(shape)  # type: ignore[return-value]
