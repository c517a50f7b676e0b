"""Token-budgeted caches: every stored slot is one token's key and value, and a full cache drops slots.

    append m tokens → attend (each query sees all older slots) → add the attention received → drop down to the budget

Eviction follows attention, so the first logit that can differ from the full cache is at 0-based position budget + 1.
A method says which slots stay (`keep`), and how many queries of a call it wants observed.
"""

from __future__ import annotations

import contextvars
import dataclasses
from abc import abstractmethod

import torch
from torch import Tensor

from fathom.caches.base import CacheMethod, CacheShape, LayerContext, State, concat, storage_bytes
from fathom.decoding.prompt import tokens_at_once
from fathom.ops.cached_attention import causal_attention, observed_attention
from fathom.ops.slot_decode import slot_decode
from fathom.ops.take_slots import take_slots

# States made while this is set remember the true position of every slot (for pictures; not counted as cache bytes).
tracking: contextvars.ContextVar[bool] = contextvars.ContextVar("tracking", default=False)

LONG, PART = 8192, 2048  # tokens: prompts of more are read in parts of so many
COUNT_BYTES = 4  # of the queries that saw a slot (int32)


@dataclasses.dataclass(frozen=True)
class TokenBudget(CacheMethod):
    """Options that all token-budgeted methods share.

    budget: tokens stored per key/value head.
    n_sink: first tokens, which are never dropped.
    n_recent: newest tokens that are never dropped. None takes what the budget implies: sinks and recent tokens are half
        of it (4 + 508 of 1024), unless a method says otherwise.
    positions: "slot" re-assigns RoPE positions 0 … n−1 to the stored tokens (keys are stored unrotated), "original"
        keeps the true positions.
    granularity: "kv_head" (each head keeps its own tokens) or "layer" (one set for all heads of a layer).
    group_reduce: how the query heads of a key head are pooled: "mean", "sum" or "max".
    prefill: a call with several tokens is processed whole ("once"), `chunk` tokens at a time ("chunked"), or token by
        token ("exact", the definition; slow).
    chunk: tokens processed at a time with prefill="chunked".
    """

    pre_rope_remedy = "use positions='original'"

    budget: int = 1024
    n_sink: int = 4
    n_recent: int = None  # type: ignore[assignment]  # None only until __post_init__
    positions: str = "slot"
    granularity: str = "kv_head"
    group_reduce: str = "mean"
    prefill: str = "once"
    chunk: int = 128

    def __post_init__(self) -> None:
        self.check_at_least("budget", 1)
        self.check_at_least("n_sink", 0)
        if self.n_recent is None:
            object.__setattr__(self, "n_recent", self.recent_of_budget())
        self.check_at_least("n_recent", 0)
        self.check_at_least("chunk", 1)
        self.check_choice("positions", ("slot", "original"))
        self.check_choice("granularity", ("kv_head", "layer"))
        self.check_choice("group_reduce", ("mean", "sum", "max"))
        self.check_choice("prefill", self.prefill_modes())
        if self.budget < self.n_sink + self.n_recent:
            raise self.refuse(
                "budget",
                self.budget,
                f"use at least n_sink + n_recent = {self.n_sink} + {self.n_recent}, or protect fewer",
            )

    def recent_of_budget(self) -> int:
        """The number of recent tokens where `n_recent` is None."""
        return max(0, self.budget // 2 - self.n_sink)

    def prefill_modes(self) -> tuple[str, ...]:
        return ("once", "chunked", "exact")

    def call_length(self) -> int | None:
        """Tokens of a call that are processed at a time; None for all."""
        return {"chunked": self.chunk, "exact": 1}.get(self.prefill)

    @property
    def sequential(self) -> bool:
        return self.call_length() == 1

    def prompt_part(self, rows: int, length: int, padded: bool) -> int | None:
        """Tokens of a prompt that one call reads: `PART` of a prompt longer than `LONG`. The cache is then compressed
        after each part, which is nearer to the definition (after each token) than one call for the whole prompt.

        The part does not depend on the number of rows. A padded batch is read whole: its rows would be cut at other
        places than alone, and a row must equal the row alone. Where a call is processed `chunk` tokens at a time,
        parts of whole chunks change nothing.
        """
        step = self.call_length()
        if step == 1:
            return tokens_at_once(rows, length)
        if padded or length <= LONG:
            return None
        return PART if step is None else max(1, PART // step) * step

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        slots = min(prompt + generated, self.budget)
        return slots * (shape.token_bytes() + self.slot_statistics(shape) * shape.batch * shape.kv_heads)

    def slot_statistics(self, shape: CacheShape) -> int:
        """Bytes of statistics per slot and head."""
        return 0


@dataclasses.dataclass(frozen=True)
class Eviction:
    """A rule by which one token leaves for one that comes: the lowest score among `candidates` slots from `first` on
    (ties: the oldest).

    score: "latest" (the new query's weights r), "sum" (S + r) or "average" ((S + r) / C).
    pointer [B], stride, cycle: the candidates begin at first + pointer, and pointer ← (pointer + stride) mod cycle.
    merge: the value of the slot that leaves goes into its right neighbour, by their scores.
    """

    first: int
    candidates: int
    score: str = "latest"
    merge: bool = False
    pointer: Tensor | None = None
    stride: int = 0
    cycle: int = 1


class SlotState(State):
    """key, value [B,G,n,D]; where attention is observed: received [B,G,n] (fp32 or wider), queries [B,G,n] (int32)."""

    method: TokenBudget

    def __init__(self, method: TokenBudget, context: LayerContext):
        super().__init__()
        self.method, self.context = method, context
        self.budget = method.budget
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.received: Tensor | None = None
        self.queries: Tensor | None = None
        self.position: Tensor | None = None  # true positions [B,G,n], only under `tracking`
        self.track_positions = tracking.get()
        self.grown: dict[str, Tensor] = {}  # statistics of this step, before slots leave

    @property
    def stored(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def kept_positions(self) -> Tensor | None:
        return self.position

    def nbytes(self) -> int:
        return storage_bytes(tensor for name, tensor in self.tensors() if name != "position")

    # -- what a method defines

    def observed(self, length: int) -> int:
        """Number of a call's last queries whose attention is observed; 0 for none."""
        return 0

    def wanted(self, length: int, slots: int) -> int:
        """Number of slots to keep after a call of `length` tokens, when `slots` are held (`seen` does not count it
        yet).
        """
        return min(slots, self.budget)

    @abstractmethod
    def keep(self, value: Tensor, excess: int, length: int) -> tuple[Tensor, Tensor]:
        """Which slots stay, in order, [B or 1, G or 1, n − excess], and the values (changed by methods that merge)."""

    def eviction(self) -> Eviction | None:
        """The choice for one token in a full cache as an `Eviction`, which one kernel runs on a GPU; None: it is not so
        simple.
        """
        return None

    # -- one pass, top to bottom

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        self.touched = False
        step = self.method.call_length() or key.shape[2]
        parts = zip(query.split(step, 2), key.split(step, 2), value.split(step, 2))
        outputs = [self.attend_part(q, k, v, scaling, dropout) for q, k, v in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def attend_part(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        length = key.shape[2]
        compiling = torch.compiler.is_compiling()  # a trace cannot ask, and keeps to one mode
        if self.key is not None and not compiling and self.key.is_inference() and not torch.is_inference_mode_enabled():
            for name, tensor in list(self.tensors()):  # written in place below, which PyTorch refuses for these
                setattr(self, name, tensor.clone())
        if length == 1 and self.stored == self.budget and not dropout and not self.track_positions:
            eviction = self.eviction()
            if eviction is not None:
                output = self.decode(query, key, value, scaling, eviction)
                if output is not None:
                    return output
        keys, values = concat(self.key, key), concat(self.value, value)
        slots = keys.shape[2]
        rope = self.context.rope
        turned_query = query if rope is None else rope(query, slots - length)
        turned_keys = keys if rope is None else rope(keys)
        last = self.observed(length)
        if last:
            reduce = self.method.group_reduce
            output, received = observed_attention(turned_query, turned_keys, values, scaling, last, reduce, dropout)
            self.observe(received, min(last, length), length)
        else:
            output = causal_attention(turned_query, turned_keys, values, scaling, dropout)
        self.note_positions(key)
        self.compress(keys, values, length)
        return output

    def decode(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, eviction: Eviction) -> Tensor | None:
        """The output of one token in a full cache, by three launches that copy nothing; None: not possible here."""
        assert self.key is not None and self.value is not None
        rope, held_key, held_value = self.context.rope, self.key.contiguous(), self.value.contiguous()
        self.touched = True
        output = slot_decode(
            query,
            key,
            value,
            held_key,
            held_value,
            None if rope is None else rope.table(self.stored + 1, query),
            scaling,
            self.received,
            self.queries,
            eviction.pointer,
            eviction.first,
            eviction.candidates,
            eviction.stride,
            eviction.cycle,
            reduce=self.method.group_reduce if self.observed(1) else "none",
            accumulate=eviction.score != "latest",
            average=eviction.score == "average",
            by_layer=self.method.granularity == "layer",
            merge=eviction.merge,
        )
        self.touched = output is not None
        if output is not None:
            self.key, self.value = held_key, held_value
            self.seen += 1
        return output

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.touched = False
        keys, values = concat(self.key, key), concat(self.value, value)
        self.note_positions(key)
        self.compress(keys, values, key.shape[2])
        return keys, values

    def observe(self, received: Tensor, last: int, length: int) -> None:
        """received ← [received, 0] + r, made in r;  queries ← [queries, 0] + how many observed queries saw the slot."""
        slots = received.shape[2]
        seen_by = torch.arange(slots, 0, -1, dtype=torch.int32, device=received.device).clamp(max=last)
        queries = seen_by.expand(received.shape).clone()
        if self.received is not None and self.queries is not None:
            received[..., : slots - length].add_(self.received)
            queries[..., : slots - length].add_(self.queries)
        self.grown = {"received": received, "queries": queries}

    def compress(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Drop slots until `wanted` remain, and store."""
        excess = keys.shape[2] - self.wanted(length, keys.shape[2])
        index = None
        if excess > 0:
            index, values = self.keep(values, excess, length)
        self.touched = True
        self.seen += length
        new = {"key": keys, "value": values, **self.grown}
        if index is not None:  # a full cache is overwritten
            places = [getattr(self, name) for name in new]
            new = dict(zip(new, take_slots([*new.values()], index, places), strict=True))
        for name, value in new.items():  # PyTorch 2.11 traces no update of a module's dict
            setattr(self, name, value)
        self.grown = {}

    def note_positions(self, key: Tensor) -> None:
        if self.track_positions:
            new = torch.arange(self.seen, self.seen + key.shape[2], device=key.device).expand(*key.shape[:2], -1)
            self.grown["position"] = concat(self.position, new)


def without_one(drop: Tensor, slots: int) -> Tensor:
    """Indices 0 … slots−1 without slot drop[b,g]: [B,G,slots − 1]."""
    index = torch.arange(slots - 1, device=drop.device)
    return index + (index >= drop.unsqueeze(-1))


def keep_highest(score: Tensor, excess: int, n_sink: int, n_recent: int) -> Tensor:
    """Slots that stay, in order, when the `excess` lowest scores among slots n_sink … n − n_recent − 1 leave.

    Ties drop the oldest. score [B,G,n] → [B,G,n − excess].
    """
    slots = score.shape[2]
    open_to_loss = score[..., n_sink : slots - n_recent]
    if excess == 1:
        return without_one(open_to_loss.argmin(-1) + n_sink, slots)
    stay = open_to_loss.argsort(dim=-1, stable=True)[..., excess:].sort(dim=-1).values
    return with_protected(stay, slots, n_sink, n_recent)


def with_protected(middle: Tensor, slots: int, n_sink: int, n_recent: int) -> Tensor:
    """Slots 0 … n_sink − 1, then `middle` [B,G,·] counted from n_sink, then the newest n_recent of `slots`."""
    index = torch.arange(slots, device=middle.device).expand(*middle.shape[:2], -1)
    return torch.cat((index[..., :n_sink], middle + n_sink, index[..., slots - n_recent :]), dim=-1)
