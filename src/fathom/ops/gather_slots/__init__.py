"""Slots of several banks and layers into one place: for each layer one gather along its banks joined.

y[b, g, i] = [x_1, x_2, …][b, g, index[b, i]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxtyping import Int
from torch import Tensor

from fathom.ops.gather_slots import plain
from fathom.ops.gather_slots.plain import KeyValue, columns
from fathom.ops.kernels import has_kernel

__all__ = ["KeyValue", "columns", "slots_of"]


def slots_of(banks: list[list[KeyValue]], together: int = 8) -> Callable[[Int[Tensor, "B m"]], Iterator[KeyValue]]:
    """What gives, by layer, some slots of its banks, which lie one after the other; with a kernel a few layers at a
    time, as calls for each would take longer than the copies.

    banks: keys and values [B,G,n,D] of each bank, by layer; a bank may have one row for all.
    """
    tensors = [[x for pair in bank for x in pair] for bank in banks]
    if has_kernel(tensors[0][0].device.type):
        from fathom.ops.gather_slots import kernel

        table = kernel.addresses(tensors)
        if table is not None:
            parts = table.split(2 * together)

            def gathered(index: Int[Tensor, "B m"]) -> Iterator[KeyValue]:
                for part in parts:
                    found = kernel.gather_slots(part, tensors[0][0], index).unbind()  # it keeps them all where they are
                    yield from zip(found[::2], found[1::2], strict=True)

            return gathered
    return plain.slots_of(banks)
