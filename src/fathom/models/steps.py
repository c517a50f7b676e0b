"""Step by step over all tokens: methods in which a token runs through the layers as often as it needs.

Step k runs some of the new tokens, gathered; a token's turn in a step is a slot (t, k) with keys and values of its own,
at the token's position. What a slot sees is decided by tokens alone, with one of two rules for earlier steps:

    append     slot (t, k) sees (t', k')  iff  t' ≤ t and k' ≤ k                        (2-D causal)
    replace    slot (t, k) sees (t', k')  iff  t' ≤ t and k' is the last step ≤ k that t' ran   (frozen keys)

`StepStack` is the layer stack for such methods, `StepLayer` the cache layer. Only slots that ran are computed and kept.
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
from fathom.models.slots import FLEX_FROM
from fathom.ops.biased_attention import KeyBias
from fathom.ops.token_blocks import sees, token_block_mask

NOWHERE = 2**30  # the token number of a slot that no live slot may see
FOREVER = 2**30  # the last step at which a slot of such a segment is visible
BUCKET = 64  # above it, numbers of gathered tokens are multiples of it, so that compiled kernels meet few shapes
PACK_EVERY = 64  # columns after which a cache of several rows closes the gaps that stopped rows left

KeyValue = tuple[Float[Tensor, "B G n D"], Float[Tensor, "B G n D"]]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the T new tokens of every row, in their order.

    Attributes:
        index: of the tokens; rows with fewer than the longest name others at the end. None: all T, in place.
        live: which entries are chosen ones. None: all.
    """

    index: Int[Tensor, "B n"] | None = None
    live: Bool[Tensor, "B n"] | None = None

    @torch.compiler.disable  # every shape would be compiled by itself; `_take` and `_put` are traced where they pay
    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The chosen entries of `x` along its token dimension."""
        return _take(x, self.index, dim)

    @torch.compiler.disable
    def put(self, x: Tensor, new: Tensor, dim: int = 1) -> Tensor:
        """`x` with the chosen entries replaced by `new`."""
        return _put(x, new, self.index, self.live, dim)


def _take(x: Tensor, index: Tensor | None, dim: int) -> Tensor:
    if index is None:
        return x
    shape = [*x.shape]
    shape[dim] = index.shape[1]
    return x.gather(dim, _along(index, x, dim).expand(shape))


def _put(x: Tensor, new: Tensor, index: Tensor | None, live: Tensor | None, dim: int) -> Tensor:
    if live is not None:
        new = torch.where(_along(live, x, dim), new, _take(x, index, dim))
    return new if index is None else x.scatter(dim, _along(index, x, dim).expand_as(new), new)


def _along(index: Tensor, x: Tensor, dim: int) -> Tensor:
    """[B, n] shaped to broadcast against `x` whose token dimension is `dim`."""
    return index.view(index.shape[0], *(1,) * (dim - 1), index.shape[1], *(1,) * (x.ndim - dim - 1))


@torch.compiler.disable
def choose(*masks: Bool[Tensor, "B T"]) -> list[Chosen | None]:
    """The tokens of each mask, None for a mask without any; waits for the device once.

    On the meta device, which has no values, every mask chooses all.
    """
    if masks[0].is_meta:
        return [Chosen() for _ in masks]
    length = masks[0].shape[1]
    counts = torch.stack([mask.sum(1) for mask in masks])
    fewest, most = torch.stack((counts.amin(1), counts.amax(1))).tolist()
    chosen: list[Chosen | None] = []
    for mask, low, high in zip(masks, fewest, most, strict=True):
        size = min(length, high if high <= BUCKET else -(-high // BUCKET) * BUCKET)
        if size in (0, length):
            chosen.append(None if size == 0 else Chosen(None, None if low == length else mask))
            continue
        index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :size]
        chosen.append(Chosen(index, None if low == size else mask.gather(1, index)))
    return chosen


def appended_segments(steps: int) -> tuple[tuple[int, int], ...]:
    """Of the rule `append`: a slot stays visible from its step on."""
    return tuple((step, FOREVER) for step in range(steps))


def replaced_segments(steps: int) -> tuple[tuple[int, int], ...]:
    """Of the rule `replace`: a token's last slot stays visible, every other one at its own step only."""
    return appended_segments(steps) + tuple((step, step) for step in range(steps - 1))


