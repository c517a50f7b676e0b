"""Slot layouts: methods that give one token several slots in the sequence (pauses, latent thoughts).

A token with n stages owns n consecutive slots, slot n·t + i holding stage i of token t. Slots of a token share its
position; the causal mask follows slot order; a padded token's slots are masked. `SlotStack` is the layer stack for
such methods, `SlotLayer` the cache layer that holds n slots a token and counts tokens. `RaggedSlotLayer` holds tokens
of different numbers of slots, with a bias each.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fathom.decoding.growing import GrowingLayer, with_room
from fathom.decoding.versions import CACHE_NAME
from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Stack
from fathom.models.token_facts import TokenFacts
from fathom.ops.biased_attention import (
    MASKED,
    ChannelBias,
    FlexBias,
    RangeBias,
    block_mask,
    causal_ranges,
    dense_mask,
)
from fathom.ops.visibility import CAUSAL, Visibility

# SDPA that reads a bias of keys as a channel (ops/biased_attention.py) everywhere, as flash backends do; "sdpa" itself
# only where the range kernels do not serve.
CHANNEL = "sdpa_bias_channel"
AttentionInterface.register(CHANNEL, sdpa_attention_forward)
AttentionMaskInterface.register(CHANNEL, sdpa_mask)

# New slots from which a kernel pays on a GPU over a dense mask: one block of FlexAttention's queries.
FLEX_FROM = 128


def interleave(stages: list[Float[Tensor, "B T d"]]) -> Float[Tensor, "B S d"]:
    """[z_0 of token 0, z_1 of token 0, …, z_0 of token 1, …]; S = n·T. `y[:, i::n]` takes stage i out again."""
    return stages[0] if len(stages) == 1 else torch.stack(stages, dim=2).flatten(1, 2)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The facts about new slots that attention needs. Keys are the cached slots, then the new ones.

    Attributes:
        position_ids: the token position of every new slot, for rotary or learned positions.
        step: the stage of every new slot within its token.
        stages: slots a token.
        valid: which keys belong to real tokens; None: all.
        key_bias: added to every query's score of that key, fp32 or wider; `MASKED` hides the key. None: 0.
        visibility: which slot sees which, by their indices among the keys; None: causal.
        tokens: number of tokens that start in the new slots; a ragged cache counts them.
    """

    position_ids: Int[Tensor, "B S"]
    step: Int[Tensor, " S"]
    stages: int
    valid: Bool[Tensor, "B keys"] | None = None
    key_bias: Float[Tensor, "B keys"] | None = None
    visibility: Visibility | None = None
    tokens: int = 0

    @property
    def restarts(self) -> Bool[Tensor, "B S"]:
        """Which slots start another document: those of a token whose position does not follow the last token's."""
        positions = self.position_ids
        return (self.step == 0) & (positions.diff(prepend=positions[:, :1] - 1) != 1)

    @property
    def slot_ids(self) -> Int[Tensor, "B S"]:
        """Ids that rise by one from slot to slot within a document and restart with it: position·n + step.

        transformers' mask builder and flash-attention path take ids that do not rise by one for packed documents. They
        get these ids, as the repeated `position_ids` would cut every token off from its past.
        """
        ids = self.position_ids * self.stages + self.step
        if len(self.step) in (1, self.tokens * self.stages):
            return ids
        index = torch.arange(len(self.step), device=ids.device)  # slots are left out: count from the first
        start = torch.where(self.restarts, index, 0).cummax(-1).values
        return ids.gather(1, start) + index - start

    def take(self, chosen: Int[Tensor, " chosen"]) -> SlotLayout:
        """The layout of some of the new slots, in ascending order."""
        keys = None
        if self.valid is not None or self.key_bias is not None:
            some = self.valid if self.key_bias is None else self.key_bias
            past = some.shape[1] - len(self.step)  # type: ignore[union-attr]
            keys = torch.cat((torch.arange(past, device=chosen.device), past + chosen))
        return dataclasses.replace(
            self,
            position_ids=self.position_ids[:, chosen],
            step=self.step[chosen],
            valid=None if self.valid is None else self.valid[:, keys],
            key_bias=None if self.key_bias is None else self.key_bias[:, keys],
        )

    def mask(self, config: FathomConfig, slots: Float[Tensor, "B S d"], cache: Cache | None, packed: bool) -> Any:
        """The mask in the form that the backend reads: None (the causal kernel) where the layout is plain causal in
        slot order; a dense tensor or a `KeyBias` where slots have a bias or another visibility."""
        if cache is not None and isinstance(cache.layers[0], FixedSlotLayer):
            return cache.layers[0].mask(slots.shape[1])
        sees = CAUSAL if self.visibility is None else self.visibility
        if self.key_bias is None and sees.is_causal:
            seen: Any = None if cache is None else SlotView(cache)
            return hf_versions.visible_mask(config, slots, self.valid, seen, self.slot_ids if packed else None)
        rows, queries, _ = slots.shape
        keys = queries + (0 if cache is None else cache.layers[0].slots)  # type: ignore[union-attr]
        wide = torch.promote_types(slots.dtype, torch.float32)
        bias = slots.new_zeros(rows, keys, dtype=wide) if self.key_bias is None else self.key_bias
        documents = None
        if packed and cache is None and self.valid is None:
            documents = self.restarts.cumsum(-1).expand(rows, -1)

        backend: str = config._attn_implementation  # type: ignore[assignment]
        flash = "flash" in backend
        hidden = bias if self.valid is None else torch.where(self.valid, bias, MASKED)
        large = slots.is_cuda and queries >= FLEX_FROM and backend != "eager" and not config.attention_dropout
        plain = sees.is_causal and documents is None
        # FlexAttention adds up the gradient of a bias by one atomic addition a score: slow, and in no fixed order.
        if plain and large and backend == "sdpa" and queries == keys:
            return RangeBias(hidden, causal_ranges(rows, queries, slots.device))
        if plain and (flash or (backend == CHANNEL and queries in (1, keys))):
            return ChannelBias(hidden)
        if flash:
            warnings.warn(
                f"{backend} has no kernel for slots with packed documents or a visibility of their own; FlexAttention "
                "serves these",
                stacklevel=2,
            )
        if flash or large or backend == "flex_attention":
            return FlexBias(hidden, block_mask(sees, queries, keys, slots.device), documents)
        index = torch.arange(keys, device=slots.device)
        visible = sees(index[keys - queries :, None], index)[None]
        if self.valid is not None:
            visible = visible & self.valid[:, None]
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])
        return dense_mask(bias, visible, slots.dtype)


