"""Blocks in an order that is a function of the seed alone: of one text, or of several that are mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch


class ShuffledBlocks(torch.utils.data.Dataset):
    """`length` blocks: pass after pass over `blocks`, each in its own permutation drawn from (seed, pass).
    numbered: whether a block has, under "draw", the seed and its own number in the order of reading."""

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
        """The index in `blocks` of the block that is read at `index`."""
        epoch, offset = divmod(index, len(self.blocks))
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
        return int(self._permutation[1][offset])


class MixedBlocks(torch.utils.data.Dataset):
    """`length` blocks of named sources: each is drawn from source s with probability w_s, from (seed, index) alone.

    A source's own blocks come pass after pass, as `ShuffledBlocks` orders them. A block has `domains`, the number of
    its source.
    """

    def __init__(
        self,
        sources: dict[str, datasets.Dataset],
        weights: dict[str, float],
        seed: int,
        length: int,
        caps: dict[str, float | None] | None = None,
        numbered: bool = False,
    ) -> None:
        """weights: of the sources by name; a missing one is 0.   caps: the most passes over each source. Raises
        ValueError if a source would be passed over more often.   numbered: as in `ShuffledBlocks`.
        """
        self.sources, self.weights, self.caps, self.length = sources, weights, caps or {}, length
        self.seed, self.numbered = seed, numbered
        total = sum(weights.values())
        shares = [weights.get(name, 0.0) / total for name in sources]
        self.chosen = (
            np.random.default_rng([seed, len(sources)]).choice(len(sources), length, p=shares).astype(np.int16)
        )
        self.rank = np.zeros(length, dtype=np.int64)  # of a block among those of its source
        for number in range(len(sources)):
            mine = self.chosen == number
            self.rank[mine] = np.arange(mine.sum())
        counts = np.bincount(self.chosen, minlength=len(sources)).tolist()
        self.whole = datasets.concatenate_datasets(list(sources.values())).with_format("torch")
        self.starts = np.cumsum([0, *map(len, sources.values())]).tolist()
        self.parts = [ShuffledBlocks(blocks, seed, n) for blocks, n in zip(sources.values(), counts, strict=True)]
        for name, epochs in self.epochs.items():
            cap = self.caps.get(name)
            if cap is not None and epochs > cap:
                raise ValueError(
                    f"data.train.{name}.max_epochs={cap:g}: the training would pass over it {epochs:.2f} times; give "
                    "it a smaller weight, more text, or a higher cap"
                )

    @property
    def epochs(self) -> dict[str, float]:
        """The number of passes over each source."""
        return {name: len(part) / len(part.blocks) for name, part in zip(self.sources, self.parts, strict=True)}

    @property
    def note(self) -> str:
        said = (
            f"{name} {len(part):,} blocks, {epochs:.2f} epochs"
            for (name, epochs), part in zip(self.epochs.items(), self.parts, strict=True)
            if name in self.weights
        )
        return f"Training text: {'; '.join(said)}."

    def ordered(
        self, seed: int, length: int, weights: dict[str, float] | None = None, numbered: bool = False
    ) -> MixedBlocks:
        """The same sources with another seed, length and weights."""
        return MixedBlocks(self.sources, weights or self.weights, seed, length, self.caps, numbered)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.length))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:  # one read, not one a block or a source
        numbers = [int(self.chosen[index]) for index in indices]
        places = [self.parts[n].position(int(self.rank[i])) for n, i in zip(numbers, indices, strict=True)]
        blocks = self.whole.__getitems__([self.starts[n] + place for n, place in zip(numbers, places, strict=True)])
        for block, number, index in zip(blocks, numbers, indices, strict=True):
            block["domains"] = number
            if self.numbered:
                block["draw"] = torch.tensor([self.seed, index])
        return blocks
