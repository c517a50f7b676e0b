"""A full cache with room to grow: a step writes its own token and copies nothing of the text before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST = 64  # tokens of room that a grown layer has at least


def bucket(tokens: int) -> int:
    """The number of tokens that a cache of `tokens` tokens gets room for: an eighth more, in multiples of `LEAST`."""
    return -(-(tokens + max(LEAST, tokens // 8)) // LEAST) * LEAST


def with_room(held: Any, length: int, room: int) -> Tensor:
    """A buffer [B,G,room,D] with the first `length` of the held tokens [B,G,n,D], and zeros behind them."""
    new = held.new_zeros(*held.shape[:2], room, held.shape[3])  # a mask hides what is not filled, but not NaN
    new[:, :, :length] = held[:, :, :length]
    return new


class GrowingLayer(DynamicLayer):
    """transformers' growing layer, whose `keys` and `values` [B,G,n,D] are views of storage for more than n tokens.

    expected: tokens for which room is made at first.
    most: the most tokens that will come; no room is made beyond them.
    """

    def __init__(self, expected: int = 0, most: int | None = None):
        super().__init__()
        self.expected, self.most = expected, most

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self.keys = self.extended(self.keys, key_states, length)
        self.values = self.extended(self.values, value_states, length)
        return self.keys, self.values

    def extended(self, held: Any, new: Tensor, length: int) -> Tensor:
        """The held tokens followed by the new ones, written in place if there is room."""
        total = length + new.shape[2]
        if length and self.has_room(held, total) and held.dtype == new.dtype:
            whole = held.as_strided((*held.shape[:2], total, held.shape[3]), held.stride())
        else:
            room = max(bucket(total), self.expected)
            room = max(total, room if self.most is None else min(room, self.most))
            dtype = torch.promote_types(held.dtype, new.dtype) if length else new.dtype  # as torch.cat would
            whole = new.new_empty((*new.shape[:2], room, new.shape[3]), dtype=dtype)[:, :, :total]
            if length:
                whole[:, :, :length] = held
        whole[:, :, length:] = new
        return whole

    @staticmethod
    def has_room(held: Tensor, total: int) -> bool:
        """Whether this view's storage has room for `total` tokens; after rows were chosen or repeated it has none."""
        heads, width = held.shape[1], held.shape[3]
        room = held.stride(1) // width
        laid_out = held.stride() == (heads * room * width, room * width, width, 1) and held.storage_offset() == 0
        numbers = held.untyped_storage().nbytes() // held.itemsize
        return laid_out and total <= room and numbers == len(held) * heads * room * width


def give_room(cache: Any, expected: int, most: int | None) -> None:
    """Replace the layers of an empty dynamic cache by growing ones; any other cache stays as it is."""
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        return
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers[:] = [GrowingLayer(expected, most) for _ in cache.layers]
