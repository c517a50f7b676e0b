"""The seam of the wing: a *method* (frozen dataclass) makes one *state* for every layer; a state stores and attends.

    CompressedCache ── one CompressedLayer per decoder layer ── one State per group of equally padded rows
       (transformers' Cache)      (transformers' CacheLayerMixin)        (what a method's file defines)

A state never sees padding: rows of a left-padded batch are grouped by their number of pads, pads are cut off, and every
group is a cache of its own. A padded row therefore equals the row alone, for every method.

Shapes: B rows, H query heads, G key/value heads, m new tokens, n stored slots, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fathom.caches import versions
from fathom.caches.budgets import NotReachable, largest_budget
from fathom.caches.rope import SlotRope
from fathom.decoding.fixed import Slots
from fathom.decoding.growing import with_room
from fathom.decoding.prompt import tokens_at_once
from fathom.ops.autocast import product_dtype, without_autocast
from fathom.ops.filled_attention import filled_attention
from fathom.ops.kernels import missing


def portion(ratio: float | Fraction, count: int) -> int:
    """⌊ratio · count⌋ with `ratio` read as the decimal that it prints: 0.7 of 90 is 63, in floating point 62."""
    return math.floor(Fraction(str(ratio)) * count)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of one layer, which closed forms read: rows, heads, widths, bytes of a stored number."""

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int
    layers: int = 1

    def token_bytes(self) -> int:
        """Bytes of one uncompressed token in one layer (all rows, keys and values)."""
        return self.batch * self.kv_heads * (self.key_dim + self.value_dim) * self.element_bytes

    def full_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` uncompressed tokens in all layers."""
        return tokens * self.token_bytes() * self.layers

    def wide_bytes(self) -> int:
        """Bytes of a number that is kept in fp32 or wider: attention received, coefficients."""
        return max(4, self.element_bytes)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A file that a method reads for a model, made once on text by its `calibrate`.

    option: the method's option that names the file.
    made_by: the function that makes it, for messages.
    needed: whether the method does nothing without it.
    rows: number of texts that it is made on.
    long: whether these should be as long as the texts that will be read.
    variant: sizes with which the tests make one for a tiny model.
    """

    option: str
    made_by: str
    needed: bool
    rows: int = 2
    long: bool = False
    variant: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CacheMethod(ABC):
    """One way to keep fewer bytes. Subclasses are frozen dataclasses whose fields are the method's options."""

    name: ClassVar[str]
    paper: ClassVar[str]
    registry: ClassVar[str] = "cache"
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]  # the method in one line
    role: ClassVar[str] = "method"  # or "baseline", or "adapter": no method by itself, left out of comparisons
    variants: ClassVar[tuple[dict[str, Any], ...]]  # options of the shared suites: texts of 40 tokens are compressed
    identity: ClassVar[dict[str, Any]] = {"budget": 256}  # with room for 256 tokens: the stock model
    calibration: ClassVar[Calibration | None] = None
    fewest: ClassVar[int] = 8  # the least budget at which the method is itself
    pre_rope_remedy: ClassVar[str] = "use a method that keeps keys as they are, such as TOVA(positions='original')"

    @property
    def pre_rope(self) -> bool:
        """Whether the cache stores unrotated keys, so that the model's own rotation must be switched off."""
        return getattr(self, "positions", "original") == "slot"

    @property
    def plain(self) -> bool:
        """Whether a cache object works without `compress`, under the model's own attention."""
        return False

    @property
    def shortest_call(self) -> int:
        """Fewest tokens of a call that is taken for a prompt and compressed; shorter calls are decoding."""
        return 1

    @property
    def sequential(self) -> bool:
        """Whether outputs are the same however a text is cut into calls."""
        return False

    def prompt_part(self, rows: int, length: int, padded: bool) -> int | None:
        """Tokens of a prompt of `length` tokens that `generate()` reads at once; None: all of them.

        By default a prompt is read in parts where that changes nothing. A method whose definition looks at the whole
        prompt overrides this and reads it whole.
        """
        return tokens_at_once(rows, length) if self.sequential else None

    @abstractmethod
    def new_state(self, context: LayerContext) -> State: ...

    @abstractmethod
    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        """Closed form: bytes that one layer holds after one call with `prompt` tokens and `generated` single steps."""

    def prepare(self, model: PreTrainedModel, shape: CacheShape) -> Any:
        """What every state gets for this model (codebooks, channel sets). Refuses a model that does not fit."""
        return None

    def cache_bytes(self, shape: CacheShape, prompt: int, generated: int = 0) -> int:
        """Closed form over `shape.layers` layers."""
        return sum(self.layer_bytes(shape, prompt, generated, layer) for layer in range(shape.layers))

    def most_bytes(self, shape: CacheShape, tokens: int, chunk: int | None = None) -> int:
        """Closed form: the most bytes held between calls near the end of `tokens` tokens, read `chunk` at a time."""
        return self.cache_bytes(shape, min(tokens, getattr(self, "budget", tokens)))

    @classmethod
    def at_fraction(
        cls, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **options: Any
    ) -> CacheMethod | NotReachable:
        """The method, sized to keep the most within `fraction` of the full cache's bytes after `tokens` tokens.

        By default the option is `budget`, the largest that fits. A method with other sizes overrides this.

        chunk: tokens of a call; None for a text whose calls are all long enough to be compressed.
        options: the method's other options, such as its calibration file.

        Raises:
            ValueError: an option that the method needs is missing.
        """
        if "budget" not in (field.name for field in dataclasses.fields(cls)):
            raise NotImplementedError(f"{cls.__name__} has no option budget: give it an at_fraction of its own")
        make: Any = functools.partial(cls, **options)
        return largest_budget(lambda budget: make(budget=budget), cls.fewest, fraction, shape, tokens, chunk)

    @classmethod
    def calibrate(cls, model: nn.Module, input_ids: Tensor, **sizes: Any) -> Any:
        """The calibration, made on token ids [B,T] with these sizes; its `save(path)` writes the file."""
        raise ValueError(f"{cls.__name__} needs no calibration: use it as it is")

    @classmethod
    def calibration_sizes(cls, fraction: float, shape: CacheShape, tokens: int) -> dict[str, Any]:
        """Sizes for `calibrate` that suit a fraction of the full cache's bytes, made on texts of `tokens` tokens."""
        return {}

    def table_bytes(self, model: PreTrainedModel | None = None) -> int:
        """Bytes held once per model, beside any cache: in the model's dtype, or without a model in the file's."""
        return 0

    def to_dict(self) -> dict[str, Any]:
        """`{"name": …, option: value}`, ready for JSON; `fathom.caches.from_dict` reads it back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def refuse(self, argument: str, value: Any, remedy: str) -> ValueError:
        """Raise the ValueError of a bad option: it names argument, value and remedy."""
        return ValueError(f"{type(self).__name__}({argument}={value!r}): {remedy}")

    def check_choice(self, argument: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, argument)
        if value not in choices:
            raise self.refuse(argument, value, f"use one of {', '.join(choices)}")

    def check_triton(self, model: PreTrainedModel, remedy: str) -> None:
        """Refuse attention="triton" where its kernels cannot run."""
        lacks = missing(versions.execution_device(model))
        if lacks:
            raise self.refuse("attention", "triton", f"{lacks}. {remedy[0].upper()}{remedy[1:]}")
        if model.dtype == torch.float64:
            raise self.refuse("attention", "triton", f"the kernel computes in fp32, the model in float64; {remedy}")

    def check_at_least(self, argument: str, lowest: int) -> None:
        value = getattr(self, argument)
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise self.refuse(argument, value, f"use an integer ≥ {lowest}")

    def check_flag(self, argument: str) -> None:
        value = getattr(self, argument)
        if not isinstance(value, bool):  # on a command line "no" would be taken for true
            raise self.refuse(argument, value, "use True or False (on the command line true or false)")

    def check_path(self, argument: str) -> None:
        """A str or a Path; kept as str, which JSON can hold."""
        value = getattr(self, argument)
        if not isinstance(value, str | os.PathLike):
            raise self.refuse(argument, value, "name a file")
        object.__setattr__(self, argument, os.fspath(value))

    def check_ratio(self, argument: str, remedy: str) -> None:
        value = getattr(self, argument)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise self.refuse(argument, value, remedy)


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """The place of a state: index of its layer among compressed layers, rotation, and what `prepare` returned."""

    index: int
    layers: int
    rope: SlotRope | None
    prepared: Any = None


class State(ABC):
    """The stored tokens of one layer for rows of equal length. Every tensor attribute has the rows first.

    touched: whether the call under way has changed what is stored. True unless a state knows better.
    drops_weights: whether attention over what is held has each token's weight, which dropout in training wants.
    """

    touched = True
    drops_weights = True

    def __init__(self) -> None:
        self.seen = 0

    def check_room(self, length: int) -> None:  # noqa: B027  most have room for any call
        """Refuse a call of `length` tokens that does not fit, before anything is changed."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        """Append m tokens, attend, compress. query [B,H,m,D], key and value [B,G,m,D] → output [B,H,m,D].

        Keys come rotated at their true positions, or unrotated for a `pre_rope` method.
        """

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append and compress, for `plain` methods. Returns the keys and values that the m queries see, newest last."""
        raise NotImplementedError

    @property
    @abstractmethod
    def stored(self) -> int:
        """Number of slots held per head."""

    def kept_positions(self) -> Tensor | None:
        """True positions of the kept slots [B,G,n]; None where slots are no tokens or are not tracked."""
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, item in vars(self).items():
            if isinstance(item, Tensor):
                yield name, item

    def select(self, rows: Tensor) -> State:
        """A state that holds the given rows (beam search, repetition, batch selection)."""
        chosen = object.__new__(type(self))
        vars(chosen).update(vars(self))
        for name, tensor in self.tensors():
            setattr(chosen, name, tensor.index_select(0, rows.to(tensor.device)))
        return chosen

    def nbytes(self) -> int:
        """Bytes of the distinct storages held."""
        return storage_bytes(tensor for _, tensor in self.tensors())


class Appending(State):
    """A state whose one-token steps append keys and values as they come, so that they can be recorded.

    fixed: while they are, where a new token goes and which slots count, its own among them.
    most: slots that are ever held; None: as many as there are tokens.
    """

    key: Tensor | None
    value: Tensor | None
    fixed: Slots | None = None
    most: int | None = None

    @property
    def appends(self) -> bool:
        """Whether steps of this state can be recorded with its options."""
        return True

    @property
    def due(self) -> int | None:
        """Slots held at which `make_room` is called before the next recorded step; None: a step changes no others."""
        return self.most

    def fix(self, slots: Slots) -> None:
        """Move what is stored into buffers with the room of `slots`; the first `slots.length` are filled."""
        self.key, self.value = (with_room(held, slots.length, slots.room) for held in (self.key, self.value))
        self.fixed = slots

    def shared(self, slots: Slots) -> tuple[Tensor, ...]:
        """What every state of `slots` reads in a step, and one makes for all."""
        return ()

    def release(self, length: int) -> None:
        """Hold the first `length` slots alone, as before `fix`: copies, as views would keep the room."""
        assert self.key is not None and self.value is not None
        self.key, self.value = (held[:, :, :length].clone() for held in (self.key, self.value))
        self.fixed = None

    def make_room(self) -> int:
        """Compress what is `due` in the same buffers. Returns how many slots are held then."""
        raise NotImplementedError  # of states in which something is due

    def attend_fixed(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """`attend` for one token while steps are recorded."""
        assert self.key is not None and self.value is not None and self.fixed is not None
        self.key.index_copy_(2, self.fixed.place, key)
        self.value.index_copy_(2, self.fixed.place, value)
        self.seen += 1
        return filled_attention(query, self.key, self.value, self.fixed.visible, scaling)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors: views of one storage count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class RowGroups:
    """Rows of a batch, grouped by their number of leading pads. One object per cache, read by all its layers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[Tensor | None] = [None]  # None: all rows
        self.pads = [0]  # pads of this forward, by group
        self.before = [0]  # and those of the forwards before
        self.empty = [True]  # groups that hold no token yet
        self.parents = [0]
        self.version = 0

    def begin(self, attention_mask: Tensor | None, length: int, stays: bool = True, seen: int = 0) -> None:
        """Read the padding of `length` new tokens from the 2-D mask [B, ≥ length] (1 = token). Syncs once per prompt.

        A step of one token reads nothing, as that would be a sync a token.

        Raises:
            ValueError: a pad after a token of its row, unless nothing is kept (`stays=False`: then pads at the end are
                harmless, since no real token sees them); or a mask of all tokens whose zeros among the `seen` ones
                before are not the pads that the cache left out.
        """
        self.pads = [0] * len(self.rows)
        if attention_mask is None or (length == 1 and not any(self.empty)):
            return
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask of {attention_mask.ndim} dimensions: compressed caches take the 2-D padding mask "
                "[rows, tokens]; custom 4-D masks and packed sequences would need the full cache"
            )
        new = attention_mask[:, -length:].long()
        whole = attention_mask.shape[1] == seen + length  # some callers show the mask of the new tokens alone
        old = attention_mask[:, : seen if whole else 0].long()
        if stays:
            holes = (torch.cat((old, new), dim=-1).diff(dim=-1) < 0).any(-1)
        else:
            holes = (new.diff(dim=-1) > 0).sum(-1) + new[:, 0] > 1
            new = new.cummax(-1).values  # trailing pads count as tokens
        sums = torch.stack(((new == 0).sum(-1), holes.long(), (old == 0).sum(-1)))
        counts, holes, hidden = sums.tolist()  # the one device sync
        members = [list(range(len(counts))) if rows is None else rows.tolist() for rows in self.rows]
        if whole and any(hidden[row] != pads for rows, pads in zip(members, self.before) for row in rows):
            raise ValueError(
                "attention_mask shows other pads among the tokens of the cache than were there when it read them: a "
                "compressed cache cannot hide tokens later (of rows that have finished, say); keep 1 for every token "
                "read and 0 for the pads on the left (without a mask, generate() guesses one from pad tokens), and "
                "take rows out with cache.batch_select_indices"
            )
        if any(holes) or any(
            counts[row] and not empty for row_list, empty in zip(members, self.empty) for row in row_list
        ):
            raise ValueError(
                "attention_mask has a pad after a token of the same row: pad on the left "
                "(tokenizer.padding_side = 'left'), and only before the first token of a conversation"
            )
        self._split(members, counts, attention_mask.device)

    def _split(self, members: list[list[int]], counts: list[int], device: torch.device) -> None:
        groups: list[tuple[int, int, list[int]]] = []
        for parent, row_list in enumerate(members):
            for pads in sorted({counts[row] for row in row_list}) or [0]:  # a group without rows (selection) stays one
                groups.append((parent, pads, [row for row in row_list if counts[row] == pads]))
        if len(groups) > len(self.rows):
            self.rows = [torch.tensor(row_list, dtype=torch.long, device=device) for _, _, row_list in groups]
            self.parents = [parent for parent, _, _ in groups]
            self.before = [self.before[parent] for parent in self.parents]
            self.version += 1
        length_left = [self.empty[parent] for parent, _, _ in groups]
        self.pads = [pads for _, pads, _ in groups]
        self.empty = length_left

    def filled(self, length: int) -> None:
        """Note which groups received a token in this forward, and the pads before it."""
        self.before = [before + pads for before, pads in zip(self.before, self.pads)]
        self.empty = [empty and pads == length for empty, pads in zip(self.empty, self.pads)]

    def positions(self, first: int, length: int, batch: int, device: torch.device) -> Tensor | None:
        """Positions [B, length] of the tokens from column `first` on, each row's counted from its first token (0 for
        pads); None where no row is padded."""
        shifts = [before + pads for before, pads in zip(self.before, self.pads)]
        if not any(shifts):
            return None
        shift = torch.full((batch, 1), shifts[0], device=device)
        for rows, pads in zip(self.rows, shifts):
            if rows is not None:
                shift[rows.to(device)] = pads
        return (torch.arange(first, first + length, device=device) - shift).clamp(min=0)

    def select(self, chosen: Tensor) -> list[Tensor]:
        """Make new row i old row chosen[i]. Returns, for every group, the rows to take within it."""
        if self.rows == [None]:
            return [chosen]
        place = {row: (group, local) for group, rows in enumerate(self.rows) for local, row in enumerate(rows.tolist())}  # type: ignore[union-attr]
        sources = [place[row] for row in chosen.tolist()]
        local: list[Tensor] = []
        for group, rows in enumerate(self.rows):
            mine = [i for i, (g, _) in enumerate(sources) if g == group]
            self.rows[group] = torch.tensor(mine, dtype=torch.long, device=rows.device)  # type: ignore[union-attr]
            local.append(torch.tensor([sources[i][1] for i in mine], dtype=torch.long, device=chosen.device))
        return local


class CompressedLayer(CacheLayerMixin):
    """A transformers cache layer that holds one layer's states. Under `compress`, attention gets this object as key."""

    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, method: CacheMethod, context: LayerContext, groups: RowGroups, equal_rows: bool = False):
        super().__init__()
        self.method, self.context, self.groups, self.equal_rows = method, context, groups, equal_rows
        self.fused = False  # set by `compress` for the length of a forward
        self.reset()

    def reset(self) -> None:
        self.states = [self.method.new_state(self.context)]
        self.groups_version = 0
        self.seen = self.batch_size = 0
        self.is_initialized = False
        self.unfinished = False  # a call that has begun and not ended
        self.pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True
        self.batch_size, heads, _, key_dim = key_states.shape
        self.token_bytes = heads * (key_dim + value_states.shape[-1]) * self.dtype.itemsize

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.fused:
            self.pending = self.take(key_states, value_states)
            return self, self
        if not self.method.plain:
            raise ValueError(
                f"a {type(self.method).__name__} cache needs its own attention: run the model inside "
                f"`with fathom.caches.compress(model, {type(self.method).__name__}(…)):`"
            )
        self.check_call(*key_states.shape[::2][:2])
        if len(key_states) > 1 and not self.equal_rows:
            raise ValueError(
                f"a batch of {len(key_states)} rows in a plain {type(self.method).__name__} cache: without `compress` "
                "it never sees the padding mask. Run inside `compress(model, method)`, or build the cache with "
                "equal_rows=True if no row is padded"
            )
        key_states, value_states = self.take(key_states, value_states)
        self.unfinished = True
        keys, values = self.states[0].append(key_states, value_states)
        self.finish(key_states, value_states)
        return keys.to(self.output_dtype), values.to(self.output_dtype)  # the model's own attention wants its queries'

    def check_rows(self, rows: int) -> None:
        """Refuse rows that are not the cache's."""
        if self.seen and rows != self.batch_size:
            raise ValueError(
                f"input_ids has {rows} rows, but the cache holds {self.batch_size}: the same rows must go on, or "
                "choose and repeat those of the cache (batch_select_indices, batch_repeat_interleave)"
            )

    def check_call(self, rows: int, length: int) -> None:
        """Refuse rows that are not the cache's, and tokens that do not fit, before a call changes anything."""
        self.check_rows(rows)
        split = self.groups_version != self.groups.version  # in this call
        states = [self.states[parent] for parent in self.groups.parents] if split else self.states
        for state, pads in zip(states, self.groups.pads):
            state.check_room(length - pads)

    def finish(self, key: Tensor, value: Tensor) -> None:
        """Count these tokens as stored."""
        self.unfinished = False
        self.lazy_initialization(key, value)
        self.seen += key.shape[2]

    @property
    def touched(self) -> bool:
        """Whether an unfinished call has changed what is stored."""
        return self.unfinished and any(state.touched for state in self.states)

    def take(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the dtype of the cache, which is that of its first tokens whatever autocast does later."""
        self.output_dtype = product_dtype(value)
        if not self.seen:
            self.dtype = self.output_dtype
        return key.to(self.dtype), value.to(self.dtype)

    def attend(self, query: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        """Attention output [B,H,m,D] for the tokens that `update` has just received.

        States compute in the cache's dtype: autocast has already cast queries, keys and values.
        """
        assert self.pending is not None
        (key, value), self.pending = self.pending, None
        if dropout and not all(state.drops_weights for state in self.states):
            raise ValueError(
                f"attention_dropout={dropout}: {type(self.method).__name__} attends to compressed tokens without "
                "weights that could be dropped; set attention_dropout=0 in the model's config, or call model.eval()"
            )
        self.unfinished = True
        with without_autocast(query.device.type):
            output = self.attend_states(query.to(key.dtype), key, value, scaling, dropout)
        self.finish(key, value)
        return output.to(self.output_dtype)

    def attend_states(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float) -> Tensor:
        if self.groups_version != self.groups.version:
            parents = [self.states[parent] for parent in self.groups.parents]
            self.states = [s if s.seen else self.method.new_state(self.context) for s in parents]
            self.groups_version = self.groups.version
        if len(self.states) == 1 and self.groups.pads == [0]:
            return self.states[0].attend(query, key, value, scaling, dropout)
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for state, rows, pads in zip(self.states, self.groups.rows, self.groups.pads):
            rows = torch.arange(len(query), device=query.device) if rows is None else rows
            if pads < query.shape[2] and len(rows):
                q, k, v = (tensor[rows, :, pads:] for tensor in (query, key, value))
                output[rows, :, pads:] = state.attend(q, k, v, scaling, dropout)
        return output

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.fused:  # the states mask for themselves
            return self.seen + query_length, 0
        stored = self.states[0].stored
        return stored + query_length, self.seen - stored

    def get_seq_length(self) -> int:
        """Tokens seen (pads of a batch included), not tokens stored."""
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def select_rows(self, local: list[Tensor], batch_size: int) -> None:
        if self.is_initialized:
            self.states = [state.select(rows) if state.seen else state for state, rows in zip(self.states, local)]
            self.batch_size = batch_size

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"{type(self.method).__name__} cannot take tokens back (crop, assisted decoding): what it dropped is "
                "gone; use the full cache for those, or feed the shorter text to a new cache"
            )

    def offload(self) -> None:
        raise ValueError("compressed caches stay on the device: pass the cache without offloading")

    def nbytes(self) -> int:
        return sum(state.nbytes() for state in self.states)

    def full_bytes(self) -> int:
        """Bytes of the same tokens (pads excluded) in an uncompressed cache."""
        return self.token_bytes * sum(count * state.seen for count, state in zip(self.row_counts(), self.states))

    def row_counts(self) -> list[int]:
        """Number of rows in every state."""
        return [self.batch_size if rows is None else len(rows) for rows in self.groups.rows]

    def mean_over_rows(self, of_states: list[int]) -> float:
        """Mean over rows of a number that every state gives; an int where the mean is whole."""
        total = sum(count * number for count, number in zip(self.row_counts(), of_states))
        return total // self.batch_size if total % self.batch_size == 0 else total / self.batch_size


@dataclasses.dataclass(frozen=True)
class Before:
    """The state that a cache returns to when a forward fails before anything is stored. No tensor is copied or held."""

    seen: int
    groups: dict[str, Any]
    states: list[tuple[list[State], int]]
    others: list[Any]


class CompressedCache(Cache):
    """A transformers `Cache` whose full-attention layers are compressed; sliding layers keep transformers' own.

    Make one with `fathom.caches.build_cache(model, method)`; pass it to `generate` (as `past_key_values=` or, from
    transformers 5.24, `cache=`) to carry a conversation over several calls.
    """

    def __init__(self, layers: list[Any], method: CacheMethod, groups: RowGroups, owner: int):
        super().__init__(layers=layers)
        self.method, self.groups, self.owner = method, groups, owner
        self.failed = False  # a forward ended midway, and what some layers held before is gone
        self.before: Before | None = None  # while a forward under `compress` runs

    def compressed_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def reset(self) -> None:
        self.groups.reset()
        self.failed, self.before = False, None
        super().reset()

    def begin(self, attention_mask: Tensor | None, rows: int, length: int) -> None:
        """Begin a forward of `length` tokens: read its padding, and refuse what cannot be stored."""
        layers = self.compressed_layers()
        layers[0].check_rows(rows)  # before their padding is compared, which other rows have not
        self.before = Before(
            layers[0].seen,
            dict(vars(self.groups)),
            [(layer.states, layer.groups_version) for layer in layers],
            self._other_lengths(),
        )
        self.groups.begin(attention_mask, length, seen=self.before.seen)
        layers[0].check_call(rows, length)

    def end(self, failed: bool) -> None:
        """End a forward. One that failed before storing anything leaves the cache as it was; after another failure the
        cache is refused.
        """
        before, self.before, layers = self.before, None, self.compressed_layers()
        assert before is not None
        for layer in layers:
            layer.pending = None
        if not failed:
            if layers[0].seen > before.seen:
                self.groups.filled(layers[0].seen - before.seen)
            return
        others = self._other_lengths()
        if any(layer.seen > before.seen or layer.touched for layer in layers) or others != before.others:
            self.failed = True
            return
        vars(self.groups).update(before.groups)
        for layer, (states, version) in zip(layers, before.states):
            layer.states, layer.groups_version, layer.unfinished = states, version, False

    def _other_lengths(self) -> list[Any]:
        """Tokens seen by each of transformers' own layers; for a layer without a length, an object equal to nothing."""
        others = [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]
        return [getattr(layer, "cumulative_length", object()) for layer in others]

    def check(self) -> None:
        """Refuse a cache in which a forward failed midway: some layers have read its tokens, others have not."""
        if self.before is not None:  # KeyboardInterrupt: no hook was told
            self.end(failed=True)
        layers = self.compressed_layers()
        if self.failed or any(layer.touched or layer.seen != layers[0].seen for layer in layers):
            raise ValueError(
                "a forward with this cache failed midway, and some of its layers have read the tokens: cache.reset() "
                "and read the text again"
            )

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        plain = self.before is None and not torch.compiler.is_compiling()
        if plain and self.layers[layer_idx] is self.compressed_layers()[0]:
            self.check()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        self.compressed_layers()[0].crop(tokens_to_remove)  # refuses, before another layer has done it
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next((layer.batch_size for layer in self.compressed_layers() if layer.is_initialized), 0)
        if rows:
            device = next(tensor.device for _, tensor in self.compressed_layers()[0].states[0].tensors())
            self._select_rows(torch.arange(rows, device=device).repeat_interleave(repeats))

    def _select_rows(self, chosen: Tensor) -> None:
        local = self.groups.select(chosen)
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.select_rows(local, len(chosen))
            else:
                layer.reorder_cache(chosen)  # type: ignore[arg-type]

    def addresses(self) -> list[tuple[int, tuple[int, ...]]]:
        """Addresses and shapes of all states: while they stay the same, a recorded step can be replayed."""
        states = [state for layer in self.compressed_layers() for state in layer.states]
        return [(x.data_ptr(), tuple(x.shape)) for state in states for _, x in state.tensors()]

    def count(self, tokens: int) -> None:
        """Add `tokens` to the count of every layer after a replay, in which layers do not run; below 0: take back."""
        for layer in self.compressed_layers():
            layer.seen += tokens
            for state in layer.states:
                state.seen += tokens

    def undo(self) -> Callable[[], None]:
        """A function that takes back a partly recorded step: it sets attributes to what they are now. Tensors keep
        their values, as nothing of a recorded step has run.
        """
        held: list[Any] = [self, self.groups, *self.compressed_layers()]
        held += [state for layer in self.compressed_layers() for state in layer.states]
        before = [(one, dict(vars(one))) for one in held]

        def take_back() -> None:
            for one, attributes in before:
                vars(one).clear()
                vars(one).update(attributes)

        return take_back

    def nbytes(self) -> int:
        """Bytes of all layers: compressed states (with statistics, indices, scales) and transformers' own layers."""
        return sum(layer_bytes(layer) for layer in self.layers)


def layer_bytes(layer: Any) -> int:
    """Bytes of one cache layer, ours or transformers' own."""
    if isinstance(layer, CompressedLayer):
        return layer.nbytes()
    held: list[Any] = []
    for item in vars(layer).values():  # linear attention keeps dicts of states
        held += item.values() if isinstance(item, dict) else [item]
    return storage_bytes(item for item in held if isinstance(item, Tensor))


def concat(held: Tensor | None, new: Tensor, dim: int = 2) -> Tensor:
    """`held` and `new` along the token axis. Without `held`, a contiguous copy of `new`: no storage is shared."""
    if held is None:
        return new.clone(memory_format=torch.contiguous_format)
    return torch.cat((held, new), dim=dim)