@dataclasses.dataclass(frozen=True)
class Packing:
    """A tidier order of a cache's columns, the same in all layers: where they come from, and what they then are."""

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
        gaps: whether there may be such columns.
        tokens: how many the slots belong to.
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
        """The columns that a slot of this step may see."""
        slices: list[slice] = []
        stop = 0
        for (first, last), size in zip(self.segments, self.sizes, strict=True):
            start, stop = stop, stop + size
            if first <= step <= last and size:
                if slices and slices[-1].stop == start:
                    start = slices.pop().start
                slices.append(slice(start, stop))
        return slices

    def append(
        self, tokens: int, pieces: dict[int, tuple[KeyValue, Tensor]], gaps: bool, numbers: Tensor | None
    ) -> Tensor:
        """Add slots, by segment: keys and values, and their tokens' numbers. `numbers`: what a layer with the same
        slots has returned, so that all share one tensor."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        stop = 0
        for segment, size in enumerate(self.sizes):
            start, stop = stop, stop + size
            if size:
                part = slice(start, stop)
                parts.append((self.keys[:, :, part], self.values[:, :, part], self.token[:, part]))  # type: ignore[index]
            if segment in pieces:
                (key, value), token = pieces[segment]
                parts.append((key, value, token))
                self.sizes[segment] += token.shape[1]
                self.unpacked += token.shape[1] * gaps
        if not self.is_initialized:
            self.lazy_initialization(parts[0][0], parts[0][1])
        keys, values, tokens_of = zip(*parts, strict=True)
        self.keys, self.values = torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
        self.token = joined = torch.cat(tokens_of, dim=1) if numbers is None else numbers
        self.tokens += tokens
        self.gaps |= gaps
        return joined

    def packing(self) -> Packing:
        """Every row's used columns at the front of their segment, without the columns that no row uses."""
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
        self.keys, self.values = _columns(self.keys, to.index), _columns(self.values, to.index)  # type: ignore[arg-type]
        self.token, self.sizes, self.gaps, self.unpacked = to.token, [*to.sizes], to.gaps, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:  # older callers name the length to keep
            tokens_to_remove -= self.tokens
        if tokens_to_remove >= 0 or not self.is_initialized:
            return
        self.tokens = max(self.tokens + tokens_to_remove, 0)
        stay = self.token < self.tokens
        columns = stay.any(0)
        self.sizes = [int(part.sum()) for part in columns.split(self.sizes)]
        self.keys, self.values = self.keys[..., columns, :], self.values[..., columns, :]  # type: ignore[index]
        self.token = torch.where(stay, self.token, NOWHERE)[:, columns]

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
    """Make the layers of an empty dynamic cache `StepLayer`s; refuse a cache that holds anything else."""
    layers: list[Any] = cache.layers
    if layers and all(type(layer) is StepLayer and layer.segments == segments for layer in layers):
        return
    if any(layer.get_seq_length() for layer in layers):
        raise ValueError(
            f"{hf_versions.CACHE_NAME} holds another method's slots, or those of other options, not those of "
            f"depth={depth!r} with these; pass an empty DynamicCache()"
        )
    kinds = {type(layer).__name__ for layer in layers if not isinstance(layer, DynamicLayer)}
    if kinds:
        raise ValueError(
            f"{hf_versions.CACHE_NAME} has layers of type {', '.join(sorted(kinds))}, but depth={depth!r} keeps as "
            "many slots as a token runs, which only dynamic layers hold; pass a DynamicCache(), "
            "and no cache_implementation to generate()"
        )
    layers[:] = [StepLayer(segments) for _ in range(config.num_hidden_layers)]


