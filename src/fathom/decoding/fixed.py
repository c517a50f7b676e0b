"""One decode step at fixed addresses, recorded once and replayed for every token.

Token, position, place and mask are in buffers of their own; the step advances position and place itself. A full cache
is in buffers with spare room (`growing.bucket`), and the mask shows which slots are filled. When they are full they
grow by a bucket, and the step is recorded again; FreqKV compresses its buffers in place instead. A compressed cache
whose budget is full is overwritten in place and needs no spare room.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.decoding.graphs import Recorder, unrecordable
from fathom.decoding.growing import GrowingLayer, bucket, with_room
from fathom.decoding.versions import CACHE_NAME
from fathom.ops.filled_attention import filled_attention

logger = logging.getLogger("fathom.decoding")
LOCK = threading.Lock()
ALL = "full_attention"  # the type of a layer that sees the whole text
DROPOUT = ("attention_dropout", "attn_pdrop")  # of attention's weights, as configs name it
FILLED = "sdpa_filled"  # the attention of a step over buffers with room, as transformers knows it


class FixedLayer(DynamicLayer):
    """Keys and values [B,G,room,D] at one address; a new token goes to `place` [1], which all layers share."""

    def __init__(self, layer: DynamicLayer, place: Tensor, length: int, room: int):
        super().__init__()
        self.place, self.device, self.is_initialized = place, layer.device, True
        self.keys, self.values = with_room(layer.keys, length, room), with_room(layer.values, length, room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        keys.index_copy_(2, self.place, key_states.to(keys.dtype))
        values.index_copy_(2, self.place, value_states.to(values.dtype))
        return keys, values


def attend_filled(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`filled_attention` as a function of transformers' `AttentionInterface`; cases it does not support go to sdpa."""
    plain = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)
    others = ("position_bias", "softcap", "s_aux", "sinks")
    if not plain or query.shape[2] != 1 or kwargs.get("dropout") or any(kwargs.get(x) is not None for x in others):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    return filled_attention(query.to(key.dtype), key, value, mask, scaling).transpose(1, 2), None


AttentionInterface.register(FILLED, attend_filled)
AttentionMaskInterface.register(FILLED, sdpa_mask)


@contextlib.contextmanager
def filled(config: Any) -> Iterator[None]:
    """A context in which models of this config attend by `attend_filled`; one thread at a time is in it."""
    with LOCK:
        before, config._attn_implementation = config._attn_implementation, FILLED
        try:
            yield
        finally:
            config._attn_implementation = before


def appending(cache: Any) -> list[Any]:
    """The states of a compressed cache, layer by layer, if every step appends a token to each; else an empty list."""
    states = [state for layer in cache.compressed_layers() for state in layer.states]
    return states if all(getattr(state, "appends", False) for state in states) else []


