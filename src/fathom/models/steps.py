"""Step by step over all tokens: methods in which a token runs through the layers as often as it needs.

Step k runs some of the new tokens, gathered; a token's turn in a step is a slot (t, k) with keys and values of its own,
at the token's position. What a slot sees is decided by tokens alone, with one of two rules for earlier steps:

    append     slot (t, k) sees (t', k')  iff  t' ≤ t and k' ≤ k                        (2-D causal)
    replace    slot (t, k) sees (t', k')  iff  t' ≤ t and k' is the last step ≤ k that t' ran   (frozen keys)

`StepStack` is the layer stack for such methods, `StepLayer` the cache layer. Only slots that ran are computed and kept.
A step gathers its tokens within their rows (`Chosen`), all rows as long as the longest; or lays those of all rows end
to end as one row (`Flat`), where the kernel skips what belongs to other rows: then a step costs what its tokens cost.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Decoder, LayerGroup, Stack
from fathom.models.slots import FLEX_FROM, restarts_are_documents
from fathom.ops.biased_attention import FlexBias
from fathom.ops.kernels import has_kernel
from fathom.ops.token_blocks import BLOCK, TokenRanges, listed_blocks, readers_of, sees, token_block_mask

NOWHERE = 2**30  # the token number of a slot that no live slot may see
FOREVER = 2**30  # the last step at which a slot of such a segment is visible
BUCKET = 64  # above it, numbers of gathered tokens are multiples of it, so that compiled kernels meet few shapes
LEAST = 2 * BLOCK  # tokens laid end to end, dead ones included: compiled, a single block would be another graph
PACK_EVERY = 64  # columns after which a cache of several rows closes the gaps that stopped rows left

KeyValue = tuple[Float[Tensor, "B G n D"], Float[Tensor, "B G n D"]]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the T new tokens of every row, in their order.

    Attributes:
        index: of the tokens; rows with fewer than the longest name others at the end. None: all T, in place.
        live: which entries are chosen ones. None: all.
        before: the places of their entries in the step before. None: the same.
    """

    index: Int[Tensor, "B n"] | None = None
    live: Bool[Tensor, "B n"] | None = None
    before: Int[Tensor, "B n"] | None = None

    @torch.compiler.disable  # every shape would be compiled by itself; `_take` and `_put` are traced where they pay
    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The chosen entries of `x` along its token dimension."""
        return _take(x, self.index, dim)

    @torch.compiler.disable
    def put(self, x: Tensor, new: Tensor, dim: int = 1) -> Tensor:
        """`x` with the chosen entries replaced by `new`."""
        return _put(x, new, self.index, self.live, dim)

    @torch.compiler.disable
    def from_before(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`, which has those of the step before."""
        return _take(x, self.before, 1)


