"""FreqKV (arXiv 2505.00570): a full cache is low-passed along time and resampled to fewer slots, again and again."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fathom.caches.base import Appending, CacheMethod, CacheShape, LayerContext, concat, portion
from fathom.ops.cached_attention import causal_attention
from fathom.ops.dct import resample
from fathom.ops.filled_attention import filled_attention
from fathom.ops.rotary_slots import rotate_slots


@dataclasses.dataclass(frozen=True)
class FreqKV(CacheMethod):
    """A cache of C = `budget` slots. When it is full and a token comes, its N = C − n_sink − n_recent middle slots
    become L = ⌊ratio·N⌋ slots (with `ratio` taken as the decimal that it prints as):

        y = √(L/N) · IDCT_L(DCT_N(x)[0:L])     for every channel of the unrotated keys and of the values

    Keys are rotated by slot, so no position reaches C. Prompt, decoding and training share one loop, so compressions
    happen at the same tokens however these are fed. Meant for fine-tuning (`Trainer` under `compress`).

    budget: C, slots of the cache.
    n_sink: first tokens that are never compressed.
    n_recent: newest tokens that are not compressed with the rest.
    ratio: γ, the part of the middle's slots that a compression leaves.
    band: "low" (the method), or the ablations "high" and "mean".
    transform: "gemm" or "fft", the same result.

    Bytes per layer: 2·B·G·D·n·bytes with n ≤ C slots.
    """

    budget: int = 4096
    n_sink: int = 4
    n_recent: int = 0
    ratio: float = 0.5
    band: str = "low"
    transform: str = "gemm"

    name = "freqkv"
    paper = "FreqKV: Key-Value Compression in Frequency Domain for Context Window Extension, arXiv 2505.00570"
    summary = "Keep the low frequencies (over time) of the middle of the cache; can be fine-tuned."
    equation = "y = √(L/N)·IDCT_L(DCT_N(x)[0:L]) over the N middle slots of a full cache,  L = ⌊ratio·N⌋"
    variants = ({"budget": 16, "n_sink": 2, "n_recent": 1, "ratio": 0.4},)
    fewest = 16

    def __post_init__(self) -> None:
        self.check_at_least("budget", 1)
        self.check_at_least("n_sink", 0)
        self.check_at_least("n_recent", 0)
        self.check_choice("band", ("low", "high", "mean"))
        self.check_choice("transform", ("gemm", "fft"))
        if self.budget <= self.n_sink + self.n_recent:
            raise self.refuse("budget", self.budget, f"use more than n_sink + n_recent = {self.n_sink + self.n_recent}")
        self.check_ratio("ratio", "use 0 ≤ ratio < 1: at 1 a full cache would never have room again")
        if self.transform == "fft" and self.band != "low":
            raise self.refuse("transform", self.transform, "the FFT form exists for band='low'; use 'gemm'")

    @property
    def pre_rope(self) -> bool:
        return True

    @property
    def sequential(self) -> bool:
        return True

    @property
    def compressed_length(self) -> int:
        """L = ⌊ratio · N⌋."""
        return portion(self.ratio, self.budget - self.n_sink - self.n_recent)

    @property
    def freed(self) -> int:
        """Δ = N − L: slots that one compression frees."""
        return self.budget - self.n_sink - self.n_recent - self.compressed_length

    def new_state(self, context: LayerContext) -> FreqState:
        return FreqState(self, context)

    def slots(self, tokens: int) -> int:
        """Slots held after `tokens` tokens, however they were fed."""
        if tokens <= self.budget:
            return tokens
        return self.budget - self.freed + (tokens - self.budget - 1) % self.freed + 1

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        return self.slots(prompt + generated) * shape.token_bytes()


class FreqState(Appending):
    """key (unrotated), value [B,G,n,D], n ≤ budget. Between two compressions a step appends a token."""

    def __init__(self, method: FreqKV, context: LayerContext):
        super().__init__()
        self.method, self.context = method, context
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.most = method.budget

    @property
    def appends(self) -> bool:
        return self.context.rope is None or self.context.rope.keep

    @property
    def stored(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        rope = self.context.rope  # None: a layer without positions
        outputs, start = [], 0
        while start < key.shape[2]:
            if self.stored == self.method.budget:
                self.compress()
            stop = min(start + self.method.budget - self.stored, key.shape[2])
            self.key = concat(self.key, key[:, :, start:stop])
            self.value = concat(self.value, value[:, :, start:stop])
            turned, keys = query[:, :, start:stop], self.key
            if rope is not None:
                turned, keys = rope(turned, self.stored - (stop - start)), rope(keys)
            outputs.append(causal_attention(turned, keys, self.value, scaling, dropout))
            start = stop
        self.seen += key.shape[2]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def compress(self) -> None:
        """Low-pass the slots between sinks and recents: N → L."""
        method = self.method
        first, last = method.n_sink, method.budget - method.n_recent
        for name in ("key", "value"):
            held = getattr(self, name)
            middle = held[:, :, first:last]
            if method.compressed_length:
                middle = resample(middle, method.compressed_length, method.band, method.transform)
            else:
                middle = middle[:, :, :0]
            setattr(self, name, torch.cat((held[:, :, :first], middle, held[:, :, last:]), dim=2))

    def attend_fixed(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert self.key is not None and self.value is not None and self.fixed is not None
        place, visible, rope = self.fixed.place, self.fixed.visible, self.context.rope
        self.key.index_copy_(2, place, key)
        self.value.index_copy_(2, place, value)
        self.seen += 1
        keys = self.key
        if rope is not None:
            cos, sin = (table.index_select(1, place) for table in rope.table(keys.shape[2], query))
            query, keys = rotate_slots(query, cos, sin, 0), rope(keys)
        return filled_attention(query, keys, self.value, visible, scaling)

    def make_room(self) -> int:
        buffers = self.key, self.value
        self.compress()
        assert self.key is not None and self.value is not None
        held = self.stored
        for buffer, kept in zip(buffers, (self.key, self.value), strict=True):
            buffer[:, :, :held] = kept  # type: ignore[index]
        self.key, self.value = buffers
        return held
