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
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.decoding.compiled import compiled_layers, unsuited_layers
from fathom.decoding.graphs import Recorder, unrecordable
from fathom.decoding.growing import GrowingLayer, bucket, with_room
from fathom.decoding.versions import CACHE_NAME
from fathom.ops.filled_attention import filled_attention

logger = logging.getLogger("fathom.decoding")
LOCK = threading.Lock()
ALL = "full_attention"  # the type of a layer that sees the whole text
DROPOUT = ("attention_dropout", "attn_pdrop")  # of attention's weights, as configs name it
APPENDED = (DynamicLayer, GrowingLayer)  # layers that a step adds its token to, and others may say so of themselves
FILLED = "sdpa_filled"  # the attention of a step over buffers with room, as transformers knows it


class Slots:
    """Data shared by layers that hold `length` slots of the same rows: the index of the next slot, `place` [1], and the
    mask of slots that count, `visible` [B,1,1,room].

    states: of a compressed cache; empty for the layers of a full one.
    stages: number of slots that a step adds.
    shared: data that the states derive from the place once a step, and that all of them read.
    """

    def __init__(self, visible: Tensor, states: list[Any], stages: int = 1):
        self.visible, self.states, self.stages, self.length = visible, states, stages, visible.shape[3]
        self.place = torch.full((1,), self.length, device=visible.device)
        self.new = torch.arange(stages, device=visible.device)
        self.shared: tuple[Tensor, ...] = ()

    @property
    def room(self) -> int:
        return self.visible.shape[3]

    def grow(self) -> None:
        """Room for more tokens."""
        most = self.states[0].most if self.states else None
        room = bucket(self.length) if most is None else min(most, bucket(self.length))
        visible = self.visible.new_zeros(*self.visible.shape[:3], room)
        visible[..., : self.length] = self.visible[..., : self.length]
        self.visible = visible
        for state in self.states:
            state.fix(self)

    def begin(self) -> None:
        """Begin a step: make its slots visible."""
        if self.states:
            self.shared = self.states[0].shared(self)
        self.visible.index_fill_(3, self.place if self.stages == 1 else self.place + self.new, True)

    def compress(self) -> None:
        """Compress, if due, between two steps and in the same buffers; the recording stays valid."""
        if not self.states or self.length != self.states[0].due:
            return
        for state in self.states:
            self.length = state.make_room()
        self.visible[..., self.length :] = False
        self.place.fill_(self.length)