class SlotLayer(DynamicLayer):
    """A growing cache layer with `stages` slots a token; lengths and crops are in tokens."""

    def __init__(self, stages: int):
        super().__init__()
        self.stages = stages

    @property
    def slots(self) -> int:
        return super().get_seq_length()

    def get_seq_length(self) -> int:
        return self.slots // self.stages

    def reset(self) -> None:
        """Drop all slots. Before 5.24 transformers zeroes them in place, and new ones would come after them."""
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older callers name the length to keep
            tokens_to_remove = min(tokens_to_remove - self.get_seq_length(), 0)
        super().crop(tokens_to_remove * self.stages)

    def at_fixed_place(self, slots: Any) -> FixedSlotLayer:
        """With the room of `slots` (`fathom.decoding.fixed`), for steps that are recorded."""
        return FixedSlotLayer(self, slots)


class FixedSlotLayer(SlotLayer):
    """Keys and values [B,G,room,D] at one address. The slots of a new token, which may come one by one, go to the
    places behind `place` [1], which all layers share with `visible` [B,1,1,room]."""

    def __init__(self, layer: SlotLayer, slots: Any):
        super().__init__(layer.stages)
        self.place, self.visible, self.device, self.is_initialized = slots.place, slots.visible, layer.device, True
        self.keys = with_room(layer.keys, slots.length, slots.room)
        self.values = with_room(layer.values, slots.length, slots.room)
        self.came = 0  # slots of the token under way

    def places(self, number: int) -> Int[Tensor, " number"]:
        """The indices of the next slots."""
        return self.place + torch.arange(self.came, self.came + number, device=self.device)

    def mask(self, number: int) -> Bool[Tensor, "B 1 number room"]:
        """What the next slots see: those before them, and themselves."""
        index = torch.arange(self.visible.shape[3], device=self.device)
        return self.visible & (index <= self.places(number)[:, None])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values, places = self.keys, self.values, self.places(key_states.shape[2])
        assert keys is not None and values is not None
        keys.index_copy_(2, places, key_states.to(keys.dtype))
        values.index_copy_(2, places, value_states.to(values.dtype))
        self.came = (self.came + len(places)) % self.stages
        return keys, values

    def growing(self, length: int) -> SlotLayer:
        """The first `length` slots as other calls know them."""
        layer = SlotLayer(self.stages)
        layer.device, layer.is_initialized = self.device, True
        assert self.keys is not None and self.values is not None
        layer.keys, layer.values = self.keys[:, :, :length].clone(), self.values[:, :, :length].clone()
        return layer


