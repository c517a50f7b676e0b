"""Forward passes of a bidirectional model over some columns of a canvas, on our decoder and on stock models alike.

A pass sends the tokens of some columns through the model. Every attention layer calls the pass's `read(layer, query,
key, value)`, with rotated queries and keys, for the keys and values that its queries read. Layers are numbered in the
order in which they run, pass·L + ℓ for methods that run the stack several times.

A pass over few columns spends more time on launches than on work. So passes of constant shape are recorded as CUDA
graphs on devices that have them (`recorded.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from fathom.decoding.graphs import Recorder
from fathom.diffusion.recorded import Recorded
from fathom.models.causal_lm import FathomForCausalLM

NAME = "fathom_diffusion"  # of the attention function, as transformers' registry knows it
Read = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def attention(
    module: Any,
    query: Float[Tensor, "R H m D"],
    key: Float[Tensor, "R G m D"],
    value: Float[Tensor, "R G m D"],
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    diffusion_pass: Any = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R m H D"], None]:
    """The registered attention function: softmax attention over the keys and values that the pass returns."""
    for name in ("softcap", "s_aux", "sliding_window"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not implemented in the sampler")
    key, value, mask = diffusion_pass.attend(query, key, value)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of a canvas, by row. start: their first, if they are contiguous and the same in every row."""

    index: Int[Tensor, "R m"]
    start: int | None = None

    @classmethod
    def stretch(cls, start: int, stop: int, rows: int, device: torch.device) -> Columns:
        return cls(torch.arange(start, stop, device=device).expand(rows, -1), start)

    @classmethod
    def where(cls, chosen: Bool[Tensor, "R L"]) -> Columns:
        """The columns chosen in each row. Rows with fewer repeat their first one, which changes no result."""
        most = max(1, int(chosen.sum(1).max()))
        index = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls(torch.where(chosen.gather(1, index), index, index[:, :1]))

    def places(self, asked: Int[Tensor, " n"], length: int) -> Int[Tensor, "R n"]:
        """The index of each asked column, on a canvas of `length`, among these; below 0 if it is not among them."""
        rows, size = self.index.shape
        if self.start is not None:
            at = asked - self.start
            return torch.where(at < size, at, -1).expand(rows, -1)
        number = torch.arange(size, device=asked.device)
        place = torch.full((rows, length), -1, device=asked.device)
        return place.scatter_(1, self.index, number.expand_as(self.index))[:, asked]