def unsuited(model: Any, cache: Any, model_kwargs: dict[str, Any]) -> str:
    """Why a step of this model cannot be recorded; "" where it can."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    dropout = any(getattr(model.config.get_text_config(decoder=True), name, 0) for name in DROPOUT)
    if type(cache) is DynamicCache:
        kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "GrowingLayer"}
        if kinds:
            return f"cache layers {', '.join(sorted(kinds))} have no fixed shape"
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {ALL}:
            return "some layers do not see the whole text"
        if attention != "sdpa":
            return f"attn_implementation={attention!r}: only sdpa reads a mask of one key a slot"
    elif not hasattr(cache, "addresses"):
        return f"a {type(cache).__name__} may move"
    elif len(cache.compressed_layers()) < len(cache.layers):
        return "layers beside the compressed ones have a cache that moves"
    elif (states := appending(cache)) and (cache.groups.pads != [0] or len({state.stored for state in states}) > 1):
        return "rows or layers hold different numbers of tokens, so that a new one has no common place"
    elif states and model.training and dropout:
        return "attention drops weights in training, which a step over buffers with room does not"
    if getattr(cache, "_is_user_defined", False):
        return "the cache is the caller's own"
    if model_kwargs.get("position_ids") is None or model_kwargs["position_ids"].ndim != 2:
        return "positions are not [rows, tokens]"
    return unrecordable(model)


class FixedStep:
    """A `loop.Step` at fixed addresses: token [B,1] → logits [B,V], which the next step overwrites.

    recorded: how often the step has been recorded so far.
    """

    def __init__(self, model: Any, cache: Any, length: int, model_kwargs: dict[str, Any], recorder: Recorder):
        self.model, self.cache, self.recorder, self.length = model, cache, recorder, length
        device, positions = model.device, model_kwargs["position_ids"]
        kept = {"attention_mask", "position_ids", CACHE_NAME}
        self.inputs = {name: value for name, value in model_kwargs.items() if name not in kept}
        self.full, self.recorded, self.given_up = type(cache) is DynamicCache, 0, False
        self.states = [] if self.full else appending(cache)
        if self.states:
            self.length = length = self.states[0].stored
        self.replay: Any = None
        self.before: Any = None  # addresses of a compressed cache before the last step
        self.warm = False
        self.position = (positions[:, -1:].to(device) + 1).clone()
        self.place = torch.full((1,), length, device=device)
        self.logits: Tensor | None = None
        mask = model_kwargs.get("attention_mask")
        rows = cache.layers[0].keys.shape[0] if self.full else cache.compressed_layers()[0].batch_size
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        if self.grows:
            self.visible = torch.zeros(rows, 1, 1, length, dtype=torch.bool, device=device)
            self.visible[:, 0, 0] = True if mask is None or self.states else mask.to(device).bool()
            self.grow()

    @property
    def grows(self) -> bool:
        """Whether every step stores a token in a slot of its own."""
        return self.full or bool(self.states)

    @property
    def room(self) -> int:
        return self.visible.shape[3]

    @property
    def most(self) -> int | None:
        """The number of slots at which a state drops tokens, between two steps."""
        return self.states[0].most if self.states else None

    def grow(self) -> None:
        """Make room for more tokens, layer by layer. Addresses change, so the step must be recorded again."""
        room = bucket(self.length) if self.most is None else min(self.most, bucket(self.length))
        visible = self.visible.new_zeros(*self.visible.shape[:3], room)
        visible[..., : self.length] = self.visible[..., : self.length]
        self.visible, self.replay = visible, None
        for state in self.states:
            state.fix(self.place, visible, self.length)
        for number, layer in enumerate(self.cache.layers if self.full else ()):
            self.cache.layers[number] = FixedLayer(layer, self.place, self.length, room)
            layer.keys = layer.values = None

    def compress(self) -> None:
        """Make room in the same buffers by dropping tokens of the states; the recording stays valid."""
        for state in self.states:
            self.length = state.make_room()
        self.visible[..., self.length :] = False
        self.place.fill_(self.length)

    def run(self) -> None:
        """Run one step. This is the function that is recorded."""
        inputs = self.inputs
        if self.grows:
            self.visible.index_fill_(3, self.place, True)
        if self.full:
            inputs = {**inputs, "attention_mask": self.visible}
        with filled(self.model.config.get_text_config(decoder=True)) if self.full else contextlib.nullcontext():
            output = self.model(
                input_ids=self.token, position_ids=self.position, return_dict=True, **inputs, **{CACHE_NAME: self.cache}
            )
        if self.logits is None:
            self.logits = torch.empty_like(output.logits[:, -1])
        self.logits.copy_(output.logits[:, -1])
        self.position.add_(1)
        self.place.add_(1)

    def __call__(self, token: Tensor) -> Tensor:
        if self.grows and self.length == self.most:
            self.compress()
        elif self.grows and self.length == self.room:
            self.grow()
            logger.info("the full cache has grown to %d tokens: the step is recorded again", self.room)
        self.token.copy_(token)
        self.length += 1
        if self.replay is None and self.may_record():
            self.replay = self.record()
        if self.replay is None:
            self.run()
            self.warm = True
        else:
            self.replay()
            if not self.full:
                self.cache.count(1)
        assert self.logits is not None
        return self.logits

    def may_record(self) -> bool:
        """Whether a step may be recorded: one has run, so that libraries are loaded, and the cache did not move."""
        if self.given_up or not self.warm:
            return False
        if self.grows:
            return True
        before, self.before = self.before, self.cache.addresses()
        return self.before == before

    def record(self) -> Any:
        """The recorded step; None where recording fails. Steps then run unrecorded, and it is not tried again."""
        undo = None if self.full else self.cache.undo()
        try:
            replay = self.recorder.record(self.run)
        except RuntimeError as error:  # out of memory, or an operation that waits for the device
            if undo is not None:
                undo()
            logger.warning("a decode step could not be recorded, and runs kernel by kernel: %s", error)
            self.given_up = True
            return None
        if not self.full:
            self.cache.count(-1)  # the layers counted a token while they were recorded
        self.recorded += 1
        return replay

    def finish(self) -> Any:
        """The cache in its ordinary form, without spare room."""
        for state in self.states:
            state.release(self.length)
        if self.full:
            for number, layer in enumerate(self.cache.layers):
                self.cache.layers[number] = GrowingLayer.over(layer.keys, layer.values, self.length)
        return self.cache
