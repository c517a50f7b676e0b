"""The order in which blocks are read: a function of the seed alone.

The Trainer sees one long epoch, so every step has its full number of tokens, all methods read the same blocks in the
same steps whatever the number of devices, and resuming is skipping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import torch

from fathom.data import StreamingBlocks


class ShuffledBlocks(torch.utils.data.Dataset):
    """`length` blocks: pass after pass over `blocks`, each in its own permutation drawn from (seed, pass).
    `numbered`: a block also says under "draw" the seed, and as how manyth it is read."""

    def __init__(self, blocks: datasets.Dataset, seed: int, length: int, numbered: bool = False) -> None:
        self.blocks, self.seed, self.length, self.numbered = blocks, seed, length, numbered
        self._permutation: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:  # the data loader's batched read
        blocks = self.blocks.__getitems__([self.position(index) for index in indices])
        if self.numbered:
            for block, index in zip(blocks, indices, strict=True):
                block["draw"] = torch.tensor([self.seed, index])
        return blocks

    def position(self, index: int) -> int:
        """Which block is the `index`-th to be read."""
        epoch, offset = divmod(index, len(self.blocks))
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
        return int(self._permutation[1][offset])


def reseeded(stream: StreamingBlocks, seed: int) -> StreamingBlocks:
    """The stream (which never ends) in another order."""
    return StreamingBlocks(stream.source, stream.tokenizer, replace(stream.config, seed=seed))