@dataclasses.dataclass(frozen=True)
class Flat:
    """Some of the B·T new tokens of all rows, in their order, laid end to end as one row.

    Attributes:
        index: of the tokens; behind them of some that were not chosen, each once, to fill up the shape.
        before: the places of their entries in the step before, laid end to end likewise.
        live: which entries are chosen ones. None: all.
    """

    index: Int[Tensor, " N"]
    before: Int[Tensor, " N"]
    live: Bool[Tensor, " N"] | None

    @torch.compiler.disable
    def take(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`: [1, N, …] of [B, T, …]."""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    @torch.compiler.disable
    def put(self, x: Tensor, new: Tensor) -> Tensor:
        """`x` with the chosen entries replaced by `new`."""
        return _copied(x.flatten(0, 1), 0, self.index, self.live, new[0]).view(x.shape)

    @torch.compiler.disable
    def from_before(self, x: Tensor) -> Tensor:
        """The chosen entries of `x`, which has those of the step before."""
        return x.flatten(0, 1).index_select(0, self.before)[None]


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


def _copied(x: Tensor, dim: int, index: Int[Tensor, " N"], live: Bool[Tensor, " N"] | None, new: Tensor) -> Tensor:
    """`x` with some entries replaced by those of the new ones that are live."""
    if live is not None:
        new = torch.where(live.view(-1, *(1,) * (x.ndim - dim - 1)), new, x.index_select(dim, index))
    return x.index_copy(dim, index, new)


def _along(index: Tensor, x: Tensor, dim: int) -> Tensor:
    """[B, n] shaped to broadcast against `x` whose token dimension is `dim`."""
    return index.view(index.shape[0], *(1,) * (dim - 1), index.shape[1], *(1,) * (x.ndim - dim - 1))


@torch.compiler.disable
def choose(*masks: Bool[Tensor, "B T"], counts: list[list[int]] | None = None) -> list[Chosen | None]:
    """The tokens of each mask, None for a mask without any. `counts`: of each in every row; if not given, waits for the
    device once.

    On the meta device, which has no values, every mask chooses all.
    """
    if masks[0].is_meta:
        return [Chosen() for _ in masks]
    length, every = masks[0].shape[1], torch.stack(masks)
    if counts is None:
        fewest, most = torch.stack(every.sum(2).aminmax(dim=1)).tolist()
    else:
        fewest, most = [min(rows) for rows in counts], [max(rows) for rows in counts]
    sizes = [min(length, high if high <= BUCKET else -(-high // BUCKET) * BUCKET) for high in most]
    order = None
    if any(0 < size < length for size in sizes):
        order = (~every).to(torch.uint8).argsort(dim=2, stable=True)
    chosen: list[Chosen | None] = []
    for number, (mask, size, low) in enumerate(zip(masks, sizes, fewest, strict=True)):
        if size in (0, length) or order is None:
            chosen.append(None if size == 0 else Chosen(None, None if low == length else mask))
            continue
        index = order[number, :, :size]
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
        self, tokens: int, slots: KeyValue, token: Tensor, sizes: list[int], gaps: bool, numbers: Tensor | None
    ) -> Tensor:
        """Add slots ordered by segment, so many of each, with their tokens' numbers. `numbers`: what a layer with the
        same slots has returned, so that all share one tensor."""
        if not self.is_initialized:
            self.lazy_initialization(*slots)
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


def mask_of(visible: Bool[Tensor, "B n keys"], config: FathomConfig, dtype: torch.dtype) -> Tensor:
    """[B, 1, n, keys] as the backend reads it: SDPA whether a key is seen, others what is added to its score."""
    visible = visible[:, None]
    if "sdpa" in config._attn_implementation:  # type: ignore[operator]
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def lay_flat(key: Tensor, value: Tensor, earlier: None) -> tuple[Tensor, Tensor, KeyValue]:
    """The first step of all rows, which later ones read as one row: [B, G, T, D] → [1, G, B·T, D]."""
    # contiguous as what later steps leave: compiled, another layout would be another graph
    keys, values = (x.transpose(0, 1).flatten(1, 2)[None].contiguous() for x in (key, value))
    return key, value, (keys, values)


def replace_flat(
    key: Tensor, value: Tensor, earlier: tuple[Tensor, Tensor, Int[Tensor, " N"], Bool[Tensor, " N"]]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """`replace` in one row of all rows' tokens; the slots that make way are left, too."""
    last_key, last_value, index, live = earlier
    replaced = last_key.index_select(2, index), last_value.index_select(2, index)
    keys, values = (
        last.index_copy(2, index, torch.where(live[:, None], new, old))
        for last, new, old in zip((last_key, last_value), (key, value), replaced, strict=True)
    )
    return keys, values, (keys, values, *replaced)


def _columns(
    x: Float[Tensor, "#B G n D"], index: Int[Tensor, "B m"], out: Tensor | None = None
) -> Float[Tensor, "B G m D"]:
    """Some slots of keys or values, of one row for all or of each row; as 64-bit numbers where they fit, as a gather
    costs by the number."""
    x = x.expand(len(index), -1, -1, -1)
    if x.requires_grad and torch.is_grad_enabled():
        return _take(x, index, 2)
    found = x.new_empty(*x.shape[:2], index.shape[1], x.shape[3]) if out is None else out
    numbers = torch.int64 if x.shape[-1] * x.element_size() % 8 == 0 and x.stride(-1) == 1 else x.dtype
    torch.gather(x.view(numbers), 2, _along(index, x, 2).expand_as(found.view(numbers)), out=found.view(numbers))
    return found


def _columns_of(
    banks: Sequence[Iterator[KeyValue]], indices: Sequence[Int[Tensor, "B m"]], together: int = 8
) -> Iterator[KeyValue]:
    """By layer, some slots of each bank, one bank's after the other's; a few layers at a time, as calls for each would
    take longer than the copies."""
    sizes = [index.shape[1] for index in indices]
    while some := [[x for pair in itertools.islice(bank, together) for x in pair] for bank in banks]:
        if not some[0]:
            return
        heads = some[0][0].shape[1]
        every = [torch.cat(tensors, dim=1) for tensors in some]
        if torch.is_grad_enabled() and any(x.requires_grad for x in every):
            found = torch.cat(
                [_take(x.expand(len(i), -1, -1, -1), i, 2) for x, i in zip(every, indices, strict=True)], 2
            )
        else:
            found = every[0].new_empty(len(indices[0]), every[0].shape[1], sum(sizes), every[0].shape[3])
            for x, index, out in zip(every, indices, found.split(sizes, dim=2), strict=True):
                _columns(x, index, out)
        parts = found.split(heads, dim=1)
        yield from zip(parts[::2], parts[1::2], strict=True)


def _merged(held: Tensor, new: Tensor, sizes: list[int], added: list[int], dim: int) -> Tensor:
    """The new slots of each segment after those it holds."""
    parts, start, stop, taken = [], 0, 0, 0
    for size, more in zip(sizes, added, strict=True):
        stop += size
        if more:  # what lies between two such segments stays in one piece: decoding waits for the calls
            parts += [held.narrow(dim, start, stop - start), new.narrow(dim, taken, more)]
            start, taken = stop, taken + more
    parts.append(held.narrow(dim, start, held.shape[dim] - start))
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _joined(slots: list[KeyValue]) -> KeyValue | None:
    """Some slots after the others."""
    if len(slots) < 2:
        return slots[0] if slots else None
    keys, values = zip(*slots, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _numbered(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The place of every chosen token among those of all rows; any of others."""
    return (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)


def _hides(chosen: Chosen | Flat) -> bool:
    """Whether some entries are dead."""
    return chosen.live is not None


@torch.compiler.disable
def _hidden(order: Int[Tensor, "R n"], chosen: Chosen | Flat) -> Int[Tensor, "R n"]:
    """Of the chosen; `NOWHERE` for dead entries."""
    return order if chosen.live is None else torch.where(chosen.live, order, NOWHERE)


@torch.compiler.disable
def of_any_length(*given: Any) -> None:
    """Tell torch.compile of what steps have as many of as tokens, so that the first step makes the graph of all."""
    for x in given:
        if isinstance(x, (list, tuple)):
            of_any_length(*x)
        elif isinstance(x, TokenRanges):
            of_any_length(x.start, x.stop, x.readers, x.blocks)
        elif isinstance(x, Tensor):
            torch._dynamo.maybe_mark_dynamic(x, x.ndim - 1 if not x.is_floating_point() else x.ndim - 2)


class Foresight:
    """How many tokens will run each step, as far as those of late tell: then no step waits for the number of the last.

    Of calls with as many tokens, the most or the mean and three deviations, whichever is above. Where more go on, the
    call is made again with all numbers waited for (`StepStack.settled`), and observation starts anew.
    """

    def __init__(self, least: int = 8, remembered: int = 16, occasions: int = 64):
        self.least, self.remembered, self.occasions, self.repeated = least, remembered, occasions, 0
        self.counts: dict[Any, collections.deque[list[int]]] = {}
        self.sizes: dict[Any, int] = {}  # by occasion and step

    def most(self, occasion: Any, step: int) -> int | None:
        """How many may go on after this step; None: not known yet."""
        seen = self.counts.get(occasion, ())
        if len(seen) < self.least:
            return None
        counts = [numbers[step] if step < len(numbers) else 0 for numbers in seen]
        deviation = statistics.stdev(counts) if len(counts) > 1 else 0.0
        return max(*counts, math.ceil(statistics.fmean(counts) + 3 * deviation))

    def kept(self, occasion: Any, step: int, least: int, most: int) -> int:
        """The size that the step had the last time if it is one of these, else the least: another size is another CUDA
        graph."""
        size = self.sizes.get((occasion, step), 0)
        self.sizes[occasion, step] = size = size if least <= size <= most else least
        return size

    def note(self, occasion: Any, counts: list[int]) -> None:
        """How many went on after each step."""
        self.counts.setdefault(occasion, collections.deque(maxlen=self.remembered)).append(counts)
        if len(self.counts) > self.occasions:
            oldest = next(iter(self.counts))
            self.counts.pop(oldest)
            self.sizes = {key: size for key, size in self.sizes.items() if key[0] != oldest}

    def forget(self, occasion: Any) -> None:
        """A call had to be made again."""
        self.counts.pop(occasion, None)
        self.repeated += 1


class StepGraphs:
    """A few layers at a time as CUDA graphs: a step of few tokens takes less time than the CPU needs to launch its
    kernels.

    A graph is recorded for every size, so sizes are multiples of a 128th of the tokens; and reads what it needs again
    in its backward pass where it lay when it was recorded, so what does not come from another graph is copied to a
    place of its own. Outputs last until the next forward: gradients must be used, and let go of, before it.
    """

    def __init__(self, decoder: Decoder, together: int = 4):
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None  # many sizes are what it is for
        layers: list[Any] = list(decoder.layers)
        together = max(number for number in range(1, together + 1) if len(layers) % number == 0)
        groups = [LayerGroup(layers[n : n + together]) for n in range(0, len(layers), together)]
        self.groups = [torch.compile(group, mode="reduce-overhead") for group in groups]
        self.places: dict[tuple[Any, ...], Tensor] = {}

    def place(self, x: Tensor, *name: Any, shared: bool = True) -> Tensor:
        """The same numbers where they were the last time that there were so many of this name; what all layers read is
        read there, and not copied for each."""
        numbers = 1 << max(x.numel() - 1, 0).bit_length()
        place = self.places.get((*name, numbers, x.dtype))
        if place is None:
            place = self.places[(*name, numbers, x.dtype)] = x.new_empty(numbers, requires_grad=False)
        placed = place.detach()[: x.numel()].view(x.shape).copy_(x)
        if shared:
            torch._dynamo.mark_static_address(placed, guard=False)
        return placed


@dataclasses.dataclass(frozen=True)
class Piece:
    """Slots that fill a segment of the cache.

    Attributes:
        tokens: whose.
        counts: how many of every row; empty if that must be counted.
        bank: where they are,
        column: and the place there of every token's.
    """

    tokens: Bool[Tensor, "B T"]
    counts: list[int]
    bank: int
    column: Int[Tensor, "B T"]


@dataclasses.dataclass
class StepStack(Stack):
    """The stack of a method that runs step by step: bound to the new tokens, it runs some of them at a time.

    `position_ids` are the new tokens'; `attention_mask` is theirs and the cached tokens', [B, tokens] or None.

    Attributes:
        most: steps of a token.
        flat: steps after the first lay their tokens end to end; False for a method that gathers none.
        ranged: and what a slot sees are ranges of places, as nothing is padding: kernels of our own serve them.
        bounds: then, what every token sees of each step's slots: from where, to where.
        real: tokens that are not padding.
        numbers: of the new tokens in their row, after the cached ones; `NOWHERE` for padding.
        order: the same, or in the row of all rows' tokens if these are laid end to end: what masks compare.
        first: of the tokens that a token may see, in that order; None: no limit.
        computed: how many slots ran, dead entries among them.
    """

    most: int = 1
    packed: bool = False  # the caller gave position ids: where they restart, a document starts
    ran: list[Chosen | Flat] = dataclasses.field(default_factory=list)  # by step
    # By step and layer, what `read` left; of `append` the last step's alone, which has all before it.
    slots: list[list[Any]] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)  # by step: how many slots are its own,
    own: list[Tensor] = dataclasses.field(default_factory=list)  # and, of `append`, their order, unless ranges say it
    appends: bool = False
    rotary: tuple[Tensor, ...] = ()  # of all new tokens
    computed: int = 0
    graphs: StepGraphs | None = None
    foresight: Foresight | None = None
    went_on: list[Any] = dataclasses.field(default_factory=list)  # after each step, how many of every row
    places: list[int] = dataclasses.field(default_factory=list)  # and for how many there was place
    arrival: torch.cuda.Event | None = None  # of those numbers

    def __post_init__(self) -> None:
        held: Any = None if self.cache is None else self.cache.layers[0]
        self.past: Any = held if held is not None and held.tokens else None
        self.seen = held.tokens if held is not None else 0
        mask = self.attention_mask
        if mask is not None and not mask.is_meta and bool(mask.all()):
            mask = self.attention_mask = None
        rows, length = self.position_ids.shape
        device = self.position_ids.device
        numbers = torch.arange(self.seen, self.seen + length, device=device).expand(rows, length)
        self.real = torch.ones_like(numbers, dtype=torch.bool) if mask is None else mask[:, self.seen :].bool()
        self.numbers: Int[Tensor, "B T"] = numbers if mask is None else torch.where(self.real, numbers, NOWHERE)
        self.order: Int[Tensor, "B T"] = self.numbers
        self.first: Int[Tensor, "B T"] | None = None
        if self.past is None and restarts_are_documents(self):
            restarts = self.position_ids.diff(prepend=self.position_ids[:, :1] - 1) != 1
            starts = torch.where(restarts, torch.arange(length, device=device), 0).cummax(1).values
            self.first = starts.expand(rows, length)
        self.flat = self.past is None and self.flat_pays()
        if self.flat:
            row = torch.arange(rows, device=device)[:, None] * length
            self.first = (row.expand(rows, length) if self.first is None else self.first + row).to(torch.int32)
            self.order = (numbers + row if mask is None else torch.where(self.real, numbers + row, NOWHERE)).int()
        self.ranged = self.flat and mask is None and self.ranges_served()
        if self.ranged:
            self.bounds = torch.zeros(2, self.most, rows * length, dtype=torch.int32, device=device)
            self.bounds[0, 0], self.bounds[1, 0] = self.first.flatten(), self.order.flatten() + 1  # type: ignore[union-attr]
        if not self.ranged:
            self.graphs = self.foresight = None
        self.occasion, self.random = (self.decoder.training, rows, length), None
        if self.foresight is not None and self.decoder.training:
            self.random = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        if self.graphs is not None:
            torch.compiler.cudagraph_mark_step_begin()

    def kernel(self, queries: int) -> bool:
        """Whether FlexAttention serves gathered steps of so many tokens in a row, and no dense mask."""
        config = self.decoder.config
        backend: str = config._attn_implementation  # type: ignore[assignment]
        large = self.position_ids.is_cuda and queries >= FLEX_FROM and config.head_dim >= 16  # its least
        return (
            "flash" in backend
            or backend == "flex_attention"
            or (large and backend != "eager" and not config.attention_dropout)
        )

    def flat_pays(self) -> bool:
        """A dense mask of all rows' slots would have B times the scores of masks by row; the kernel skips them."""
        return self.kernel(self.position_ids.numel()) and not self.position_ids.is_meta

    def ranges_served(self) -> bool:
        """Whether `range_attention` has kernels for this model and device."""
        config, table = self.decoder.config, self.decoder.embed_tokens.weight
        if "sdpa" not in config._attn_implementation or not has_kernel(table.device.type):  # type: ignore[operator]
            return False
        from fathom.ops.range_attention import serves

        return serves(config.head_dim, config.num_attention_heads // config.num_key_value_heads, table.dtype)

    @torch.compiler.disable
    def choose(self, chosen: Chosen | Flat, goes_on: Bool[Tensor, "R n"], every: bool = False) -> Chosen | Flat | None:
        """Those of the chosen real tokens that go on, None if none does. Waits for the device once, unless it is known
        that `every` one does, or foreseen how many."""
        if self.flat:
            return self.choose_flat(chosen, goes_on, every)
        assert isinstance(chosen, Chosen)
        live = self.real if chosen.index is None and chosen.live is None else chosen.live
        [picked] = choose(goes_on if live is None else goes_on & live)
        if picked is None or chosen.index is None:
            return picked and dataclasses.replace(picked, before=picked.index)
        if picked.index is None:
            return Chosen(chosen.index, picked.live)
        return Chosen(chosen.index.gather(1, picked.index), picked.live, picked.index)

    def choose_flat(self, chosen: Chosen | Flat, goes_on: Bool[Tensor, "R n"], every: bool) -> Chosen | Flat | None:
        """Those that go on first, then as many others as there is place for; waits for the number only where there is
        no forecast of it."""
        if isinstance(chosen, Flat):
            some = goes_on[0] if chosen.live is None else goes_on[0] & chosen.live
            runs = some.new_zeros(self.real.numel()).index_copy(0, chosen.index, some)
        else:
            some = runs = (goes_on & self.real).flatten()
        if self.ranged and self.appends:
            self.bound(runs)
        rows, length = self.real.shape
        by_row = runs.view(rows, length).sum(1)
        all_do = every and self.attention_mask is None
        count = None
        if self.foresight is not None and not all_do and not self.watched:
            count = self.foresight.most(self.occasion, len(self.ran) - 1)
        if count is not None:
            self.went_on.append(self.sent(by_row))
        else:
            self.went_on.append([length] * rows if all_do else by_row.tolist())
            count = sum(self.went_on[-1])
            if count == rows * length and not self.appends:  # all read what all have replaced: plain causal again
                self.places.append(count)
                return Chosen()
        if not count:
            self.places.append(0)
            return None
        unit = BLOCK if self.graphs is None else -(-rows * length // (128 * BLOCK)) * BLOCK
        size = max(LEAST, -(-count // unit) * unit)
        known = isinstance(self.went_on[-1], list)
        if not known:
            size = self.foresight.kept(self.occasion, len(self.ran), size, size + 2 * unit)  # type: ignore[union-attr]
        size = min(len(some), size)
        self.places.append(size)
        until, entries = some.cumsum(0), torch.arange(len(some), device=some.device)
        place = torch.where(some, until - 1, until[-1] + entries - until)
        place = torch.empty_like(place).scatter_(0, place, entries)[:size]
        live = None if known and size == count else entries[:size] < until[-1]
        return Flat(chosen.index.index_select(0, place) if isinstance(chosen, Flat) else place, place, live)

    def bound(self, runs: Bool[Tensor, " n"]) -> None:
        """What every token will see of the next step's slots, those of the tokens that run it: known before it is known
        how many these are, so that the device does not wait for it."""
        until = runs.cumsum(0, dtype=torch.int32)
        before = (until - runs.int()).index_select(0, self.bounds[0, 0])
        step, slots = len(self.ran), sum(self.sizes)
        torch.add(before, slots, out=self.bounds[0, step])
        torch.add(until, slots, out=self.bounds[1, step])

    def sent(self, numbers: Tensor) -> Tensor:
        """On their way to the CPU."""
        if not numbers.is_cuda:
            return numbers
        here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        self.arrival = torch.cuda.Event()
        self.arrival.record()
        return here

    @property
    def watched(self) -> bool:
        """Whether what happens in every layer is wanted."""
        return self.hidden_states is not None or self.attentions is not None

    @torch.compiler.disable(recursive=False)
    def run_all(self, steps: Callable[..., Any], *given: Any) -> Any:
        """What a method's loop of steps gives; it gives None if they are not `settled`, and then runs once more."""
        output = steps(self, *given)
        return steps(self, *given) if output is None else output

    @torch.compiler.disable
    def settled(self) -> bool:
        """Waits until it is known who ran. False if more tokens went on than had a place: the stack is then as it was
        made, with all steps to be run again, and waits at each."""
        if self.foresight is None or not self.flat:
            return True
        if self.arrival is not None:
            self.arrival.synchronize()
        self.went_on = [rows if isinstance(rows, list) else rows.tolist() for rows in self.went_on]
        counts = [sum(rows) for rows in self.went_on]
        if all(count <= size for count, size in zip(counts, self.places, strict=True)):
            self.foresight.note(self.occasion, counts)
            return True
        self.foresight.forget(self.occasion)
        self.ran, self.slots, self.sizes, self.own, self.computed = [], [], [], [], 0
        self.places, self.went_on, self.arrival = [], [], None
        random, device = self.random, self.real.device
        self.__post_init__()
        if random is not None:
            torch.cuda.set_rng_state(random, device) if device.type == "cuda" else torch.set_rng_state(random)
        return False

    @property
    def reached(self) -> int:
        """How many steps any token ran."""
        return 1 + sum(map(any, self.went_on)) if self.flat else len(self.ran)

    # Compiled, the layers are a graph; all that is around them is not. They get the earlier slots joined, so that one
    # graph with dynamic sizes serves all steps.
    @torch.compiler.disable(recursive=False)
    def append(self, inputs: Float[Tensor, "R n d"], chosen: Chosen | Flat) -> Float[Tensor, "R n d"]:
        """F of the next step of the chosen tokens; they see all earlier slots and each other's."""
        step, layers = len(self.ran), len(self.decoder.layers)
        earlier: list[Any] = self.slots[-1] if self.slots else [None] * layers
        if self.past is not None:
            earlier = [
                _joined([*self.past_slots(layer, step), *([self.appended(layer)] if self.slots else [])])
                for layer in range(layers)
            ]
        self.appends, query = True, self.order
        self.sizes.append(self.order.numel() if self.flat and not step else inputs.shape[1])
        if not self.ranged:
            query = chosen.take(self.order)
            self.own.append(_hidden(query, chosen).view(-1 if self.flat else len(query), self.sizes[-1]))
        read = lay_flat if self.flat and not step else append
        hidden_states = self.run(inputs, chosen, query, self.own, read, earlier)
        del self.slots[:-1]
        return hidden_states

    @torch.compiler.disable(recursive=False)
    def replace(self, inputs: Float[Tensor, "R n d"], chosen: Chosen | Flat) -> Float[Tensor, "R n d"]:
        """F of the next step of the chosen tokens, whose new slots take the place of their earlier ones.

        In rows and without `index`, tokens that are not live run too, but keep their earlier slot.
        """
        layers, order = range(len(self.decoder.layers)), self.order
        earlier: list[Any]
        last: list[Any] = self.slots[-1] if self.slots else [None] * len(layers)
        read: Any = lay_flat
        if self.flat:
            order, earlier = order.view(1, -1), [None] * len(layers)
            self.sizes.append(inputs.shape[0] * inputs.shape[1])
            if isinstance(chosen, Flat):
                live = chosen.live
                if live is None:  # one compiled graph less
                    live = torch.ones_like(chosen.index, dtype=torch.bool)
                read, earlier = replace_flat, [(*slots[:2], chosen.index, live) for slots in last]
        else:
            assert isinstance(chosen, Chosen)
            step, index, live = len(self.ran), chosen.index, chosen.live
            if index is not None and live is None:  # both or none: one compiled graph less
                live = torch.ones_like(index, dtype=torch.bool)
            read, earlier = replace, [(_joined(self.past_slots(n, step)), last[n], index, live) for n in layers]
            self.sizes.append(order.shape[1])
        return self.run(inputs, chosen, self.order if self.ranged else chosen.take(self.order), [order], read, earlier)

    @torch.compiler.disable(recursive=False)
    def run(
        self,
        inputs: Float[Tensor, "R n d"],
        chosen: Chosen | Flat,
        query: Int[Tensor, "R n"],
        keys: list[Tensor],
        read: Any,
        earlier: list[Any],
    ) -> Float[Tensor, "R n d"]:
        """One forward of the layers over the chosen tokens. `query`, `keys`: the order of these and of the new keys."""
        self.ran.append(chosen)
        self.computed += inputs.shape[0] * inputs.shape[1]
        if self.decoder.rotary_emb is not None and not self.rotary:
            self.rotary = self.decoder.rotary_emb(inputs, self.position_ids)
        plain = chosen.index is None and self.past is None and (len(self.ran) == 1 or not self.appends)
        # read as positions by backends that take repeated or jumping ones for packed documents
        slot_ids = None if plain else torch.arange(inputs.shape[1], device=inputs.device)[None]
        stack = Stack(
            self.decoder,
            chosen.take(self.position_ids) if slot_ids is None or not self.rotary else slot_ids,
            (chosen.take(self.rotary[0]), chosen.take(self.rotary[1])) if self.rotary else None,
            self.plain_mask(inputs) if plain else self.mask(inputs, chosen, query, keys),
            None,
            self.layer_kwargs,
            self.hidden_states,
            self.attentions,
            slot_ids=slot_ids,
            read=read,
            earlier=earlier,
        )
        if self.graphs is not None and self.flat and not self.watched:
            stack.groups = self.graphs.groups
            inputs = self.graphed(stack, inputs)
        if isinstance(chosen, Flat):
            of_any_length(inputs, stack.position_embeddings, stack.slot_ids, stack.attention_mask, earlier)
        hidden_states = stack(inputs)
        self.slots.append(stack.kept)
        return hidden_states

    @torch.compiler.disable
    def graphed(self, stack: Stack, inputs: Tensor) -> Tensor:
        """What the layers of this step read, at the places that their graphs know."""
        assert self.graphs is not None
        step, place = len(self.ran), self.graphs.place
        if stack.position_embeddings is not None:
            cos, sin = stack.position_embeddings
            stack.position_embeddings = place(cos, step, "cos"), place(sin, step, "sin")
        if isinstance(ranges := stack.attention_mask, TokenRanges):
            given = vars(ranges).items()
            placed: dict[str, Any] = {name: x if x is None else place(x, step, name) for name, x in given}
            stack.attention_mask = TokenRanges(**placed)
        return place(inputs, step, "inputs", shared=False)

    @torch.compiler.disable
    def past_slots(self, layer: int, step: int) -> list[KeyValue]:
        """What the cache holds for this step."""
        if self.past is None:
            return []
        held: Any = self.cache.layers[layer]  # type: ignore[union-attr]
        return [(held.keys[:, :, part], held.values[:, :, part]) for part in held.visible(step)]

    @torch.compiler.disable
    def appended(self, layer: int) -> KeyValue:
        """The new slots of the steps so far, as `append` left them after the past ones."""
        key, value = self.slots[-1][layer]
        past = key.shape[2] - sum(self.sizes)
        return key[:, :, past:], value[:, :, past:]

    @torch.compiler.disable
    def plain_mask(self, inputs: Tensor) -> Any:
        """All tokens read one slot of each: the ordinary causal mask."""
        config, given = self.decoder.config, self.position_ids if restarts_are_documents(self) else None
        return hf_versions.causal_mask(config, inputs, self.attention_mask, None, given)

    @torch.compiler.disable
    def mask(self, inputs: Tensor, chosen: Chosen | Flat, query: Tensor, keys: list[Tensor]) -> Any:
        """The mask in the form that the backend reads."""
        if self.ranged and isinstance(chosen, Flat):
            start, stop = self.bounds.index_select(2, chosen.index)
            if chosen.live is not None:  # others see nothing; ends must not fall, nor reach beyond what others see
                last = stop.index_select(1, (chosen.live.sum(0, keepdim=True) - 1).clamp(min=0))
                start, stop = torch.where(chosen.live, start, NOWHERE), torch.where(chosen.live, stop, last)
            slots = sum(self.sizes) if self.appends else self.order.numel()
            if not self.appends:  # one slot of each token
                start, stop = start[:1], stop[:1]
            readers = readers_of(start, stop, slots) if torch.is_grad_enabled() else None
            config = self.decoder.config
            heads = config.num_attention_heads // config.num_key_value_heads
            # of all tokens there are so many blocks that the order does not matter
            rows = None if restarts_are_documents(self) else len(self.real)
            blocks = None if start.shape[1] == self.real.numel() else listed_blocks(start, stop, heads, rows)
            return TokenRanges(start, stop, readers, blocks)
        gaps = self.attention_mask is not None or any(map(_hides, self.ran))
        past = []
        if self.past is not None:
            past = [self.past.token[:, part] for part in self.past.visible(len(self.ran) - 1)]
            gaps |= self.past.gaps
            if self.attention_mask is not None:  # it may hide a token that an earlier call did not
                past = [
                    torch.where(self.attention_mask.gather(1, p.clamp(max=self.seen)) > 0, p, NOWHERE) for p in past
                ]
        if self.numbers.shape[1] == 1 and not gaps and not self.flat:  # one new token sees everything
            return None
        first = None if self.first is None else chosen.take(self.first)
        if isinstance(chosen, Flat) and chosen.live is not None:  # others see what the last does, in its blocks
            query = query.where(chosen.live, query.where(chosen.live, -1).max())
            first = first if first is None else first.where(chosen.live, first.where(chosen.live, -1).max())
        key = torch.cat((*past, *keys), dim=1)
        if self.kernel(query.shape[1]):
            if first is None:
                return FlexBias(None, token_block_mask(query.int(), key.int()))
            # Two comparisons a score overfill the registers of larger tiles: 688 → 443 µs a call on an H200
            return FlexBias(None, token_block_mask(query.int(), key.int(), first.int()), tile=64)
        return mask_of(sees(query, key, first), self.decoder.config, inputs.dtype)

    @torch.compiler.disable
    def store_appended(self, passes: Int[Tensor, "B T"]) -> None:
        """Add the slots to the cache: segment k holds step k's."""
        layers = range(len(self.decoder.layers))
        if not self.flat:
            self.keep((self.appended(n) for n in layers), torch.cat(self.own, 1), dict(enumerate(self.sizes)), self.ran)
            return
        ran, starts = self.ran_by_row(), [0, *itertools.accumulate(self.sizes)]
        wanted = {
            step: Piece(passes > step, ran[step], 0, _numbered(passes > step) + starts[step])
            for step in range(len(self.ran))
        }
        self.store(wanted, [(self.slots[-1][layer] for layer in layers)])

    @torch.compiler.disable
    def store_replaced(self, passes: Int[Tensor, "B T"]) -> None:
        """Add the slots to the cache: segment k holds last slots of tokens that ran k + 1 steps, K + 1 + k others'."""
        steps, segments = range(len(self.ran)), len(self.cache.layers[0].segments) // 2 + 1  # type: ignore[union-attr]
        layers = range(len(self.decoder.layers))
        if passes.shape[1] == 1 and not self.flat and not any(map(_hides, self.ran)):  # all rows ran all: no waiting
            final = len(self.ran) - 1
            kept = {final: final} | {segments + step: step for step in range(final)}
            pairs = (_joined([self.slots[step][n] for step in kept.values()]) for n in layers)
            self.keep(pairs, self.numbers.expand(-1, len(kept)), dict.fromkeys(kept, 1), self.ran)  # type: ignore[arg-type]
            return
        ran = self.ran_by_row()
        last, others = [passes == step + 1 for step in steps], [passes > step + 1 for step in steps[:-1]]
        place = torch.arange(passes.numel() if self.flat else passes.shape[1], device=passes.device)
        if not self.flat:  # every step's slots have a place for every token
            place, starts = place.expand_as(passes), [0, *itertools.accumulate(self.sizes)]
            wanted = {step: Piece(tokens, [], 0, place + starts[step]) for step, tokens in enumerate(last)}
            wanted |= {
                segments + step: Piece(tokens, [], 0, place + starts[step]) for step, tokens in enumerate(others)
            }
            self.store(wanted, [(_joined([left[layer][-2:] for left in self.slots]) for layer in layers)])  # type: ignore[misc]
            return
        wanted = {}
        for step, tokens in enumerate(last):
            counts = [now - later for now, later in zip(ran[step], ran[step + 1], strict=True)]
            wanted[step] = Piece(tokens, counts, 0, place.view(passes.shape))
        for step, tokens in enumerate(others):
            wanted[segments + step] = Piece(tokens, ran[step + 1], step + 1, _numbered(tokens))
        banks: list[Any] = [(left[:2] for left in self.slots[-1])]
        for before, now in itertools.pairwise(self.slots):  # what made way for a step, or all that was before
            banks.append((new[2:] or old[:2] for old, new in zip(before, now, strict=True)))
        self.store(wanted, banks)

    def ran_by_row(self) -> list[list[int]]:
        """Of every step and one after the last, how many tokens of each row ran it, padding in the first among them;
        empty if that must be counted."""
        rows, length = self.real.shape
        if not self.flat:
            return [[]] * (len(self.ran) + 1)
        return [[length] * rows, *self.went_on[: len(self.ran) - 1], [0] * rows]

    def store(self, wanted: dict[int, Piece], banks: list[Iterator[Any]]) -> None:
        """Add to the cache, by segment; pieces of a bank come before those of the next."""
        counts = [piece.counts for piece in wanted.values()] if self.flat else None
        found = choose(*(piece.tokens for piece in wanted.values()), counts=counts)
        pieces = [(*item, chosen) for item, chosen in zip(wanted.items(), found, strict=True) if chosen is not None]
        used = sorted({piece.bank for _, piece, _ in pieces})
        indices = [
            torch.cat([chosen.take(piece.column) for _, piece, chosen in pieces if piece.bank == bank], dim=1)
            for bank in used
        ]
        token = [_hidden(chosen.take(self.numbers), chosen) for *_, chosen in pieces]
        widths = {segment: part.shape[1] for (segment, *_), part in zip(pieces, token, strict=True)}
        slots = _columns_of([banks[bank] for bank in used], indices)
        self.keep(slots, torch.cat(token, 1), widths, [chosen for *_, chosen in pieces])

    def keep(
        self, slots: Iterable[KeyValue], token: Tensor, widths: dict[int, int], chosen: Sequence[Chosen | Flat]
    ) -> None:
        """Add every layer's slots to the cache, ordered by segment, and the numbers of their tokens."""
        gaps = self.attention_mask is not None or any(map(_hides, chosen))
        packing = self.past.packing() if self.past is not None and self.past.unpacked >= PACK_EVERY else None
        layers: list[Any] = self.cache.layers  # type: ignore[union-attr]
        sizes, numbers = [widths.get(segment, 0) for segment in range(len(layers[0].segments))], None
        for held, pair in zip(layers, slots, strict=True):
            if packing is not None:
                held.pack(packing)
            numbers = held.append(self.numbers.shape[1], pair, token, sizes, gaps, numbers)