class Passes:
    """Runs passes and counts them.

    Args:
        real: columns that are no padding, [R, L].
        recorder: records passes that say `fixed`; None: none is recorded.

    Attributes:
        counts: forward evaluations by kind, "full" and "block".
        tokens: columns computed, all rows.
        columns: those of the pass under way.
    """

    def __init__(self, model: Any, real: Bool[Tensor, "R L"], recorder: Recorder | None = None):
        self.model, self.real, self.recorder = model, real, recorder
        self.recorded: dict[str, Recorded] = {}  # by kind
        self.read: Read | None = None  # of the pass that runs
        self.rows, self.length = real.shape
        self.positions = (real.long().cumsum(1) - 1).clamp(min=0)
        self.mask = None if bool(real.all()) else real[:, None, None]
        self.counts: collections.Counter[str] = collections.Counter()
        self.tokens = 0
        self.times = 1  # evaluations that a pass counts for

    def plain(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values that a full pass reads: those of all real columns."""
        return key, value, self.mask

    def full(self, canvas: Int[Tensor, "R L"], read: Read | None = None, fixed: bool = False) -> tuple[Tensor, Columns]:
        """The states of all columns."""
        columns = Columns.stretch(0, self.length, self.rows, canvas.device)
        return self.run(canvas, columns, read or self.plain, "full", fixed), columns

    def run(
        self, canvas: Int[Tensor, "R L"], columns: Columns, read: Read, kind: str, fixed: bool = False
    ) -> Float[Tensor, "R m d"]:
        """The states of some columns, after the final norm; the next pass may overwrite them.

        fixed: whether later passes of this kind read tensors of the same addresses and shapes, with other values,
            and look up their columns here. If an address changes, call `moved` before the next pass.
        """
        self.counts[kind] += self.times
        self.tokens += columns.index.numel()

        def forward(canvas: Tensor, index: Tensor) -> Tensor:
            return self.forward(canvas, Columns(index, columns.start), read)

        if not fixed:
            return forward(canvas, columns.index)
        return self.replayed(kind, forward, canvas, columns.index)

    def replayed(self, kind: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """The function of these inputs, recorded where passes are. One recording a kind, of the last shapes."""
        if self.recorder is None:
            return function(*inputs)
        found = self.recorded.get(kind)
        if found is None or any(kept.shape != x.shape for kept, x in zip(found.inputs, inputs, strict=True)):
            self.recorded.pop(kind, None)  # its memory first
            found = self.recorded[kind] = Recorded(self.recorder, function, *inputs)
        return found(*inputs)

    def moved(self) -> None:
        """Drop recordings because tensors that they read have other addresses; they are made again."""
        self.recorded = {}

    def release(self) -> None:
        """Free recordings and kept tensors at the end of a call, instead of when Python next collects cycles.

        Until then they would take memory, and a recording that is freed while another is made would break that one.
        """
        self.recorded, self.read = {}, None

    def forward(self, canvas: Int[Tensor, "R L"], columns: Columns, read: Read) -> Float[Tensor, "R m d"]:
        self.read, self.layer, self.columns = read, 0, columns
        # A mask of four dimensions is the caller's own: no model makes another one of it, and attention asks us.
        given: dict[str, Any] = {
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=canvas.device),
            "position_ids": self.positions.gather(1, columns.index),
            "diffusion_pass": self,
        }
        ids = canvas.gather(1, columns.index)
        if isinstance(self.model, FathomForCausalLM):
            embeddings = self.model.model.embed(ids)
            mask, positions = given.pop("attention_mask"), given.pop("position_ids")
            stack = self.model.bind_stack(embeddings, mask, positions, None, {**given, "use_cache": False})
            return self.model.depth(stack, embeddings, self.model.vocabulary()).hidden_states
        return self.model.get_decoder()(ids, use_cache=False, **given).last_hidden_state

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        layer, self.layer = self.layer, self.layer + 1
        assert self.read is not None
        return self.read(layer, query, key, value)


class Store:
    """Keys and values of all columns, layer by layer. A pass rewrites those of its columns. Addresses stay the same
    from block to block.
    """

    def __init__(self, passes: Passes):
        self.passes = passes
        self.layers: list[tuple[Tensor, Tensor]] = []

    def fill(self, canvas: Int[Tensor, "R L"]) -> tuple[Tensor, Columns]:
        """The states of a full pass; its keys and values are kept."""

        def read(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            if layer == len(self.layers):
                self.layers.append((key, value))
            else:
                for kept, new in zip(self.layers[layer], (key, value), strict=True):
                    kept.copy_(new)
            return key, value, self.passes.mask

        return self.passes.full(canvas, read)

    def update(self, canvas: Int[Tensor, "R L"], columns: Columns) -> tuple[Tensor, Columns]:
        """The states of a pass over some columns, which read the kept keys and values of all others."""
        return self.passes.run(canvas, columns, self.read, "block", fixed=columns.start is not None), columns

    def read(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        columns = self.passes.columns
        for kept, new in zip(self.layers[layer], (key, value), strict=True):
            if columns.start is not None:
                kept.index_copy_(2, columns.index[0], new)
            else:
                kept.scatter_(2, columns.index[:, None, :, None].expand_as(new), new)
        return *self.layers[layer], self.passes.mask

    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer)


@contextlib.contextmanager
def sampling_attention(model: Any) -> Iterator[None]:
    """A context in which the model's attention layers read what the pass under way returns."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
