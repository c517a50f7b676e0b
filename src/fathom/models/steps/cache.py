"""Cache layers for tokens that ran different numbers of steps: they hold the slots that ran, ordered by segment."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fathom.decoding.versions import CACHE_NAME
from fathom.models.configuration import FathomConfig
from fathom.ops.gather_slots import KeyValue, columns
from fathom.ops.token_blocks import NOWHERE

FOREVER = 2**30  # the last step at which a slot of such a segment is visible


def appended_segments(steps: int) -> tuple[tuple[int, int], ...]:
    """(First, last) step at which slots of each segment are visible under `append`: from their own step on."""
    return tuple((step, FOREVER) for step in range(steps))


def replaced_segments(steps: int) -> tuple[tuple[int, int], ...]:
    """(First, last) step at which slots of each segment are visible under `replace`: a token's last slot from its own
    step on, every other slot at its own step only.
    """
    return appended_segments(steps) + tuple((step, step) for step in range(steps - 1))


@dataclasses.dataclass(frozen=True)
class Packing:
    """A new order of a cache's columns for all layers: where each comes from, and their new tokens and sizes."""

    index: Int[Tensor, "B columns"]
    token: Int[Tensor, "B columns"]
    sizes: list[int]
    gaps: bool


class StepLayer(DynamicLayer):
    """A growing cache layer of the slots that ran, ordered by segment; lengths and crops are in tokens.

    Attributes:
        segments: (first, last) step at which slots of each segment are visible.
        sizes: columns of each segment.
        token: the number of every slot's token, `NOWHERE` for columns that a row does not use.
        gaps: whether there may be such unused columns.
        tokens: number of tokens that the slots belong to.
    """

    token: Int[Tensor, "B columns"]

    def __init__(self, segments: tuple[tuple[int, int], ...]):
        super().__init__()
        self.segments = segments
        self.sizes, self.tokens, self.gaps, self.unpacked = [0] * len(segments), 0, False, 0

    def reset(self) -> None:
        super().reset()
        self.sizes, self.tokens, self.gaps, self.unpacked = [0] * len(self.segments), 0, False, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def visible(self, step: int) -> list[slice]:
        """Indices of the columns that a slot of this step may see."""
        slices: list[slice] = []
        stop = 0
        for (first, last), size in zip(self.segments, self.sizes, strict=True):
            start, stop = stop, stop + size
            if first <= step <= last and size:
                if slices and slices[-1].stop == start:
                    start = slices.pop().start
                slices.append(slice(start, stop))
        return slices

    def expect(self, key: Tensor, value: Tensor) -> None:
        """Prepare for slots of this shape and dtype, if none have come yet."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)

    def append(
        self, tokens: int, slots: KeyValue, token: Tensor, sizes: list[int], gaps: bool, numbers: Tensor | None
    ) -> Tensor:
        """Add slots ordered by segment, `sizes` of each. Returns the tensor of all slots' token numbers.

        numbers: that tensor from a layer with the same slots, so that all layers share it.
        """
        self.expect(*slots)
        keys, values = slots
        if self.tokens:
            keys = _merged(self.keys, keys, self.sizes, sizes, 2)  # type: ignore[arg-type]
            values = _merged(self.values, values, self.sizes, sizes, 2)  # type: ignore[arg-type]
            token = _merged(self.token, token, self.sizes, sizes, 1) if numbers is None else numbers
        self.keys, self.values, self.token = keys, values, token
        self.sizes = [held + new for held, new in zip(self.sizes, sizes, strict=True)]
        self.tokens += tokens
        self.gaps |= gaps
        self.unpacked += sum(sizes) * gaps
        return token

    def packing(self) -> Packing:
        """The order with every row's used columns first in their segment, and without columns that no row uses."""
        parts = self.token.split(self.sizes, 1)
        used = torch.stack([(part != NOWHERE).sum(1).amax() for part in parts]).tolist()
        columns, start = [], 0
        for size, part in zip(used, parts, strict=True):
            order = (part == NOWHERE).to(torch.uint8).argsort(dim=1, stable=True)
            columns.append(order[:, :size] + start)
            start += part.shape[1]
        index = torch.cat(columns, dim=1)
        token = self.token.gather(1, index)
        return Packing(index, token, used, bool((token == NOWHERE).any()))

    def pack(self, to: Packing) -> None:
        self.keys, self.values = columns(self.keys, to.index), columns(self.values, to.index)  # type: ignore[arg-type]
        self.token, self.sizes, self.gaps, self.unpacked = to.token, [*to.sizes], to.gaps, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older callers name the length to keep
            tokens_to_remove -= self.tokens
        if tokens_to_remove >= 0 or not self.tokens:
            return
        self.tokens = max(self.tokens + tokens_to_remove, 0)
        stay = self.token < self.tokens
        columns = stay.any(0)
        self.sizes = [int(part.sum()) for part in columns.split(self.sizes)]
        self.keys, self.values = self.keys[..., columns, :], self.values[..., columns, :]  # type: ignore[index]
        self.token = torch.where(stay, self.token, NOWHERE)[:, columns]
        self.gaps |= bool((self.token == NOWHERE).any())  # rows as long as each other lose different columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.token = self.token.index_select(0, beam_idx.to(self.token.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.token = self.token.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.token = self.token[indices]


def hold_steps(cache: Cache, config: FathomConfig, segments: tuple[tuple[int, int], ...], depth: str) -> None:
    """Replace the layers of an empty dynamic cache by `StepLayer`s; refuse a cache that holds anything else."""
    layers: list[Any] = cache.layers
    if layers and all(type(layer) is StepLayer and layer.segments == segments for layer in layers):
        return
    if any(layer.get_seq_length() for layer in layers):
        raise ValueError(
            f"{CACHE_NAME} holds another method's slots, or those of other options, not those of "
            f"depth={depth!r} with these; pass an empty DynamicCache()"
        )
    kinds = {type(layer).__name__ for layer in layers if not isinstance(layer, DynamicLayer)}
    if kinds:
        raise ValueError(
            f"{CACHE_NAME} has layers of type {', '.join(sorted(kinds))}, but depth={depth!r} keeps as "
            "many slots as a token runs, which only dynamic layers hold; pass a DynamicCache(), "
            "and no cache_implementation to generate()"
        )
    layers[:] = [StepLayer(segments) for _ in range(config.num_hidden_layers)]


def _merged(held: Tensor, new: Tensor, sizes: list[int], added: list[int], dim: int) -> Tensor:
    """The slots of each segment, held ones followed by new ones."""
    parts, start, stop, taken = [], 0, 0, 0
    for size, more in zip(sizes, added, strict=True):
        stop += size
        if more:  # what lies between two such segments stays in one piece: decoding waits for the calls
            parts += [held.narrow(dim, start, stop - start), new.narrow(dim, taken, more)]
            start, taken = stop, taken + more
    parts.append(held.narrow(dim, start, held.shape[dim] - start))
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def joined(slots: list[KeyValue]) -> KeyValue | None:
    """Several groups of slots, concatenated."""
    if len(slots) < 2:
        return slots[0] if slots else None
    keys, values = zip(*slots, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)