def append(key: Tensor, value: Tensor, earlier: KeyValue | None) -> tuple[Tensor, Tensor, KeyValue]:
    """Attention reads all earlier slots, then these; all of them are left."""
    if earlier is not None:
        key, value = torch.cat((earlier[0], key), dim=2), torch.cat((earlier[1], value), dim=2)
    return key, value, (key, value)


def replace(
    key: Tensor, value: Tensor, earlier: tuple[KeyValue | None, KeyValue | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, KeyValue]:
    """Attention reads one slot a token: K ← where(ran, K_new, K), V likewise; these are left."""
    past, last, index, live = earlier
    if last is not None:
        key, value = _put(last[0], key, index, live, 2), _put(last[1], value, index, live, 2)
    return *append(key, value, past)[:2], (key, value)


def _columns(x: Float[Tensor, "B G n D"], index: Int[Tensor, "B m"]) -> Float[Tensor, "B G m D"]:
    """Some slots of keys or values; as 64-bit numbers where they fit, as a gather costs by the number."""
    fits = x.shape[-1] * x.element_size() % 8 == 0 and not (x.requires_grad and torch.is_grad_enabled())
    return _take(x.contiguous().view(torch.int64), index, 2).view(x.dtype) if fits else _take(x, index, 2)


def _joined(slots: list[KeyValue]) -> KeyValue | None:
    """Some slots after the others."""
    if len(slots) < 2:
        return slots[0] if slots else None
    keys, values = zip(*slots, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


@dataclasses.dataclass
class StepStack(Stack):
    """The stack of a method that runs step by step: bound to the new tokens, it runs some of them at a time.

    `position_ids` are the new tokens'; `attention_mask` is theirs and the cached tokens', [B, tokens] or None.
    """

    packed: bool = False  # the caller gave position ids: where they restart, a document starts
    ran: list[Chosen] = dataclasses.field(default_factory=list)  # by step
    slots: list[list[KeyValue]] = dataclasses.field(default_factory=list)  # by step and layer: what `read` left;
    sizes: list[int] = dataclasses.field(default_factory=list)  # of these the last are the step's own: how many

    def __post_init__(self) -> None:
        held: Any = None if self.cache is None else self.cache.layers[0]
        self.past: Any = held if held is not None and held.tokens else None
        self.seen = held.tokens if held is not None else 0
        mask = self.attention_mask
        if mask is not None and not mask.is_meta and bool(mask.all()):
            mask = self.attention_mask = None
        rows, length = self.position_ids.shape
        numbers = torch.arange(self.seen, self.seen + length, device=self.position_ids.device).expand(rows, length)
        self.real = torch.ones_like(numbers, dtype=torch.bool) if mask is None else mask[:, self.seen :].bool()
        self.numbers: Int[Tensor, "B T"] = torch.where(self.real, numbers, NOWHERE)

    # Compiled, the layers are a graph; all that is around them is not. They get the earlier slots joined, so that one
    # graph with dynamic sizes serves all steps.
    @torch.compiler.disable(recursive=False)
    def append(self, inputs: Float[Tensor, "B n d"], chosen: Chosen) -> Float[Tensor, "B n d"]:
        """F of the next step of the chosen tokens; they see all earlier slots and each other's."""
        step = len(self.ran)
        self.ran.append(chosen)
        keys = [self.numbers_of(ran) for ran in self.ran]
        earlier: list[Any] = self.slots[-1] if self.slots else [None] * len(self.decoder.layers)
        if self.past is not None:
            earlier = [
                _joined([*self.past_slots(layer, step), *(self.own(k, layer) for k in range(step))])
                for layer in range(len(self.decoder.layers))
            ]
        return self.run(inputs, chosen, keys, append, earlier)

    @torch.compiler.disable(recursive=False)
    def replace(self, inputs: Float[Tensor, "B n d"], chosen: Chosen) -> Float[Tensor, "B n d"]:
        """F of the next step of the chosen tokens, whose new slots take the place of their earlier ones.

        Without `index`, tokens that are not live run too, but keep their earlier slot.
        """
        step = len(self.ran)
        self.ran.append(chosen)
        index, live = chosen.index, chosen.live
        if index is not None and live is None:  # both or none: one compiled graph less
            live = torch.ones_like(index, dtype=torch.bool)
        earlier = [
            (_joined(self.past_slots(layer, step)), self.slots[-1][layer] if self.slots else None, index, live)
            for layer in range(len(self.decoder.layers))
        ]
        return self.run(inputs, chosen, [self.numbers], replace, earlier)

    @torch.compiler.disable(recursive=False)
    def run(
        self, inputs: Float[Tensor, "B n d"], chosen: Chosen, keys: list[Tensor], read: Any, earlier: list[Any]
    ) -> Float[Tensor, "B n d"]:
        """One forward of the layers over the chosen tokens; `keys`: the token numbers of the new keys it reads."""
        positions = chosen.take(self.position_ids)
        rotary = self.decoder.rotary_emb
        plain = chosen.index is None and len(keys) == 1 and self.past is None
        stack = Stack(
            self.decoder,
            positions,
            rotary(inputs, positions) if rotary else None,
            self.plain_mask(inputs) if plain else self.mask(inputs, chosen, keys),
            None,
            self.layer_kwargs,
            self.hidden_states,
            self.attentions,
            # read as positions by backends that take repeated or jumping ones for packed documents
            slot_ids=None if plain else torch.arange(inputs.shape[1], device=inputs.device)[None],
            read=read,
            earlier=earlier,
        )
        hidden_states = stack(inputs)
        self.slots.append(stack.kept)
        self.sizes.append(inputs.shape[1] if read is append else self.numbers.shape[1])
        return hidden_states

    @torch.compiler.disable
    def numbers_of(self, chosen: Chosen) -> Int[Tensor, "B n"]:
        """Token numbers of the chosen; `NOWHERE` where not live."""
        numbers = chosen.take(self.numbers)
        return numbers if chosen.live is None else torch.where(chosen.live, numbers, NOWHERE)

    @torch.compiler.disable
    def past_slots(self, layer: int, step: int) -> list[KeyValue]:
        """What the cache holds for this step."""
        if self.past is None:
            return []
        held: Any = self.cache.layers[layer]  # type: ignore[union-attr]
        return [(held.keys[:, :, part], held.values[:, :, part]) for part in held.visible(step)]

    def own(self, step: int, layer: int) -> KeyValue:
        """The slots of one step: the last of what it left."""
        (key, value), size = self.slots[step][layer], self.sizes[step]
        return key[:, :, key.shape[2] - size :], value[:, :, value.shape[2] - size :]

    @torch.compiler.disable
    def plain_mask(self, inputs: Tensor) -> Any:
        """All tokens read one slot of each: the ordinary causal mask."""
        config, given = self.decoder.config, self.position_ids if self.packed else None
        return hf_versions.causal_mask(config, inputs, self.attention_mask, None, given)

    @torch.compiler.disable
    def mask(self, inputs: Tensor, chosen: Chosen, keys: list[Tensor]) -> Any:
        """The mask in the form that the backend reads."""
        gaps = self.attention_mask is not None or any(ran.live is not None for ran in self.ran)
        past = []
        if self.past is not None:
            past = [self.past.token[:, part] for part in self.past.visible(len(self.ran) - 1)]
            gaps |= self.past.gaps
            if self.attention_mask is not None:  # it may hide a token that an earlier call did not
                past = [
                    torch.where(self.attention_mask.gather(1, p.clamp(max=self.seen)) > 0, p, NOWHERE) for p in past
                ]
        if self.numbers.shape[1] == 1 and not gaps:  # one new token sees everything
            return None
        key, query = torch.cat((*past, *keys), dim=1).to(torch.int32), chosen.take(self.numbers).to(torch.int32)
        first = None
        if self.packed and self.attention_mask is None and self.cache is None:
            restarts = self.position_ids.diff(prepend=self.position_ids[:, :1] - 1) != 1
            starts = torch.where(restarts, torch.arange(restarts.shape[1], device=restarts.device), 0).cummax(1).values
            first = chosen.take(starts.expand_as(self.numbers)).to(torch.int32)
        config = self.decoder.config
        backend: str = config._attn_implementation  # type: ignore[assignment]
        large = inputs.is_cuda and query.shape[1] >= FLEX_FROM and backend != "eager" and not config.attention_dropout
        if large or "flash" in backend or backend == "flex_attention":
            return KeyBias(None, token_block_mask(query, key, first))
        visible = sees(query, key, first)[:, None]
        if "sdpa" in backend:
            return visible
        lowest = torch.finfo(inputs.dtype).min
        return torch.where(visible, 0.0, lowest).to(inputs.dtype)

    @torch.compiler.disable
    def store_appended(self) -> None:
        """Add the slots to the cache: segment k holds step k's."""
        tokens = [self.numbers_of(ran) for ran in self.ran]
        self.store([(step, step, Chosen(), token) for step, token in enumerate(tokens)])

    @torch.compiler.disable
    def store_replaced(self, passes: Int[Tensor, "B T"]) -> None:
        """Add the slots to the cache: segment k holds last slots of tokens that ran k + 1 steps, K + 1 + k others'."""
        steps = range(len(self.ran))
        last = choose(*(passes == step + 1 for step in steps))
        others = choose(*(passes > step + 1 for step in steps))
        segments = len(self.cache.layers[0].segments) // 2 + 1  # type: ignore[union-attr]
        pieces = [(step, step, chosen) for step, chosen in enumerate(last)]
        pieces += [(segments + step, step, chosen) for step, chosen in enumerate(others)]
        self.store([(at, step, which, self.numbers_of(which)) for at, step, which in pieces if which is not None])

    def store(self, pieces: list[tuple[int, int, Chosen, Tensor]]) -> None:
        """Pieces: the segment, the step, which of the slots kept of that step, and their tokens' numbers."""
        gaps = self.attention_mask is not None or any(c.live is not None for c in (*self.ran, *(p[2] for p in pieces)))
        layers: list[Any] = self.cache.layers  # type: ignore[union-attr]
        packing = layers[0].packing() if layers[0].unpacked >= PACK_EVERY else None
        index = None
        if any(chosen.index is not None for _, _, chosen, _ in pieces):  # one gather a layer
            starts = [sum(self.sizes[:step]) for step in range(len(self.ran))]
            every = torch.arange(self.numbers.shape[1], device=self.numbers.device).expand_as(self.numbers)
            parts = [starts[step] + (every if c.index is None else c.index) for _, step, c, _ in pieces]
            index = torch.cat(parts, dim=1)
        numbers = None
        for layer, held in enumerate(layers):
            if packing is not None:
                held.pack(packing)
            new: dict[int, tuple[KeyValue, Tensor]] = {}
            own = [self.own(step, layer) for step in range(len(self.ran))]
            slots = [own[step] for _, step, _, _ in pieces]
            if index is not None:
                sizes = [token.shape[1] for *_, token in pieces]
                slots = list(zip(*(_columns(torch.cat(x, 2), index).split(sizes, 2) for x in zip(*own)), strict=True))
            for (segment, _, _, token), pair in zip(pieces, slots, strict=True):
                new[segment] = pair, token
            numbers = held.append(self.numbers.shape[1], new, gaps, numbers)
