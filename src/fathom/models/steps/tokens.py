"""The tokens that run a step, gathered within their rows (`Chosen`), or from all rows into one (`Flat`)."""

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
        index: index of each entry's token; a row with fewer chosen tokens than the longest ends in other tokens. None:
            all T, in place.
        live: which entries are chosen tokens. None: all.
        before: index of each entry in the step before. None: the same.
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
    """Some of the B·T new tokens of all rows, in their order, concatenated into one row.

    Attributes:
        index: index of each entry's token; the chosen are followed by others, each once, that fill up the shape.
        before: index of each entry in the step before, concatenated likewise.
        live: which entries are chosen tokens. None: all.
        by_row: number of chosen tokens of each row; in sum above the number of entries if the forecast was too low.
    """

    index: Int[Tensor, " N"]
    before: Int[Tensor, " N"]
    live: Bool[Tensor, " N"] | None
    by_row: Int[Tensor, " B"]

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


def going_on(
    goes_on: Bool[Tensor, "R n"],
    index: Int[Tensor, " N"] | None,
    live: Bool[Tensor, "*R N"] | None,
    rows: int,
    length: int,
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " B*T"], Int[Tensor, " B"]]:
    """The entries of a step that go on (of `index`, or all tokens), the same of all tokens, and the count by row."""
    some = (goes_on if live is None else goes_on & live).flatten()
    runs = some if index is None else some.new_zeros(rows * length).index_copy(0, index, some)
    return some, runs, runs.view(rows, length).sum(1)


def ahead(
    some: Bool[Tensor, " N"], index: Int[Tensor, " N"] | None, size: int
) -> tuple[Int[Tensor, " size"], Int[Tensor, " size"], Bool[Tensor, " size"]]:
    """The fields index, before and live of a `Flat` of `size` entries: those that go on first, then others."""
    until, entries = some.cumsum(0, dtype=torch.int32), torch.arange(len(some), device=some.device, dtype=torch.int32)
    number, live = entries[:size], entries[:size] < until[-1]
    others = torch.searchsorted(entries + 1 - until, number + 1 - until[-1])
    place = torch.where(live, torch.searchsorted(until, number + 1), others)
    return place if index is None else index.index_select(0, place), place, live


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
    """`index` [B, n] reshaped to broadcast against `x`, whose token dimension is `dim`."""
    return index.view(index.shape[0], *(1,) * (dim - 1), index.shape[1], *(1,) * (x.ndim - dim - 1))


def rounded(most: int, length: int) -> int:
    """The number of entries a row gets if it has `length` tokens and at most `most` of a row are chosen."""
    return min(length, most if most <= BUCKET else -(-most // BUCKET) * BUCKET)


@torch.compiler.disable
def choose(mask: Bool[Tensor, "B T"]) -> Chosen | None:
    """The tokens of the mask; None if it has none. Waits for the device once.

    On the meta device, which has no values, the mask chooses all.
    """
    if mask.is_meta:
        return Chosen()
    length = mask.shape[1]
    fewest, most = torch.stack(mask.sum(1).aminmax()).tolist()
    size = rounded(most, length)
    if size in (0, length):
        return None if size == 0 else Chosen(None, None if fewest == length else mask)
    index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :size]
    return Chosen(index, None if fewest == size else mask.gather(1, index))
