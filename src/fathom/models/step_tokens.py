"""Which tokens run a step, gathered: within their rows (`Chosen`), or of all rows laid end to end (`Flat`)."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Int
from torch import Tensor

BUCKET = 64  # above it, numbers of gathered tokens are multiples of it, so that compiled kernels meet few shapes


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the T new tokens of every row, in their order.

    Attributes:
        index: of the tokens; rows with fewer than the longest name others at the end. None: all T, in place.
        live: which entries are chosen ones. None: all.
        before: the places of their entries in the step before. None: the same.
    """

    index: Int[Tensor, "B n"] | None = None
    live: Bool[Tensor, "B n"] | None = None
    before: Int[Tensor, "B n"] | None = None

    @torch.compiler.disable  # every shape would be compiled by itself; `take` and `put` are traced where they pay
    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The chosen entries of `x` along its token dimension."""
        return take(x, self.index, dim)

    @torch.compiler.disable
    def put(self, x: Tensor, new: Tensor, dim: int = 1) -> Tensor:
        """`x` with the chosen entries replaced by `new`."""
        return put(x, new, self.index, self.live, dim)

    @torch.compiler.disable
    def from_before(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`, which has those of the step before."""
        return take(x, self.before, 1)


@dataclasses.dataclass(frozen=True)
class Flat:
    """Some of the B·T new tokens of all rows, in their order, laid end to end as one row.

    Attributes:
        index: of the tokens; behind them of some that were not chosen, each once, to fill up the shape.
        before: the places of their entries in the step before, laid end to end likewise.
        live: which entries are chosen ones. None: all.
    """

    index: Int[Tensor, " N"]
    before: Int[Tensor, " N"]
    live: Bool[Tensor, " N"] | None

    @torch.compiler.disable
    def take(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`: [1, N, …] of [B, T, …]."""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    @torch.compiler.disable
    def put(self, x: Tensor, new: Tensor) -> Tensor:
        """`x` with the chosen entries replaced by `new`."""
        x, shape, new = x.flatten(0, 1), x.shape, new[0]
        if self.live is not None:
            new = torch.where(self.live.view(-1, *(1,) * (x.ndim - 1)), new, x.index_select(0, self.index))
        return x.index_copy(0, self.index, new).view(shape)

    @torch.compiler.disable
    def from_before(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`, which has those of the step before."""
        return x.flatten(0, 1).index_select(0, self.before)[None]


def take(x: Tensor, index: Int[Tensor, "B n"] | None, dim: int) -> Tensor:
    """Some entries of every row along its token dimension; all without an index."""
    if index is None:
        return x
    shape = [*x.shape]
    shape[dim] = index.shape[1]
    return x.gather(dim, along(index, x, dim).expand(shape))


def put(x: Tensor, new: Tensor, index: Tensor | None, live: Tensor | None, dim: int) -> Tensor:
    """`x` with some entries of every row replaced by those of the new ones that are live."""
    if live is not None:
        new = torch.where(along(live, x, dim), new, take(x, index, dim))
    return new if index is None else x.scatter(dim, along(index, x, dim).expand_as(new), new)


def along(index: Tensor, x: Tensor, dim: int) -> Tensor:
    """[B, n] shaped to broadcast against `x` whose token dimension is `dim`."""
    return index.view(index.shape[0], *(1,) * (dim - 1), index.shape[1], *(1,) * (x.ndim - dim - 1))


@torch.compiler.disable
def choose(*masks: Bool[Tensor, "B T"], counts: list[list[int]] | None = None) -> list[Chosen | None]:
    """The tokens of each mask, None for a mask without any. `counts`: of each in every row; if not given, waits for the
    device once.

    On the meta device, which has no values, every mask chooses all.
    """
    if masks[0].is_meta:
        return [Chosen() for _ in masks]
    length, every = masks[0].shape[1], torch.stack(masks)
    if counts is None:
        fewest, most = torch.stack(every.sum(2).aminmax(dim=1)).tolist()
    else:
        fewest, most = [min(rows) for rows in counts], [max(rows) for rows in counts]
    sizes = [min(length, high if high <= BUCKET else -(-high // BUCKET) * BUCKET) for high in most]
    order = None
    if any(0 < size < length for size in sizes):
        order = (~every).to(torch.uint8).argsort(dim=2, stable=True)
    chosen: list[Chosen | None] = []
    for number, (mask, size, low) in enumerate(zip(masks, sizes, fewest, strict=True)):
        if size in (0, length) or order is None:
            chosen.append(None if size == 0 else Chosen(None, None if low == length else mask))
            continue
        index = order[number, :, :size]
        chosen.append(Chosen(index, None if low == size else mask.gather(1, index)))
    return chosen