class RaggedSlotLayer(SlotLayer):
    """A growing cache layer of tokens with 1 … `stages` slots each.

    The rows of a batch share the steps; a slot that a row does not use is hidden by its bias. Layer 0 keeps the biases
    for all layers and heads, one a slot.

    Attributes:
        tokens: number of tokens that the slots belong to.
        steps: the stage of every slot within its token.
        bias: [B, slots], fp32 or wider; None in the other layers, and where no slot has a bias.
    """

    at_fixed_place = None  # type: ignore[assignment]  # how many slots come is known when they have come

    def __init__(self, stages: int):
        super().__init__(stages)
        self.tokens = 0
        self.steps: Tensor | None = None
        self.bias: Tensor | None = None

    def get_seq_length(self) -> int:
        return self.tokens

    def append(self, tokens: int, steps: Tensor) -> None:
        """Count new slots, whose keys and values `update` adds."""
        self.tokens += tokens
        self.steps = steps if self.steps is None else torch.cat((self.steps, steps))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older callers name the length to keep
            tokens_to_remove -= self.tokens
        if tokens_to_remove >= 0 or self.steps is None or not self.tokens:
            return
        self.tokens = max(self.tokens + tokens_to_remove, 0)
        keep = (self.steps == 0).nonzero()[self.tokens].item()
        self.steps = self.steps[:keep]
        self.keys, self.values = self.keys[..., :keep, :], self.values[..., :keep, :]  # type: ignore[index]
        if self.bias is not None:
            self.bias = self.bias[:, :keep]

    def reset(self) -> None:
        super().reset()
        self.tokens, self.steps, self.bias = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if self.bias is not None:
            self.bias = self.bias.index_select(0, beam_idx.to(self.bias.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.bias is not None:
            self.bias = self.bias.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.bias is not None:
            self.bias = self.bias[indices]


def hold_slots(cache: Cache, config: FathomConfig, stages: int, depth: str, kind: type[SlotLayer] = SlotLayer) -> None:
    """Replace the layers of an empty dynamic cache by layers of `kind`; refuse a cache that holds anything else.

    The change is made in the caller's own cache object, because generate() and other callers keep using it.
    """
    layers: list[Any] = cache.layers
    kinds: Any = (kind, FixedSlotLayer) if kind is SlotLayer else (kind,)
    if all(type(layer) in kinds and layer.stages == stages for layer in layers) and layers:
        return
    held = {layer.stages if isinstance(layer, SlotLayer) else 1 for layer in layers if layer.get_seq_length()}
    if held:
        same = "but with another method's layout" if max(held) == stages else f"but depth={depth!r} keeps {stages}"
        raise ValueError(
            f"{CACHE_NAME} holds {max(held)} slots a token, {same} with these options; pass an empty DynamicCache()"
        )
    others = {type(layer) for layer in layers} - {DynamicLayer, GrowingLayer, SlotLayer, RaggedSlotLayer}
    if others:
        raise ValueError(
            f"{CACHE_NAME} has layers of type {', '.join(sorted(kind.__name__ for kind in others))}, but "
            f"depth={depth!r} keeps {stages} slots a token, which only dynamic layers hold; pass a DynamicCache(), "
            "and no cache_implementation to generate()"
        )
    layers[:] = [kind(stages) for _ in range(config.num_hidden_layers)]


class SlotView:
    """A view of a cache: lengths are in slots, for mask builders, and new slots are not written, for Jacobi sweeps.

    It shows the cache as it was, because a checkpointed sweep runs again after the last pass has written the cache.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.is_sliding = cache.is_sliding
        layers: list[Any] = cache.layers
        self.held = [(layer.keys, layer.values) if layer.slots else None for layer in layers]

    def get_query_offset(self, layer: int = 0) -> int:
        return self.cache.layers[layer].slots  # type: ignore[union-attr]

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self.get_query_offset(layer) + query_length, 0

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        held: Any = self.held[layer]
        if held is None:
            return key, value
        keys, values = held
        return torch.cat((keys.to(key.device), key), dim=-2), torch.cat((values.to(key.device), value), dim=-2)


def restarts_are_documents(stack: Any) -> bool:
    """Whether position ids that restart mean packed documents, as in transformers.

    They do without a cache, and with an empty cache under flash attention, whose kernels always read them so. With an
    attention mask, even of ones, a row is one document.
    """
    given = stack.packed and stack.attention_mask is None
    return given and (stack.cache is None or "flash" in str(stack.decoder.config._attn_implementation))


@dataclasses.dataclass
class SlotStack(Stack):
    """The layer stack of a method with slots: it has the new tokens, and runs layouts of their slots.

    `position_ids` are of the new tokens; `attention_mask` covers cached and new tokens, [B, tokens] or None.
    """

    stages: int = 1  # slots a token in the cache
    packed: bool = False  # the caller gave position ids: where they restart, a document starts
    layer: type[SlotLayer] = SlotLayer  # of the cache
    documents: Int[Tensor, "B T"] | None = None  # the document of every token, where one token after the other runs

    def with_cache(self, rows: int) -> SlotStack:
        """This stack with a cache: an empty one if the caller gave none, for methods that run slot by slot."""
        cache, documents = self.cache, None
        if cache is not None and (self.position_ids.shape[1] == 1 or cache.get_seq_length()):
            return self
        if restarts_are_documents(self):
            positions = self.position_ids.expand(rows, -1)
            documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        if cache is None:
            cache = Cache(layers=[self.layer(self.stages) for _ in self.decoder.layers])
        return dataclasses.replace(self, cache=cache, documents=documents)

    def cached_steps(self) -> Int[Tensor, " slots"]:
        """The stage of every cached slot within its token."""
        device = self.position_ids.device
        held: Any = None if self.cache is None else self.cache.layers[0]
        if isinstance(held, RaggedSlotLayer) and held.steps is not None:
            return held.steps
        return torch.arange(0 if held is None else held.slots, device=device) % self.stages

    def layout(
        self, stages: int, token: int | None = None, step: int = 0, key_bias: Float[Tensor, "B S"] | None = None
    ) -> SlotLayout:
        """The layout of the first `stages` slots of all new tokens; or, with `token`, of that token's one slot `step`.

        key_bias: of these slots; cached slots keep their own.
        """
        positions, device, tokens = self.position_ids, self.position_ids.device, int(step == 0)
        if token is None:
            tokens = positions.shape[1]
            steps = torch.arange(stages, device=device).repeat(positions.shape[1])
            positions = positions.repeat_interleave(stages, dim=1)
        else:
            steps, positions = torch.full((1,), step, device=device), positions[:, token : token + 1]
        valid, real = None, self.attention_mask
        if self.documents is not None and token is not None:
            real = self.documents == self.documents[:, token : token + 1]
        if real is not None:
            of_token = (torch.cat((self.cached_steps(), steps)) == 0).cumsum(0) - 1
            valid = real[:, of_token].bool()
        held: Any = None if self.cache is None else self.cache.layers[0]
        if getattr(held, "bias", None) is not None:
            new = held.bias.new_zeros(len(held.bias), len(steps)) if key_bias is None else key_bias
            key_bias = torch.cat((held.bias, new), dim=1)
        return SlotLayout(positions, steps, stages, valid, key_bias, tokens=tokens)

    def bind(self, slots: Float[Tensor, "B S d"], layout: SlotLayout, keep: bool = True) -> Stack:
        """The stack for slots of this layout and shape, after the cached ones; `keep` adds them to the cache."""
        cache = self.cache
        mask = layout.mask(self.decoder.config, slots, cache, self.packed)
        slot_ids = torch.arange(slots.shape[1], device=slots.device)[None]
        if restarts_are_documents(self):
            slot_ids = layout.slot_ids
        if keep and cache is not None and isinstance(cache.layers[0], RaggedSlotLayer):
            for held in cache.layers:
                held.append(layout.tokens, layout.step)  # type: ignore[union-attr]
            cache.layers[0].bias = layout.key_bias
        return Stack(
            self.decoder,
            layout.position_ids,
            self.decoder.positions.tables(slots, layout.position_ids),
            mask,
            cache if keep or cache is None else SlotView(cache),  # type: ignore[arg-type]
            self.layer_kwargs,
            self.hidden_states,
            self.attentions,
            slot_ids=slot_ids,
            auxiliary=self.auxiliary,
            tokens=self.facts_of(layout, slots.shape[1]),
        )

    def facts_of(self, layout: SlotLayout, slots: int) -> TokenFacts | None:
        """Facts about the new slots for feed-forward networks: those of their tokens."""
        if self.tokens is None:
            return None
        real = None if layout.valid is None else layout.valid[:, -slots:]
        domains = self.tokens.domains
        return TokenFacts(real, None if domains is None else domains[:, :1].expand(-1, slots))

    def largest_change(
        self, before: list[Tensor], after: list[Tensor], run: Bool[Tensor, "B T states"] | None = None
    ) -> Float[Tensor, ""]:
        """max ‖after − before‖ / ‖after‖ over the states of real tokens, each [B, T, d]; over those in `run` if given.

        0 where both are zero. The values of other states do not matter.
        """
        old, new = torch.stack(before), torch.stack(after)
        change = (new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(torch.finfo(new.dtype).tiny)
        if self.attention_mask is not None:
            change = change.where(self.attention_mask[:, -change.shape[-1] :].bool(), 0.0)
        if run is not None:
            change = change.where(run.movedim(-1, 0), 0.0)
        return change.max()
