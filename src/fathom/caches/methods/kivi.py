"""KIVI-style quantisation (arXiv 2402.02750): keys per channel, values per token, the newest tokens in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fathom.caches.base import Appending, CacheMethod, CacheShape, LayerContext, concat
from fathom.caches.budgets import NotReachable, fullest
from fathom.decoding.fixed import Slots
from fathom.ops.bitpack import packed_bytes
from fathom.ops.cached_attention import causal_attention
from fathom.ops.group_quantize import Quantized, quantize
from fathom.ops.quantized_attention import quantized_attention, rebuilt_blocks, ring_quantized_attention

CODES = ("key_codes", "key_scale", "key_minimum", "value_codes", "value_scale", "value_minimum")


@dataclasses.dataclass(frozen=True)
class KIVI(CacheMethod):
    """Asymmetric min/max codes of `bits` bits in groups of `group` numbers. Keys are rotated, at their true positions.

    Keys are quantised per channel along tokens, the oldest r·⌊n/r⌋ of n tokens with r = `residual`. Values are
    quantised per token along channels, all but the newest r. Attention rebuilds 4096 tokens at a time; on a GPU with
    Triton that is one launch for keys and one for values, and for a single query one kernel reads the codes without
    rebuilding. A quantised number takes b/8 + 2w/group bytes (w bytes a full number; scale and minimum have the model's
    dtype): bytes per layer = B·G·D·Σ_{K,V} [n_q (b/8 + 2w/group) + w(n − n_q)] with n_q of n tokens quantised.

    bits: width of a code, 2, 4 or 8.
    group: numbers that share a scale and a minimum; divides `residual` and the head dim.
    residual: newest tokens that stay in full precision.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128

    name = "kivi"
    paper = "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750"
    summary = "Keep every token in 2 or 4 bits: keys per channel, values per token."
    equation = "code = round((x − min) / (max − min)·(2^b − 1)), groups of keys along tokens, of values along channels"
    role = "baseline"
    variants = ({"group": 8, "residual": 16},)
    identity = {"group": 8, "residual": 256}  # noqa: RUF012

    def __post_init__(self) -> None:
        self.check_at_least("group", 1)
        self.check_at_least("residual", 1)
        self.check_at_least("bits", 2)
        if self.bits not in (2, 4, 8):
            raise self.refuse("bits", self.bits, "use 2, 4 or 8")
        if self.residual % self.group:
            raise self.refuse("residual", self.residual, f"use a multiple of group = {self.group}")

    @property
    def plain(self) -> bool:
        return True

    def prepare(self, model: PreTrainedModel, shape: CacheShape) -> None:
        if shape.value_dim % self.group:
            raise self.refuse(
                "group", self.group, f"must divide the head dim {shape.value_dim}; {shape.value_dim} itself does"
            )

    def new_state(self, context: LayerContext) -> KIVIState:
        return KIVIState(self)

    def quantized(self, tokens: int) -> tuple[int, int]:
        """(keys, values) that are quantised when `tokens` are held."""
        return tokens // self.residual * self.residual, max(tokens - self.residual, 0)

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        tokens = prompt + generated
        group_bytes = packed_bytes(self.group, self.bits) + 2 * shape.element_bytes
        total = 0
        for count, width in zip(self.quantized(tokens), (shape.key_dim, shape.value_dim)):
            total += count * width // self.group * group_bytes + (tokens - count) * width * shape.element_bytes
        return total * shape.batch * shape.kv_heads

    def most_bytes(self, shape: CacheShape, tokens: int, chunk: int | None = None) -> int:
        waiting = max(1, tokens // self.residual * self.residual - 1)  # keys that wait for their batch are in full
        return max(self.cache_bytes(shape, tokens), self.cache_bytes(shape, waiting))

    @classmethod
    def at_fraction(
        cls, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **options: Any
    ) -> CacheMethod | NotReachable:
        candidates = [cls(bits=bits, residual=r, **options) for bits in (8, 4, 2) for r in (128, 64, 32)]
        return fullest(candidates, fraction, shape, tokens, chunk)


class KIVIState(Appending):
    """Codes of keys in groups [B,G,n_k/group,D,·] and of values [B,G,n_v,D/group,·]; the newest tokens in full.

    While steps are recorded the stores of codes have room, full keys lie in a ring of r = `residual` slots and full
    values in one of r + 1. Every step codes the value that is r tokens old; keys are coded between two steps, when all
    of the ring are of one block.
    """

    def __init__(self, method: KIVI):
        super().__init__()
        self.method = method
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.key_codes: Tensor | None = None
        self.key_scale: Tensor | None = None
        self.key_minimum: Tensor | None = None
        self.value_codes: Tensor | None = None
        self.value_scale: Tensor | None = None
        self.value_minimum: Tensor | None = None
        self.blocks_end = 0  # tokens at which the next keys are coded, while steps are recorded

    @property
    def stored(self) -> int:
        return self.seen

    @property
    def drops_weights(self) -> bool:  # type: ignore[override]
        return self.key_codes is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        method, keys, values = self.method, concat(self.key, key), concat(self.value, value)
        if self.key_codes is None:
            output = causal_attention(query, keys, values, scaling, dropout)
        else:
            output = quantized_attention(
                query, self.coded_keys(), self.coded_values(), keys, values, method.bits, method.group, scaling
            )
        self.store(keys, values, key.shape[2])
        return output

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = concat(self.key, key), concat(self.value, value)
        blocks = [] if self.key_codes is None else list(self.blocks())
        newest = values[:, :, values.shape[2] - keys.shape[2] :]
        dense = torch.cat([k for k, _ in blocks] + [keys], dim=2), torch.cat([v for _, v in blocks] + [newest], dim=2)
        self.store(keys, values, key.shape[2])
        return dense

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of the tokens whose keys are quantised, rebuilt a few tokens at a time."""
        assert self.value is not None
        method = self.method
        return rebuilt_blocks(self.coded_keys(), self.coded_values(), self.value, method.bits, method.group)

    def coded_keys(self) -> Quantized:
        assert self.key_codes is not None and self.key_scale is not None and self.key_minimum is not None
        return self.key_codes, self.key_scale, self.key_minimum

    def coded_values(self) -> Quantized | None:
        """The codes of values; None as long as no value is quantised."""
        if self.value_codes is None or self.value_scale is None or self.value_minimum is None:
            return None
        return self.value_codes, self.value_scale, self.value_minimum

    def store(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Quantise the tokens that are old enough, and keep the others in full precision."""
        method, held = self.method, self.seen
        self.seen += length
        due_keys = method.quantized(self.seen)[0] - method.quantized(held)[0]
        due_values = method.quantized(self.seen)[1] - method.quantized(held)[1]
        if due_keys:
            groups = keys[:, :, :due_keys].unflatten(2, (-1, method.group)).transpose(3, 4)
            for name, tensor in zip(("key_codes", "key_scale", "key_minimum"), quantize(groups, method.bits)):
                setattr(self, name, concat(getattr(self, name), tensor))
        if due_values:
            groups = values[:, :, :due_values].unflatten(3, (-1, method.group))
            for name, tensor in zip(("value_codes", "value_scale", "value_minimum"), quantize(groups, method.bits)):
                setattr(self, name, concat(getattr(self, name), tensor))
        self.key = keys[:, :, due_keys:].clone() if due_keys else keys
        self.value = values[:, :, due_values:].clone() if due_values else values

    @property
    def due(self) -> int | None:
        return self.blocks_end

    def fix(self, slots: Slots) -> None:
        residual, group, length = self.method.residual, self.method.group, slots.length
        self.blocks_end = length // residual * residual + residual
        room = -(-slots.room // residual) * residual
        assert self.key is not None and self.value is not None
        one_key = self.key.new_zeros(*self.key.shape[:2], 1, self.key.shape[3], group)
        one_value = self.value.new_zeros(*self.value.shape[:2], 1, self.value.shape[3] // group, group)
        empty = *quantize(one_key, self.method.bits), *quantize(one_value, self.method.bits)
        for name, like, count in zip(CODES, empty, 3 * (room // group,) + 3 * (room,), strict=True):
            held = getattr(self, name)
            store = like.new_zeros(*like.shape[:2], count, *like.shape[3:])
            if held is not None:
                store[:, :, : held.shape[2]] = held
            setattr(self, name, store)
        if self.fixed is None:
            for name, ring, newest in (("key", residual, self.key), ("value", residual + 1, self.value)):
                tokens = torch.arange(length - newest.shape[2], length, device=newest.device)
                held = newest.new_zeros(*newest.shape[:2], ring, newest.shape[3])
                setattr(self, name, held.index_copy_(2, tokens % ring, newest))
        self.fixed = slots

    def release(self, length: int) -> None:
        if length == self.due:
            self.make_room()
        method = self.method
        coded_keys, coded_values = method.quantized(length)
        for name, count in zip(CODES, 3 * (coded_keys // method.group,) + 3 * (coded_values,), strict=True):
            setattr(self, name, getattr(self, name)[:, :, :count].clone() if count else None)
        for name, ring, first in (("key", method.residual, coded_keys), ("value", method.residual + 1, coded_values)):
            held = getattr(self, name)
            setattr(self, name, held[:, :, torch.arange(first, length, device=held.device) % ring])
        self.fixed = None

    def make_room(self) -> int:
        """Code the keys of the ring, a block."""
        assert self.key is not None
        method, stop = self.method, self.blocks_end // self.method.group
        groups = self.key.unflatten(2, (-1, method.group)).transpose(3, 4)
        for store, tensor in zip(self.coded_keys(), quantize(groups, method.bits), strict=True):
            store[:, :, stop - method.residual // method.group : stop] = tensor
        self.blocks_end += method.residual
        return self.seen

    def shared(self, slots: Slots) -> tuple[Tensor, ...]:
        """Where the new key, the new value and the value that is r tokens old lie, and the number of that token."""
        residual = self.method.residual
        oldest = (slots.place - residual).clamp(min=0)  # before there is one, what will be written over
        return slots.place % residual, slots.place % (residual + 1), oldest % (residual + 1), oldest

    def attend_fixed(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert self.key is not None and self.value is not None and self.fixed is not None
        method, values, place = self.method, self.coded_values(), self.fixed.place
        key_slot, value_slot, oldest_slot, oldest = self.fixed.shared
        assert values is not None
        self.key.index_copy_(2, key_slot, key)
        self.value.index_copy_(2, value_slot, value)
        output = ring_quantized_attention(
            query, self.coded_keys(), values, self.key, self.value, place, method.bits, method.group, scaling
        )
        groups = self.value.index_select(2, oldest_slot).unflatten(3, (-1, method.group))
        for store, tensor in zip(values, quantize(groups, method.bits), strict=True):
            store.index_copy_(2, oldest, tensor)
        self.seen += 1
        return output
