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


def writable(buffer: Tensor, new: Tensor) -> bool:
    """Whether tokens like `new` may be written into the buffer."""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return (buffer.dtype, buffer.device, buffer.shape[:2]) == (new.dtype, new.device, new.shape[:2])


class GrowingLayer(DynamicLayer):
    """transformers' growing layer, whose `keys` and `values` [B,G,n,D] are views of buffers for more than n tokens.

    Tokens that come after a `crop` are written over those that went, also in tensors taken from the layer before it.

    expected: tokens for which room is made at first.
    most: the most tokens that the call which made the layer will bring; it makes no room beyond them.
    """

    def __init__(self, expected: int = 0, most: int | None = None):
        super().__init__()
        self.expected, self.most = expected, most
        self.buffers: dict[str, tuple[Tensor, Tensor]] = {}  # by name, the buffer and the view that was last given out

    @classmethod
    def over(cls, keys: Tensor, values: Tensor, length: int) -> GrowingLayer:
        """A layer on these buffers [B,G,room,D], whose first `length` tokens are the text."""
        layer = cls()
        layer.device, layer.is_initialized = keys.device, True
        layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
        layer.buffers = {"keys": (keys, layer.keys), "values": (values, layer.values)}
        return layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self.keys = self.extended("keys", self.keys, key_states, length)
        self.values = self.extended("values", self.values, value_states, length)
        return self.keys, self.values

    def extended(self, name: str, held: Any, new: Tensor, length: int) -> Tensor:
        """The held tokens followed by the new ones, written in place if there is room.

        Tokens that somebody put there since, as rows that were chosen or repeated, are not the buffer's: they are
        copied into a new one. Where gradients may be taken of what was given out, and in a compiled model, which every
        view would have compiled again, all is copied, as by transformers.
        """
        total = length + new.shape[2]
        if length and (held.shape[:2], held.shape[3]) != (new.shape[:2], new.shape[3]):  # writing would broadcast
            raise ValueError(
                f"{name} of shape {tuple(new.shape)} cannot follow {tuple(held.shape)} of the cache: rows, heads and "
                "width must be the same"
            )
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.buffers.pop(name, None)
            return torch.cat((held, new), dim=2) if length else new.clone()
        buffer, view = self.buffers.get(name, (None, None))
        if buffer is None or held is not view or total > buffer.shape[2] or not writable(buffer, new):
            room = max(bucket(total), self.expected)
            if self.most is not None and total <= self.most:  # of the first call; later ones may go beyond it
                room = min(room, self.most)
            dtype = torch.promote_types(held.dtype, new.dtype) if length else new.dtype  # as torch.cat would
            buffer = new.new_empty((*new.shape[:2], room, new.shape[3]), dtype=dtype)
            if length:
                buffer[:, :, :length] = held
        buffer.narrow(2, length, new.shape[2]).copy_(new)
        whole = buffer.narrow(2, 0, total)
        self.buffers[name] = buffer, whole
        return whole

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the room of the tokens that go is kept."""
        kept = [name for name, (_, view) in self.buffers.items() if getattr(self, name) is view]
        super().crop(*args, **kwargs)
        self.buffers = {name: (self.buffers[name][0], getattr(self, name)) for name in kept}

    def reset(self) -> None:
        super().reset()
        self.buffers = {}


def give_room(cache: Any, expected: int, most: int | None) -> None:
    """Replace the layers of an empty dynamic cache by growing ones; any other cache stays as it is."""
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        return
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers[:] = [GrowingLayer(expected, most) for _ in cache.layers]
