"""The layer stack for methods in which a token runs through the layers as often as it needs, step by step.

Step k runs some of the new tokens, gathered. Token t in step k is the slot (t, k), with keys and values of its own at
the token's position. Which slots it sees follows one of two rules:

    append     slot (t, k) sees (t', k')  iff  t' ≤ t and k' ≤ k                        (2-D causal)
    replace    slot (t, k) sees (t', k')  iff  t' ≤ t and k' is the last step ≤ k that t' ran   (frozen keys)

`StepStack` is the layer stack, `StepLayer` (cache.py) the cache layer. Only slots that ran are computed and kept. A
step (tokens.py) gathers its tokens within their rows (`Chosen`), padded to the longest; or it concatenates those of all
rows into one row (`Flat`), in which the kernel skips keys of other rows, so that a step costs what its tokens cost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Stack
from fathom.models.slots import FLEX_FROM, restarts_are_documents
from fathom.models.steps.cache import joined
from fathom.models.steps.graphs import Foresight, StepGraphs
from fathom.models.steps.tokens import Chosen, Flat, ahead, choose, going_on, put, rounded
from fathom.models.token_facts import TokenFacts
from fathom.ops import range_attention
from fathom.ops.biased_attention import FlexBias
from fathom.ops.gather_slots import KeyValue, slots_of
from fathom.ops.token_blocks import (
    BLOCK,
    NOWHERE,
    TokenRanges,
    places_seen,
    ranges_of_some,
    readers_of,
    sees,
    token_block_mask,
)

LEAST = 2 * BLOCK  # tokens laid end to end, dead ones included: compiled, a single block would be another graph
PACK_EVERY = 64  # columns after which a cache of several rows closes the gaps that stopped rows left


def append(key: Tensor, value: Tensor, earlier: KeyValue | None) -> tuple[Tensor, Tensor, KeyValue]:
    """Earlier slots followed by the new ones: what attention reads under `append`, and what is kept for later steps."""
    if earlier is not None:
        key, value = torch.cat((earlier[0], key), dim=2), torch.cat((earlier[1], value), dim=2)
    return key, value, (key, value)


class Apart(torch.autograd.Function):
    """Earlier slots followed by new ones, with gradients in separate tensors. As views of one tensor, gradients of
    earlier slots would be copied on their way to the graph that made these. Reverse mode only.
    """

    @staticmethod
    def forward(ctx: Any, earlier: Tensor, new: Tensor) -> Tensor:
        ctx.earlier = earlier.shape[2]
        return torch.cat((earlier, new), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[override]
        return gradient[:, :, : ctx.earlier].contiguous(), gradient[:, :, ctx.earlier :].contiguous()


def append_apart(key: Tensor, value: Tensor, earlier: KeyValue) -> tuple[Tensor, Tensor, KeyValue]:
    """`append` for steps whose layers are CUDA graphs."""
    key, value = Apart.apply(earlier[0], key), Apart.apply(earlier[1], value)
    return key, value, (key, value)


def replace(
    key: Tensor, value: Tensor, earlier: tuple[KeyValue | None, KeyValue | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, KeyValue]:
    """One slot a token, read and kept under `replace`: K ← where(ran, K_new, K), V likewise."""
    past, last, index, live = earlier
    if last is not None:
        key, value = put(last[0], key, index, live, 2), put(last[1], value, index, live, 2)
    return *append(key, value, past)[:2], (key, value)


def mask_of(visible: Bool[Tensor, "B n keys"], config: FathomConfig, dtype: torch.dtype) -> Tensor:
    """The mask [B, 1, n, keys] for the backend: bool for SDPA, for others the number added to a score."""
    visible = visible[:, None]
    if "sdpa" in config._attn_implementation:  # type: ignore[operator]
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def lay_by_head(key: Tensor, value: Tensor, earlier: None) -> tuple[Tensor, Tensor, KeyValue]:
    """Keys and values of the first step of all rows as one row, which `append` reads: [B, G, T, D] → [1, G, B·T, D]."""
    # contiguous as what later steps leave: compiled, another layout would be another graph
    keys, values = (x.transpose(0, 1).flatten(1, 2)[None].contiguous() for x in (key, value))
    return key, value, (keys, values)


def by_token(x: Float[Tensor, "B G T D"]) -> Float[Tensor, "1 B*T G*D"]:
    """All rows' tokens as one row in which each token's numbers are contiguous, as after a projection."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)[None].contiguous()