class FixedLayer(DynamicLayer):
    """Keys and values [B,G,room,D] at one address; a new token goes to the place that all layers share."""

    def __init__(self, layer: DynamicLayer, slots: Slots):
        super().__init__()
        self.place, self.device, self.is_initialized = slots.place, layer.device, True
        self.keys = with_room(layer.keys, slots.length, slots.room)
        self.values = with_room(layer.values, slots.length, slots.room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        keys.index_copy_(2, self.place, key_states.to(keys.dtype))
        values.index_copy_(2, self.place, value_states.to(values.dtype))
        return keys, values

    def growing(self, length: int) -> GrowingLayer:
        """The first `length` tokens as other calls know them."""
        assert self.keys is not None and self.values is not None
        return GrowingLayer.over(self.keys, self.values, length)


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


def appending(cache: Any) -> dict[tuple[int, int], list[Any]]:
    """The states of a compressed cache where every step appends a token to each; else none. By group of rows and number
    of tokens held, which may differ between layers (PyramidKV)."""
    alike: dict[tuple[int, int], list[Any]] = {}
    for layer in cache.compressed_layers():
        for group, state in enumerate(layer.states):
            if not getattr(state, "appends", False):
                return {}
            alike.setdefault((group, state.stored), []).append(state)
    return alike


def unsuited(model: Any, cache: Any, model_kwargs: dict[str, Any]) -> str:
    """Why a step of this model cannot be recorded; "" where it can."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    dropout = any(getattr(model.config.get_text_config(decoder=True), name, 0) for name in DROPOUT)
    if type(cache) is DynamicCache:
        moving = [layer for layer in cache.layers if not getattr(layer, "at_fixed_place", type(layer) in APPENDED)]
        if moving:
            return f"cache layers {type(moving[0]).__name__} have no fixed shape"
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {ALL}:
            return "some layers do not see the whole text"
        if attention not in ("sdpa", FILLED):  # another thread may run a step just now
            return f"attn_implementation={attention!r}: only sdpa reads a mask of one key a slot"
    elif not hasattr(cache, "addresses"):
        return f"a {type(cache).__name__} may move"
    elif len(cache.compressed_layers()) < len(cache.layers):
        return "layers beside the compressed ones have a cache that moves"
    elif model.training and dropout and any(hasattr(state, "appends") for state in cache.compressed_layers()[0].states):
        return "attention drops weights in training, which a step over buffers with room does not"
    if getattr(cache, "_is_user_defined", False):
        return "the cache is the caller's own"
    if model_kwargs.get("position_ids") is None or model_kwargs["position_ids"].ndim != 2:
        return "positions are not [rows, tokens]"
    return unrecordable(model)


def uncompilable(model: Any, cache: Any) -> str:
    """Why layers of a recorded step of this model are not compiled; "" where they can be."""
    if type(cache) is not DynamicCache or getattr(cache.layers[0], "stages", 1) > 1:
        return "only full caches of one slot a token are read by compiled layers"
    return unsuited_layers(model)


class FixedStep:
    """A `loop.Step` at fixed addresses: token [B,1] → logits [B,V], which the next step overwrites.

    how: how its layers are compiled; None: they are not.
    recorded: how often the step has been recorded so far.
    slots: where every step stores a token in a slot of its own; none: a full budget is overwritten.
    """

    def __init__(
        self, model: Any, cache: Any, model_kwargs: dict[str, Any], recorder: Recorder, how: CompileConfig | None = None
    ):
        self.model, self.cache, self.recorder, self.how = model, cache, recorder, how
        device, positions = model.device, model_kwargs["position_ids"]
        kept = {"attention_mask", "position_ids", CACHE_NAME}
        self.inputs = {name: value for name, value in model_kwargs.items() if name not in kept}
        self.full, self.recorded, self.given_up = type(cache) is DynamicCache, 0, False
        self.replay: Any = None
        self.before: Any = None  # addresses of a compressed cache before the last step
        self.warm = False
        self.position = (positions[:, -1:].to(device) + 1).clone()
        self.logits: Tensor | None = None
        rows = cache.layers[0].keys.shape[0] if self.full else cache.compressed_layers()[0].batch_size
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.slots: list[Slots] = []
        if self.full:
            mask = model_kwargs.get("attention_mask")
            real = torch.ones(rows, cache.get_seq_length()) if mask is None else mask
            stages = getattr(cache.layers[0], "stages", 1)
            visible = real.to(device).bool().repeat_interleave(stages, dim=1)[:, None, None]
            self.slots.append(Slots(visible, [], stages))
            self.grow()

    def take_slots(self) -> None:
        """Give a compressed cache room as soon as every step appends to it: before, its states may not be such."""
        counts = self.cache.compressed_layers()[0].row_counts()
        for (group, stored), states in appending(self.cache).items():
            visible = torch.ones(counts[group], 1, 1, stored, dtype=torch.bool, device=self.token.device)
            self.slots.append(Slots(visible, states))
        if self.slots:
            self.warm = False  # other operations run from now on
            self.grow()

    def grow(self) -> None:
        """Room for more tokens in all layers, one after the other: other addresses, so the step is recorded anew."""
        self.replay = None
        self.warm = self.warm and self.how is None  # nothing is compiled, for the new room, while it is recorded
        for slots in self.slots:
            slots.grow()
        for number, layer in enumerate(self.cache.layers if self.full else ()):
            slots, of_its_own = self.slots[0], getattr(layer, "at_fixed_place", None)
            self.cache.layers[number] = FixedLayer(layer, slots) if of_its_own is None else of_its_own(slots)
            layer.keys = layer.values = None

    def run(self) -> None:
        """Run one step. This is the function that is recorded."""
        inputs = self.inputs
        for slots in self.slots:
            slots.begin()
        if self.full and self.slots[0].stages == 1:  # layers of several slots make masks of their own
            inputs = {**inputs, "attention_mask": self.slots[0].visible}
        for layer in self.cache.layers if self.full else ():
            layer.came = 0  # a recording that failed may have ended between two slots
        with contextlib.ExitStack() as stack:
            if self.full:
                stack.enter_context(filled(self.model.config.get_text_config(decoder=True)))
            if self.how is not None:
                stack.enter_context(compiled_layers(self.model, self.cache, self.how))
            output = self.model(
                input_ids=self.token, position_ids=self.position, return_dict=True, **inputs, **{CACHE_NAME: self.cache}
            )
        if self.logits is None:
            self.logits = torch.empty_like(output.logits[:, -1])
        self.logits.copy_(output.logits[:, -1])
        self.position.add_(1)
        for slots in self.slots:
            slots.place.add_(slots.stages)

    def __call__(self, token: Tensor) -> Tensor:
        if not self.slots and self.replay is None:
            self.take_slots()
        for slots in self.slots:
            slots.compress()
        if any(slots.length + slots.stages > slots.room for slots in self.slots):
            self.grow()
            logger.info("a cache has grown to %d slots: the step is recorded again", self.slots[0].room)
        for slots in self.slots:
            slots.length += slots.stages
        self.token.copy_(token)
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
        if self.slots:
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
        """The cache as other calls know it, without the room behind the text."""
        for slots in self.slots:
            for state in slots.states:
                state.release(slots.length)
        for number, layer in enumerate(self.cache.layers if self.full else ()):
            self.cache.layers[number] = layer.growing(self.slots[0].length)
        return self.cache
