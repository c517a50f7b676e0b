"""Which nodes of the tree a block of queries reads. Lists depend on the number of blocks alone and are kept."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes that the S blocks of a row read, each a list in the order of the text, filled up with −1.

    Attributes:
        level, start: of every node; it covers blocks start … start + 2^level − 1.
        own: at which place of its list a block has itself.
    """

    level: Int[Tensor, "S n"]
    start: Int[Tensor, "S n"]
    own: Int[Tensor, " S"]


@dataclasses.dataclass(frozen=True, eq=False)
class Reads:
    """The nodes that the blocks of a batch read, the same for all layers.

    Attributes:
        level, start, own: as of `Nodes`, of each row; R is 1 where all rows read alike.
        real: which tokens are real, filled up to whole blocks; None: all, and the batch has whole blocks.
    """

    level: Int[Tensor, "R S n"]
    start: Int[Tensor, "R S n"]
    own: Int[Tensor, "R S"]
    real: Bool[Tensor, "B N"] | None


def levels_of(blocks: int, stop_level: int) -> int:
    """Levels of the tree over so many blocks: p = 0, and every p < stop_level with 2^p < S."""
    return max(1, min(stop_level, (blocks - 1).bit_length()))


@functools.lru_cache(maxsize=256)
def chosen(
    blocks: int, wing_size: int, stop_level: int, boundary: str, steps: str = "gradual"
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(start, level) of the nodes of every block, in order.

    From near to far, on each side: `wing_size` nodes of level 0, as many of level 1, and so on; the last level goes on
    to the end. Under `steps` "two" the last level follows level 0. Only nodes that lie in the sequence are taken. What
    then stays unseen at an end is left ("drop") or covered by the largest nodes that fit ("fill").
    """
    top = levels_of(blocks, stop_level) - 1

    def side(room: int) -> list[tuple[int, int]]:
        """(distance, level) of nodes on a side with `room` blocks, outwards."""
        found, place, level = [], 0, 0
        while level <= top:
            endless = level >= stop_level - 1 or (steps == "two" and level > 0)
            count = 0
            while (endless or count < wing_size) and place + 2**level <= room:
                found.append((place, level))
                place += 2**level
                count += 1
            if count < wing_size or endless:
                break
            level = max(top, 1) if steps == "two" else level + 1
        while boundary == "fill" and place < room:
            level = min(top, (room - place).bit_length() - 1)
            found.append((place, level))
            place += 2**level
        return found

    lists = []
    for block in range(blocks):
        right = [(block + 1 + place, level) for place, level in side(blocks - 1 - block)]
        left = [(block - place - 2**level, level) for place, level in side(block)]
        lists.append((*reversed(left), (block, 0), *right))
    return tuple(lists)


@functools.lru_cache(maxsize=64)
def nodes(blocks: int, wing_size: int, stop_level: int, boundary: str, steps: str, device: torch.device) -> Nodes:
    """`chosen` as tensors."""
    lists = chosen(blocks, wing_size, stop_level, boundary, steps)
    most = max(map(len, lists))
    with torch.inference_mode(False):  # kept, and training may come after inference
        table = torch.tensor([[*row, *[(-1, -1)] * (most - len(row))] for row in lists])
        own = torch.tensor([row.index((block, 0)) for block, row in enumerate(lists)])
        return Nodes(table[..., 1].to(device), table[..., 0].to(device), own.to(device))


@functools.lru_cache(maxsize=64)
def alike(
    length: int, block_len: int, wing_size: int, stop_level: int, boundary: str, steps: str, device: torch.device
) -> Reads:
    """`reads` of rows of `length` real tokens."""
    blocks = -(-length // block_len)
    table = nodes(blocks, wing_size, stop_level, boundary, steps, device)
    with torch.inference_mode(False):  # kept, and training may come after inference
        real = None if length == blocks * block_len else torch.arange(blocks * block_len, device=device)[None] < length
        return Reads(table.level[None], table.start[None], table.own[None], real)


def reads(
    real: Bool[Tensor, "B N"] | None,
    length: int,
    device: torch.device,
    *,
    block_len: int,
    wing_size: int,
    stop_level: int,
    boundary: str,
    steps: str,
) -> Reads:
    """The nodes that blocks of rows of `length` tokens read. A row's nodes are those of its own number of blocks, up to
    its last real token, whatever stands beside it in the batch.
    """
    if real is None or bool(real.all()):
        return alike(length, block_len, wing_size, stop_level, boundary, steps, device)
    blocks = -(-length // block_len)
    real = F.pad(real, (0, blocks * block_len - length))
    places = torch.arange(1, real.shape[1] + 1, device=device)
    own = [max(1, math.ceil(last / block_len)) for last in (real * places).amax(1).tolist()]
    sizes = sorted(set(own))
    found = {size: nodes(size, wing_size, stop_level, boundary, steps, device) for size in sizes}
    most = max(table.level.shape[1] for table in found.values())

    def placed(table: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        more = (0, most - table.level.shape[1], 0, blocks - len(table.level))
        return F.pad(table.level, more, value=-1), F.pad(table.start, more, value=-1), F.pad(table.own, more[2:])

    tables = {size: placed(table) for size, table in found.items()}
    rows = own if len(sizes) > 1 else own[:1]
    level, start, middle = (torch.stack([tables[size][part] for size in rows]) for part in range(3))
    return Reads(level, start, middle, real)


@functools.lru_cache(maxsize=8)
def addresses(reads: Reads, blocks: int, size: int, levels: int) -> tuple[Int[Tensor, "R S n 2"], Int[Tensor, "R S 2"]]:
    """The first row of a node among the kernels' means and its stride; of every list the own place and the length."""
    steps, offset = [], 0
    for level in range(levels):
        span, unit = 2**level, min(2**level, size)
        steps.append([offset, size // unit, span // unit])
        offset += (blocks * size - span) // unit + 1
    with torch.inference_mode(False):  # kept, and training may come after inference
        table = torch.tensor(steps, device=reads.level.device)[reads.level.clamp(min=0)]
        places = torch.stack((table[..., 0] + reads.start * table[..., 1], table[..., 2]), dim=-1)
        ends = torch.stack((reads.own, (reads.level >= 0).sum(-1)), dim=-1)
        return places.int(), ends.int()


def mean_nodes(blocks: int, wing_size: int, stop_level: int, boundary: str, steps: str = "gradual") -> float:
    """Nodes that a block reads, the mean over blocks."""
    return sum(map(len, chosen(blocks, wing_size, stop_level, boundary, steps))) / blocks