def by_head(x: Float[Tensor, "1 N G*D"], width: int) -> Float[Tensor, "1 G N D"]:
    """The result of `by_token` in the shape that attention reads."""
    return x.unflatten(2, (-1, width)).transpose(1, 2)


def lay_by_token(key: Tensor, value: Tensor, earlier: None) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Keys and values of the first step, `by_token`, which `replace_flat` reads and writes.

    They are copies, because hooks or other layers may hold the tensors of the projections; compilers drop needless
    copies.
    """
    return key, value, (by_token(key).clone(), by_token(value).clone())


def replace_flat(
    key: Tensor, value: Tensor, earlier: tuple[Tensor, Tensor, Int[Tensor, " N"], Bool[Tensor, " N"]]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """`replace` for all rows' tokens as one row, `by_token`; in place where no gradient needs the old numbers. The
    slots that are replaced are returned to be kept, too.
    """
    last_key, last_value, index, live = earlier

    def exchanged(last: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        replaced = last.index_select(1, index)
        copied = last.index_copy if torch.is_grad_enabled() else last.index_copy_
        return copied(1, index, torch.where(live[:, None], by_token(new), replaced)), replaced

    (keys, last_keys), (values, last_values) = exchanged(last_key, key), exchanged(last_value, value)
    width = key.shape[3]
    return by_head(keys, width), by_head(values, width), (keys, values, last_keys, last_values)


def _hides(chosen: Chosen | Flat) -> bool:
    """Whether some entries are no chosen tokens but fill up the shape ("dead")."""
    return chosen.live is not None


@torch.compiler.disable
def _hidden(order: Int[Tensor, "R n"], chosen: Chosen | Flat) -> Int[Tensor, "R n"]:
    """The order of the chosen tokens, with `NOWHERE` for dead entries."""
    return order if chosen.live is None else torch.where(chosen.live, order, NOWHERE)


@torch.compiler.disable
def of_any_length(*given: Any) -> None:
    """Mark the token dimension of these tensors as dynamic for torch.compile, so that one graph serves all steps."""
    for x in given:
        if isinstance(x, (list, tuple)):
            of_any_length(*x)
        elif isinstance(x, TokenRanges):
            of_any_length(x.start, x.stop, x.readers, x.blocks)
        elif isinstance(x, Tensor):
            torch._dynamo.maybe_mark_dynamic(x, x.ndim - 1 if not x.is_floating_point() else x.ndim - 2)


@dataclasses.dataclass
class StepStack(Stack):
    """The layer stack of a method that runs step by step: it has all new tokens, and each step runs some of them.

    `position_ids` are of the new tokens; `attention_mask` covers cached and new tokens, [B, tokens] or None.

    What `store_appended` and `store_replaced` get may reach the cache only in `settled`, which a method calls last.

    Attributes:
        most: the most steps of a token.
        flat: steps after the first concatenate the tokens of all rows; False for a method that gathers none.
        ranged: with `flat` and no padding, the slots that a slot sees are ranges, for which there are own kernels.
        bounds: with `ranged`, where the range that every token sees among each step's slots begins and ends.
        real: mask of the tokens that are not padding.
        numbers: index of each new token in its row, after the cached ones; `NOWHERE` for padding.
        order: `numbers`, or with `flat` the index in the concatenated row; masks compare these.
        first: the first token in that order that each token may see; None: no limit.
        computed: number of slots that ran, dead entries included.
    """

    most: int = 1
    packed: bool = False  # the caller gave position ids: where they restart, a document starts
    ran: list[Chosen | Flat] = dataclasses.field(default_factory=list)  # by step
    # By step and layer, what `read` left; of `append` the last step's alone, which has all before it.
    slots: list[list[Any]] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)  # by step: how many slots are its own,
    own: list[Tensor] = dataclasses.field(default_factory=list)  # and, of `append`, their order, unless ranges say it
    appends: bool = False
    tables: tuple[Tensor, ...] | None = None  # of all new tokens' positions, made in the first step
    computed: int = 0
    graphs: StepGraphs | None = None
    foresight: Foresight | None = None
    casts: dict[int, list[Any]] = dataclasses.field(default_factory=dict)  # of its layers' weights, by group
    went_on: list[Any] = dataclasses.field(default_factory=list)  # after each step, how many of every row
    places: list[int] = dataclasses.field(default_factory=list)  # and for how many there was place
    arrival: torch.cuda.Event | None = None  # of those numbers
    unfinished: Callable[[], None] | None = None  # fills the cache, when it is known who ran
    again: bool = False  # more tokens went on than was foreseen: all steps once more, waited for
    idle: int = 0  # last steps that no token runs here, only those of other processes (`needed`)

    def __post_init__(self) -> None:
        held: Any = None if self.cache is None else self.cache.layers[0]
        self.past: Any = held if held is not None and held.tokens else None
        self.seen = held.tokens if held is not None else 0
        mask = self.attention_mask
        self.packed = self.packed and mask is None
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
        """Whether FlexAttention runs gathered steps of `queries` tokens a row, instead of a dense mask."""
        config = self.decoder.config
        backend: str = config._attn_implementation  # type: ignore[assignment]
        large = self.position_ids.is_cuda and queries >= FLEX_FROM and config.head_dim >= 16  # its least
        return (
            "flash" in backend
            or backend == "flex_attention"
            or (large and backend != "eager" and not config.attention_dropout)
        )

    def flat_pays(self) -> bool:
        """Whether to concatenate rows: with a kernel that skips other rows' keys, not with a dense mask."""
        plain = not self.position_ids.is_meta and not self.decoder.config.score_channels
        return plain and self.kernel(self.position_ids.numel())

    def ranges_served(self) -> bool:
        """Whether `range_attention` has kernels for this model and device."""
        config, table = self.decoder.config, self.decoder.embed_tokens.weight
        heads = config.heads_seen // config.num_key_value_heads
        sdpa = "sdpa" in config._attn_implementation  # type: ignore[operator]
        return sdpa and range_attention.serves(table.device.type, config.head_dim, heads, table.dtype)

    @torch.compiler.disable
    def choose(self, chosen: Chosen | Flat, goes_on: Bool[Tensor, "R n"], every: bool = False) -> Chosen | Flat | None:
        """The chosen real tokens that go on; None if none does. Waits for the device once, unless all tokens go on
        (`every`) or there is a forecast of their number."""
        if self.flat:
            return self.choose_flat(chosen, goes_on, every)
        assert isinstance(chosen, Chosen)
        live = self.real if chosen.index is None and chosen.live is None else chosen.live
        picked = choose(goes_on if live is None else goes_on & live)
        if not self.needed(picked is not None):
            return None
        if picked is None:
            self.idle += 1
            one = torch.zeros(len(goes_on), 1, dtype=torch.long, device=goes_on.device)
            picked = Chosen(one, torch.zeros_like(one, dtype=torch.bool))
        if chosen.index is None:
            return dataclasses.replace(picked, before=picked.index)
        if picked.index is None:
            return Chosen(chosen.index, picked.live)
        return Chosen(chosen.index.gather(1, picked.index), picked.live, picked.index)

    def choose_flat(self, chosen: Chosen | Flat, goes_on: Bool[Tensor, "R n"], every: bool) -> Chosen | Flat | None:
        """The tokens that go on, then others that fill up the shape. Waits for their number only without a forecast."""
        (rows, length), index = self.real.shape, chosen.index if isinstance(chosen, Flat) else None
        live = self.real if index is None else chosen.live
        some, runs, by_row = self.fused(going_on, goes_on, index, live, rows, length)
        if self.ranged and self.appends:
            self.bound(runs)
        all_do = every and self.attention_mask is None
        count = None
        if self.foresight is not None and not all_do and not self.watched and not self.again:
            count = self.foresight.most(self.occasion, len(self.ran) - 1)
        if count is not None:
            self.went_on.append(self.sent(by_row))
        else:
            self.went_on.append([length] * rows if all_do else by_row.tolist())
            count = sum(self.went_on[-1])
        if not self.needed(count):
            self.places.append(0)
            return None
        known = isinstance(self.went_on[-1], list)
        if known:
            self.idle += count == 0
            if count == rows * length and not self.appends:  # all read what all have replaced: plain causal again
                self.places.append(count)
                return Chosen()
        unit = BLOCK if self.graphs is None else -(-rows * length // (128 * BLOCK)) * BLOCK
        size = max(LEAST, -(-count // unit) * unit)
        if not known:
            size = self.foresight.size(self.occasion, len(self.ran), size, size + 2 * unit)  # type: ignore[union-attr]
        size = min(len(some), size)
        self.places.append(size)
        index, place, live = self.fused(ahead, some, index, size)
        return Flat(index, place, None if known and size == count else live, by_row)

    def fused(self, function: Callable[..., Any], *given: Any) -> Any:
        """The function's result; compiled if the layers are, as its many small calls would take too long."""
        with torch.no_grad():  # of whole numbers; compiled, with gradients wanted it would be another graph
            return (function if self.graphs is None else self.graphs.fused(function))(*given)

    def bound(self, runs: Bool[Tensor, " n"]) -> None:
        """Set the range that every token sees among the next step's slots, before the number of slots is known, so that
        the device does not wait for it."""
        self.bounds[:, len(self.ran)] = places_seen(runs, self.bounds[0, 0], sum(self.sizes))

    def sent(self, numbers: Tensor) -> Tensor:
        """The numbers in CPU memory, copied without waiting; `arrival` says when they are there."""
        if not numbers.is_cuda:
            return numbers
        here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        self.arrival = torch.cuda.Event()
        self.arrival.record()
        return here

    @property
    def watched(self) -> bool:
        """Whether the caller wants hidden states or attention weights of every layer."""
        return self.hidden_states is not None or self.attentions is not None

    @torch.compiler.disable(recursive=False)
    def run_all(self, steps: Callable[..., Any], *given: Any) -> Any:
        """The result of a method's loop of steps. A loop returns None if it is not `settled`, and is then run again."""
        output = steps(self, *given)
        return steps(self, *given) if output is None else output

    @torch.compiler.disable
    def settled(self) -> bool:
        """Wait until it is known which tokens ran, then fill the cache. False if more tokens went on than forecast.

        The stack is then reset, and all steps must run again; this time each waits for its count.
        """
        waits = self.foresight is not None and self.flat
        if waits and self.arrival is not None:
            self.arrival.synchronize()
        self.went_on = [rows if isinstance(rows, list) else rows.tolist() for rows in self.went_on]
        counts = [sum(rows) for rows in self.went_on]
        if not waits or all(count <= size for count, size in zip(counts, self.places, strict=True)):
            if self.unfinished is not None:
                self.unfinished()
                self.unfinished = None
            if waits:
                self.foresight.note(self.occasion, counts)  # type: ignore[union-attr]
            return True
        assert self.foresight is not None
        self.foresight.repeated += 1
        self.again = True
        self.ran, self.slots, self.sizes, self.own, self.computed = [], [], [], [], 0
        self.places, self.went_on, self.arrival, self.unfinished = [], [], None, None
        random, device = self.random, self.real.device
        self.__post_init__()
        if random is not None:
            torch.cuda.set_rng_state(random, device) if device.type == "cuda" else torch.set_rng_state(random)
        return False

    @property
    def reached(self) -> int:
        """The most steps that a token ran."""
        return 1 + sum(map(any, self.went_on)) if self.flat else len(self.ran) - self.idle

    # Compiled, the layers are a graph; all that is around them is not. They get the earlier slots joined, so that one
    # graph with dynamic sizes serves all steps.
    @torch.compiler.disable(recursive=False)
    def append(self, inputs: Float[Tensor, "R n d"], chosen: Chosen | Flat) -> Float[Tensor, "R n d"]:
        """F(inputs), the next step of the chosen tokens, which see all earlier slots and the new ones."""
        step, layers = len(self.ran), len(self.decoder.layers)
        earlier: list[Any] = self.slots[-1] if self.slots else [None] * layers
        if self.past is not None:
            earlier = [
                joined([*self.past_slots(layer, step), *([self.appended(layer)] if self.slots else [])])
                for layer in range(layers)
            ]
        self.appends, query = True, self.order
        self.sizes.append(self.order.numel() if self.flat and not step else inputs.shape[1])
        if not self.ranged:
            query = chosen.take(self.order)
            self.own.append(_hidden(query, chosen).view(-1 if self.flat else len(query), self.sizes[-1]))
        read: Callable[..., Any] = lay_by_head if self.flat and not step else append
        if self.graphs is not None and step and not self.watched and torch.is_grad_enabled():
            read = append_apart
        hidden_states = self.run(inputs, chosen, query, self.own, read, earlier)
        del self.slots[:-1]
        return hidden_states

    @torch.compiler.disable(recursive=False)
    def replace(self, inputs: Float[Tensor, "R n d"], chosen: Chosen | Flat) -> Float[Tensor, "R n d"]:
        """F(inputs), the next step of the chosen tokens, whose new slots replace their earlier ones.

        With `Chosen` without `index`, tokens that are not live run too, but keep their earlier slot.
        """
        layers, order = range(len(self.decoder.layers)), self.order
        earlier: list[Any]
        last: list[Any] = self.slots[-1] if self.slots else [None] * len(layers)
        read: Any = lay_by_token
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
            read, earlier = replace, [(joined(self.past_slots(n, step)), last[n], index, live) for n in layers]
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
        """One forward of the layers over the chosen tokens. query, keys: the order of these tokens and of all keys."""
        self.ran.append(chosen)
        self.computed += inputs.shape[0] * inputs.shape[1]
        if self.tables is None:
            self.tables = self.decoder.positions.tables(inputs, self.position_ids) or ()
        plain = chosen.index is None and self.past is None and (len(self.ran) == 1 or not self.appends)
        # read as positions by backends that take repeated or jumping ones for packed documents
        apart = plain and restarts_are_documents(self)
        slot_ids = None if apart else torch.arange(inputs.shape[1], device=inputs.device)[None]
        stack = Stack(
            self.decoder,
            chosen.take(self.position_ids) if slot_ids is None or not self.tables else slot_ids,
            tuple(map(chosen.take, self.tables)) or None,
            self.plain_mask(inputs) if plain else self.mask(inputs, chosen, query, keys),
            None,
            self.layer_kwargs,
            self.hidden_states,
            self.attentions,
            slot_ids=slot_ids,
            read=read,
            earlier=earlier,
            auxiliary=self.auxiliary,
            tokens=self.facts_of(chosen),
        )
        if self.idle:  # nobody here reads what its layers say
            stack.hidden_states, stack.attentions, stack.auxiliary = None, None, {}
        if self.graphs is not None and self.flat and not self.watched:
            inputs = self.graphed(stack, inputs)
        if isinstance(chosen, Flat):
            of_any_length(inputs, stack.position_embeddings, stack.slot_ids, stack.attention_mask, earlier)
        hidden_states = stack(inputs)
        self.slots.append(stack.next_kv)
        return hidden_states

    @torch.compiler.disable
    def facts_of(self, chosen: Chosen | Flat) -> TokenFacts | None:
        """Facts about the chosen tokens for feed-forward networks."""
        if self.tokens is None:
            return None
        real = chosen.take(self.real)
        real = real if chosen.live is None else real & chosen.live
        return TokenFacts(real, None if self.tokens.domains is None else chosen.take(self.tokens.domains))

    @torch.compiler.disable
    def graphed(self, stack: Stack, inputs: Tensor) -> Tensor:
        """The inputs of this step's layers, at the addresses that their graphs read."""
        assert self.graphs is not None
        step, place = len(self.ran), self.graphs.place
        stack.groups = self.graphs.of_step(step - 1, self.most, self.casts)
        if stack.position_embeddings is not None:
            tables = enumerate(stack.position_embeddings)
            stack.position_embeddings = tuple(place(table, step, f"positions {i}") for i, table in tables)
        if isinstance(ranges := stack.attention_mask, TokenRanges):
            given = vars(ranges).items()
            placed: dict[str, Any] = {name: x if x is None else place(x, step, name) for name, x in given}
            stack.attention_mask = TokenRanges(**placed)
        return place(inputs, step, "inputs")

    @torch.compiler.disable
    def past_slots(self, layer: int, step: int) -> list[KeyValue]:
        """The cached slots that this step sees."""
        if self.past is None:
            return []
        held: Any = self.cache.layers[layer]  # type: ignore[union-attr]
        return [(held.keys[:, :, part], held.values[:, :, part]) for part in held.visible(step)]

    @torch.compiler.disable
    def appended(self, layer: int) -> KeyValue:
        """The new slots of the steps so far, as `append` kept them, without the cached ones."""
        key, value = self.slots[-1][layer]
        past = key.shape[2] - sum(self.sizes)
        return key[:, :, past:], value[:, :, past:]

    @torch.compiler.disable
    def plain_mask(self, inputs: Tensor) -> Any:
        """The ordinary causal mask, for a step in which all tokens read one slot of each."""
        config, given = self.decoder.config, self.position_ids if restarts_are_documents(self) else None
        return hf_versions.visible_mask(config, inputs, self.attention_mask, None, given)

    @torch.compiler.disable
    def mask(self, inputs: Tensor, chosen: Chosen | Flat, query: Tensor, keys: list[Tensor]) -> Any:
        """The mask in the form that the backend reads."""
        if self.ranged and isinstance(chosen, Flat):
            config = self.decoder.config
            heads = config.heads_seen // config.num_key_value_heads
            # of all tokens there are so many blocks that the order does not matter
            listed = heads if len(chosen.index) < self.real.numel() else None
            slots, bounds = sum(self.sizes), self.bounds
            if not self.appends:  # one slot of each token
                slots, bounds = self.order.numel(), bounds[:, :1]
            apart = not restarts_are_documents(self)
            start, stop, blocks = self.fused(ranges_of_some, bounds, chosen.index, chosen.by_row, listed, apart)
            return TokenRanges(start, stop, readers_of(start, stop, slots) if torch.is_grad_enabled() else None, blocks)
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
        if (
            isinstance(chosen, Flat) and chosen.live is not None and not self.idle
        ):  # others see what the last does, in its blocks
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
        """Add the slots to the cache, some of them when `settled`. Segment k holds the slots of step k."""
        layers, steps = range(len(self.decoder.layers)), len(self.ran)
        if not self.flat:
            gaps = any(map(_hides, self.ran))
            self.keep(map(self.appended, layers), torch.cat(self.own, 1), dict(enumerate(self.sizes)), gaps)
            return
        ran = passes > torch.arange(steps, device=passes.device)[:, None, None]
        starts = self.starts_of(self.sizes)
        columns = ran.flatten(1).cumsum(1) + (starts[:, None] - 1)
        self.store(range(steps), ran, columns.view(ran.shape), lambda: self.ran_by_row()[:-1], [self.slots[-1]])

    @torch.compiler.disable
    def store_replaced(self, passes: Int[Tensor, "B T"]) -> None:
        """Add the slots to the cache, most of them when `settled`. Segment k holds the last slots of tokens that ran k
        + 1 steps; segment K + 1 + k holds the other slots of step k.
        """
        steps, most = len(self.ran), len(self.cache.layers[0].segments) // 2 + 1  # type: ignore[union-attr]
        layers = range(len(self.decoder.layers))
        if passes.shape[1] == 1 and not self.flat and not any(map(_hides, self.ran)):  # all rows ran all: no waiting
            kept = {steps - 1: steps - 1} | {most + step: step for step in range(steps - 1)}
            pairs = (joined([self.slots[step][n] for step in kept.values()]) for n in layers)
            self.keep(pairs, self.numbers.expand(-1, len(kept)), dict.fromkeys(kept, 1), False)  # type: ignore[arg-type]
            return
        step = torch.arange(steps, device=passes.device)[:, None, None]
        tokens = torch.cat((passes == step + 1, passes > step[:-1] + 1))
        numbers = torch.arange(passes.numel() if self.flat else passes.shape[1], device=passes.device)

        def by_row() -> list[list[int]]:
            ran = self.ran_by_row()
            last = [[now - later for now, later in zip(*both, strict=True)] for both in itertools.pairwise(ran)]
            return last + ran[1:-1]

        if self.flat:
            width = self.decoder.config.head_dim
            left = [[pair[:2] for pair in self.slots[-1]]]
            for before, now in itertools.pairwise(self.slots):  # what made way for a step, or all that was before
                left.append([new[2:] or old[:2] for old, new in zip(before, now, strict=True)])
            banks = [[(by_head(key, width), by_head(value, width)) for key, value in bank] for bank in left]
            starts = self.starts_of([bank[0][0].shape[2] for bank in banks])[1:]
            others = tokens[steps:].flatten(1).cumsum(1) + (starts[:, None] - 1)
            columns = torch.cat((numbers.expand(steps, -1), others)).view(tokens.shape)
        else:  # every step's slots have a place for every token
            banks = [[left[layer][-2:] for layer in layers] for left in self.slots]
            starts = self.starts_of(self.sizes)
            columns = (torch.cat((starts, starts[:-1]))[:, None, None] + numbers).expand_as(tokens)
        segments = [*range(steps), *range(most, most + steps - 1)]
        self.store(segments, tokens, columns, by_row if self.flat else None, banks)

    def starts_of(self, sizes: list[int]) -> Int[Tensor, " parts"]:
        """The start of each of several consecutive parts with these sizes, without waiting for the device."""
        starts, device = [0, *itertools.accumulate(sizes[:-1])], self.position_ids.device
        return torch.tensor(starts, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    def ran_by_row(self) -> list[list[int]]:
        """Tokens of each row that ran each concatenated step (the first counts padding), and zeros at the end."""
        rows, length = self.real.shape
        return [[length] * rows, *self.went_on[: len(self.ran) - 1], [0] * rows]

    def store(
        self,
        segments: Iterable[int],
        tokens: Bool[Tensor, "S B T"],
        columns: Int[Tensor, "S B T"],
        by_row: Callable[[], list[list[int]]] | None,
        banks: list[list[KeyValue]],
    ) -> None:
        """Add slots of these segments to the cache. All work that does not depend on which tokens ran is done at once,
        while the device is still busy with the last steps.

        Args:
            tokens: for each segment, the tokens of its slots.
            columns: for each segment, the columns of its slots in the concatenated banks.
            by_row: function that gives, once known, the number of slots of every row by segment; None: ask the device.
            banks: keys and values of each bank, by layer.
        """
        slots, length = slots_of(banks), tokens.shape[2]
        for held, pair in zip(self.cache.layers, banks[0], strict=True):  # type: ignore[union-attr]
            held.expect(*pair)  # type: ignore[attr-defined]
        whose = self.numbers.expand_as(tokens)
        tokens, columns, whose, until = (
            x.transpose(0, 1).contiguous() for x in (tokens, columns, whose, tokens.cumsum(2) - 1)
        )

        def finish() -> None:
            if by_row is not None:
                counts = by_row()
            else:
                counts = [[length]] * tokens.shape[1] if tokens.is_meta else tokens.sum(2).T.tolist()
            widths = [rounded(max(rows), length) for rows in counts]
            starts, total = self.starts_of(widths), sum(widths)
            places = torch.where(tokens, until + starts[:, None], total).flatten(1)

            def laid(x: Tensor, otherwise: int) -> Int[Tensor, "B columns"]:
                every = x.new_full((len(x), total + 1), otherwise).scatter_(1, places, x.flatten(1))
                return every[:, :total].contiguous()  # without what has no place

            gaps = any(min(rows) < width for rows, width in zip(counts, widths, strict=True))
            self.keep(slots(laid(columns, 0)), laid(whose, NOWHERE), dict(zip(segments, widths, strict=True)), gaps)

        self.unfinished = finish

    def keep(self, slots: Iterable[KeyValue], token: Tensor, widths: dict[int, int], gaps: bool) -> None:
        """Add every layer's slots to the cache, ordered by segment, and the numbers of their tokens."""
        gaps |= self.attention_mask is not None
        packing = self.past.packing() if self.past is not None and self.past.unpacked >= PACK_EVERY else None
        layers: list[Any] = self.cache.layers  # type: ignore[union-attr]
        sizes, numbers = [widths.get(segment, 0) for segment in range(len(layers[0].segments))], None
        for held, pair in zip(layers, slots, strict=True):
            if packing is not None:
                held.pack(packing)
            numbers = held.append(self.numbers.shape[1], pair, token, sizes, gaps, numbers)
