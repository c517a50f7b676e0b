"""Which nodes of the tree a block of queries reads. Lists depend on the number of blocks alone and are kept."""

from __future__ import annotations

import dataclasses
import functools

import torch
from jaxtyping import Int
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What the S blocks of a row read, each a list in the order of the text, filled up with −1.

    Attributes:
        level, start: of every node; it covers blocks start … start + 2^level − 1.
        own: at which place of its list a block has itself.
    """

    level: Int[Tensor, "S n"]
    start: Int[Tensor, "S n"]
    own: Int[Tensor, " S"]


def levels_of(blocks: int, stop_level: int) -> int:
    """Levels of the tree over so many blocks: p = 0, and every p < stop_level with 2^p < S."""
    return max(1, min(stop_level, (blocks - 1).bit_length()))


@functools.lru_cache(maxsize=256)
def chosen(blocks: int, wing_size: int, stop_level: int, boundary: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(start, level) of the nodes of every block, in order.

    From near to far, on each side: `wing_size` nodes of level 0, as many of level 1, and so on; the last level goes on
    to the end. Only nodes that lie in the sequence are taken. What then stays unseen at an end is left ("drop") or
    covered by the largest nodes that fit ("fill").
    """
    top = levels_of(blocks, stop_level) - 1

    def side(room: int) -> list[tuple[int, int]]:
        """(distance, level) of nodes on a side with `room` blocks, outwards."""
        found, place, level = [], 0, 0
        while level <= top:
            endless = level >= stop_level - 1
            count = 0
            while (endless or count < wing_size) and place + 2**level <= room:
                found.append((place, level))
                place += 2**level
                count += 1
            if count < wing_size or endless:
                break
            level += 1
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
def nodes(blocks: int, wing_size: int, stop_level: int, boundary: str, device: torch.device) -> Nodes:
    """`chosen` as tensors."""
    lists = chosen(blocks, wing_size, stop_level, boundary)
    most = max(map(len, lists))
    with torch.inference_mode(False):  # kept, and training may come after inference
        table = torch.tensor([[*row, *[(-1, -1)] * (most - len(row))] for row in lists])
        own = torch.tensor([row.index((block, 0)) for block, row in enumerate(lists)])
        return Nodes(table[..., 1].to(device), table[..., 0].to(device), own.to(device))


def mean_nodes(blocks: int, wing_size: int, stop_level: int, boundary: str) -> float:
    """Nodes that a block reads, the mean over blocks."""
    return sum(map(len, chosen(blocks, wing_size, stop_level, boundary))) / blocks
