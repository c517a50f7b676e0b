"""Slot layouts: methods that give one token several slots in the sequence (pauses, latent thoughts).

A token with n stages owns n consecutive slots, slot n·t + i holding stage i of token t. Slots of a token share its
position; the causal mask follows slot order; a padded token's slots are masked. `SlotStack` is the layer stack for
such methods, `SlotLayer` the cache layer that holds n slots a token and counts tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Stack


def interleave(stages: list[Float[Tensor, "B T d"]]) -> Float[Tensor, "B S d"]:
    """[z_0 of token 0, z_1 of token 0, …, z_0 of token 1, …]; S = n·T. `y[:, i::n]` takes stage i out again."""
    return stages[0] if len(stages) == 1 else torch.stack(stages, dim=2).flatten(1, 2)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """What attention must know of the new slots.

    Attributes:
        position_ids: the token position of every new slot, for rotary or learned positions.
        step: the stage of every new slot within its token.
        stages: slots a token.
        valid: which keys, cached slots first, belong to real tokens; None: all.
    """

    position_ids: Int[Tensor, "B S"]
    step: Int[Tensor, " S"]
    stages: int
    valid: Bool[Tensor, "B keys"] | None = None

    @property
    def slot_ids(self) -> Int[Tensor, "B S"]:
        """position·n + step: rises by one from slot to slot within a document and restarts with it.

        transformers' mask builder and its flash-attention path read ids that do not rise by one as packed documents, so
        the repeated `position_ids` would cut every token off from its past; these are what they may be told.
        """
        return self.position_ids * self.stages + self.step

    def mask(self, config: FathomConfig, slots: Float[Tensor, "B S d"], cache: Cache | None, packed: bool) -> Any:
        """The installed backend's mask; None (the causal kernel) where the layout is plain causal in slot order."""
        seen: Any = None if cache is None else SlotView(cache)
        return hf_versions.causal_mask(config, slots, self.valid, seen, self.slot_ids if packed else None)


class SlotLayer(DynamicLayer):
    """A growing cache layer with `stages` slots a token: lengths and crops are in tokens."""

    def __init__(self, stages: int):
        super().__init__()
        self.stages = stages

    @property
    def slots(self) -> int:
        return super().get_seq_length()

    def get_seq_length(self) -> int:
        return self.slots // self.stages

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older callers name the length to keep
            tokens_to_remove = min(tokens_to_remove - self.get_seq_length(), 0)
        super().crop(tokens_to_remove * self.stages)


def hold_slots(cache: Cache, config: FathomConfig, stages: int, depth: str) -> None:
    """Make the layers of an empty dynamic cache `SlotLayer`s; refuse a cache that holds anything else.

    The caller's own cache object is filled, as generate() and every other caller go on using it.
    """
    layers: list[Any] = cache.layers
    if all(type(layer) is SlotLayer and layer.stages == stages for layer in layers) and layers:
        return
    held = {layer.stages if isinstance(layer, SlotLayer) else 1 for layer in layers if layer.get_seq_length()}
    if held:
        raise ValueError(
            f"{hf_versions.CACHE_NAME} holds {max(held)} slots a token, but depth={depth!r} keeps {stages} with these "
            "options; pass an empty DynamicCache()"
        )
    kinds = {type(layer) for layer in layers} - {DynamicLayer, SlotLayer}
    if kinds:
        raise ValueError(
            f"{hf_versions.CACHE_NAME} has layers of type {', '.join(sorted(kind.__name__ for kind in kinds))}, but "
            f"depth={depth!r} keeps {stages} slots a token, which only dynamic layers hold; pass a DynamicCache()"
        )
    layers[:] = [SlotLayer(stages) for _ in range(config.num_hidden_layers)]


class SlotView:
    """A cache counted in slots, for mask builders; and read without writing, for sweeps that a later one replaces."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.is_sliding = cache.is_sliding

    def get_query_offset(self, layer: int = 0) -> int:
        return self.cache.layers[layer].slots  # type: ignore[union-attr]

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self.get_query_offset(layer) + query_length, 0

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        held: Any = self.cache.layers[layer]
        if not held.slots:
            return key, value
        return (
            torch.cat((held.keys.to(key.device), key), dim=-2),
            torch.cat((held.values.to(key.device), value), dim=-2),
        )


@dataclasses.dataclass
class SlotStack(Stack):
    """The stack of a method with slots: bound to the new tokens, it runs layouts of their slots.

    `position_ids` are the new tokens'; `attention_mask` is theirs and the cached tokens', [B, tokens] or None.
    """

    stages: int = 1  # slots a token in the cache
    packed: bool = False  # the caller gave position ids: where they restart, a document starts

    def layout(self, stages: int, token: int | None = None, step: int = 0) -> SlotLayout:
        """All new tokens with their first `stages` slots; or, with `token`, the one slot `step` of that new token."""
        positions, mask, device = self.position_ids, self.attention_mask, self.position_ids.device
        if token is None:
            steps = torch.arange(stages, device=device).repeat(positions.shape[1])
            positions = positions.repeat_interleave(stages, dim=1)
        else:
            steps, positions = torch.full((1,), step, device=device), positions[:, token : token + 1]
        valid = None
        if mask is not None:
            past = mask.shape[1] - self.position_ids.shape[1]
            new = mask[:, past:] if token is None else mask[:, past : past + token + 1]
            new = new.repeat_interleave(stages, dim=1)
            if token is not None:
                new = new[:, : token * stages + step + 1]
            valid = torch.cat((mask[:, :past].repeat_interleave(self.stages, dim=1), new), dim=1).bool()
        return SlotLayout(positions, steps, stages, valid)

    def bind(self, slots: Float[Tensor, "B S d"], layout: SlotLayout, cache: Cache | None, keep: bool = True) -> Stack:
        """The stack over slots of this layout and shape, after those in `cache`, which keeps them if `keep` says so."""
        rotary = self.decoder.rotary_emb
        return Stack(
            self.decoder,
            layout.position_ids,
            rotary(slots, layout.position_ids) if rotary else None,
            layout.mask(self.decoder.config, slots, cache, self.packed),
            cache if keep or cache is None else SlotView(cache),  # type: ignore[arg-type]
            self.layer_kwargs,
            self.hidden_states,
            self.attentions,
            slot_ids=layout.slot_ids,
        )

    def empty_cache(self) -> Cache:
        """For methods that run slot by slot where the caller wants no cache."""
        return Cache(layers=[SlotLayer(self.stages) for _ in self.decoder.layers])

    def largest_change(self, before: list[Tensor], after: list[Tensor]) -> float:
        """max ‖after − before‖ / ‖after‖ over the real tokens' states, each [B, T, d]."""
        old, new = torch.stack(before), torch.stack(after)
        change = (new - old).norm(dim=-1) / new.norm(dim=-1)
        if self.attention_mask is not None:
            change = change * self.attention_mask[:, -change.shape[-1] :]
        return change.max().item()
