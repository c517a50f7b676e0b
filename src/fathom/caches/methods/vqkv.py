"""VQKV (arXiv 2603.16435): a token's key and value become a few small integers, indices into residual codebooks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.caches.base import Appending, CacheMethod, CacheShape, Calibration, LayerContext, concat
from fathom.caches.budgets import NotReachable, fullest
from fathom.caches.codebooks import Codebooks, CodebookTraining, load_codebooks, train_codebooks
from fathom.decoding.fixed import Slots
from fathom.ops.bitpack import pack, packed_bytes, unpack
from fathom.ops.cached_attention import blockwise_attention, causal_attention
from fathom.ops.code_attention import code_mix, code_scores, histogram_mix, lookup_scores
from fathom.ops.residual_vq import encode, rebuild

TOKENS_AT_ONCE = 8192  # rebuilt at a time on the blockwise path
LOOKUP_QUERIES = 16  # calls up to this length use tables; longer ones rebuild blocks


@dataclasses.dataclass(frozen=True)
class VQKV(CacheMethod):
    """Keep every token: the first n_sink and the newest in full, the middle as codes. Nothing is evicted.

        prompt: exact attention, then all but the first n_sink and the last n_local tokens are encoded
        later: when the tail reaches n_local + flush_every tokens, its oldest are encoded down to n_local

    codebooks: a safetensors file from `train_codebooks` (it fixes sizes, sharing, and keys before or after rotation).
    n_sink: first tokens that stay in full.
    n_local: newest tokens that stay in full.
    flush_every: tokens that are encoded together; None means n_local.
    pack: "int16" (2 bytes a code) or "bits" (⌈log₂ S⌉ bits, rounded up to whole bytes for each token, head and side).
    attention: "lut" (look-up tables for scores and a histogram for outputs, in calls of up to 16 tokens; longer calls
        and unrotated keys go block by block), "triton" (the same with one kernel each, on a GPU), "blocks" (rebuild
        8192 tokens at a time), "dense" (rebuild all: the reference).

    Bytes per layer with M coded tokens: B·G·[(n − M)(D_k + D_v)·bytes + M·(code bytes of keys + of values)]; the tables
    are held once per model (`Codebooks.nbytes`).
    """

    codebooks: str = ""
    n_sink: int = 4
    n_local: int = 1024
    flush_every: int | None = None
    pack: str = "int16"
    attention: str = "lut"

    name = "vqkv"
    paper = "VQKV: High-Fidelity and High-Ratio Cache Compression via Vector-Quantization, arXiv 2603.16435"
    summary = "Keep every token of the middle as codes of a trained vector quantiser, read without decoding."
    equation = (
        "x ≈ Σ_stages codebook[code],  code = argmin ‖residual − codebook‖;  scores = Σ_stages (q·codebookᵀ)[code]"
    )
    variants = ({"n_sink": 2, "n_local": 8, "flush_every": 3},)
    identity = {"n_local": 256}  # noqa: RUF012
    calibration = Calibration(
        option="codebooks",
        made_by="train_codebooks",
        needed=True,
        rows=4,
        long=True,  # rotated keys look different at every position
        variant={
            "key_stages": 3, "key_entries": 16, "value_stages": 2, "value_entries": 20, "steps": 5, "batch": 256,
        },
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.check_path("codebooks")
        self.check_at_least("n_sink", 0)
        self.check_at_least("n_local", 1)
        self.check_choice("pack", ("int16", "bits"))
        self.check_choice("attention", ("lut", "triton", "blocks", "dense"))
        if self.flush_every is not None:
            self.check_at_least("flush_every", 1)
        if not self.codebooks:
            raise self.refuse("codebooks", "", "name the file that train_codebooks(model, …).save(file) wrote")

    @property
    def pre_rope(self) -> bool:
        return load_codebooks(self.codebooks).rope == "pre"

    @property
    def flush(self) -> int:
        return self.flush_every or self.n_local

    def prepare(self, model: PreTrainedModel, shape: CacheShape) -> Codebooks:
        if self.attention == "triton":
            self.check_triton(model, "use attention='lut': the same result on every device")
        return load_codebooks(self.codebooks, model)

    def new_state(self, context: LayerContext) -> VQState:
        return VQState(self, context)

    def code_bytes(self, table: Tensor) -> int:
        """Bytes of the codes of one token and head, on one side."""
        return packed_bytes(table.shape[1], bits_of(table)) if self.pack == "bits" else 2 * table.shape[1]

    def coded(self, prompt: int, generated: int) -> int:
        """Tokens held as codes after one call of `prompt` tokens and `generated` single steps."""
        at_prompt = max(0, prompt - self.n_sink - self.n_local)
        tail = prompt + generated - min(prompt + generated, self.n_sink) - at_prompt
        return at_prompt + max(0, tail - self.n_local) // self.flush * self.flush

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        books, coded = load_codebooks(self.codebooks), self.coded(prompt, generated)
        codes = self.code_bytes(books.keys[layer]) + self.code_bytes(books.values[layer])
        return (prompt + generated - coded) * shape.token_bytes() + coded * codes * shape.batch * shape.kv_heads

    def most_bytes(self, shape: CacheShape, tokens: int, chunk: int | None = None) -> int:
        waiting = min(self.flush, tokens) - 1  # tokens that wait for their batch to be coded are in full
        return max(self.cache_bytes(shape, tokens), self.cache_bytes(shape, tokens - waiting, waiting))

    @classmethod
    def at_fraction(
        cls, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **options: Any
    ) -> CacheMethod | NotReachable:
        """The method with as many newest tokens in full as fit; the codebooks already fix the bytes of a code."""
        sizes = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16)
        candidates = [cls(n_local=n, flush_every=min(n, 64), pack="bits", **options) for n in sizes]
        return fullest(candidates, fraction, shape, tokens, chunk)

    @classmethod
    def calibrate(cls, model: nn.Module, input_ids: Tensor, **sizes: Any) -> Codebooks:
        return train_codebooks(model, input_ids, CodebookTraining(**sizes))

    @classmethod
    def calibration_sizes(cls, fraction: float, shape: CacheShape, tokens: int) -> dict[str, Any]:
        """Sizes for 8-bit codes by residual k-means: 0.7 of the fraction for the middle, 70 % of its stages
        for keys.
        """
        stages = max(2, int(0.7 * fraction * 4 * shape.key_dim))  # bytes of a token and head at 2 bytes a number
        keys = max(1, round(0.7 * stages))
        entries = {"key_entries": 256, "value_entries": 256}
        made = {"init": "kmeans", "batch": 8192, "kmeans_rounds": 6}
        return {"key_stages": keys, "value_stages": max(1, stages - keys), **entries, **made}

    def table_bytes(self, model: PreTrainedModel | None = None) -> int:
        return load_codebooks(self.codebooks, model).nbytes()


def bits_of(table: Tensor) -> int:
    """⌈log₂ S⌉, at least 1."""
    return max(1, (table.shape[2] - 1).bit_length())


class VQState(Appending):
    """sink_*, tail_* [B,G,·,D] in full; key_codes, value_codes [B,G,M,·] for the middle.

    While steps are recorded the stores of codes have room, of which the first `count` [1] count, and the tail's buffers
    hold the sinks, then as many tokens as come before the next are coded.
    """

    def __init__(self, method: VQKV, context: LayerContext):
        super().__init__()
        self.method, self.rope = method, context.rope
        warns = context.index == 0 and context.prepared.rope == "post"
        self.trained_tokens = context.prepared.tokens if warns else 0
        self.key_table, self.value_table = TableHolder(context, "keys"), TableHolder(context, "values")
        self.sink_key: Tensor | None = None
        self.sink_value: Tensor | None = None
        self.tail_key: Tensor | None = None
        self.tail_value: Tensor | None = None
        self.key_codes: Tensor | None = None
        self.value_codes: Tensor | None = None
        self.count: Tensor | None = None
        self.coded = 0

    @property
    def stored(self) -> int:
        return self.seen

    @property
    def appends(self) -> bool:
        """By tables: other forms rebuild what counts, and no more."""
        full = self.method.n_sink == 0 or (self.sink_key is not None and self.sink_key.shape[2] == self.method.n_sink)
        return full and self.rope is None and self.method.attention in ("lut", "triton")

    @property
    def due(self) -> int | None:
        return self.method.n_sink + self.coded + self.method.n_local + self.method.flush

    @property
    def drops_weights(self) -> bool:  # type: ignore[override]
        return not self.coded

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        sinks = 0 if self.sink_key is None else self.sink_key.shape[2]
        missing = min(self.method.n_sink - sinks, key.shape[2])
        keys, values = concat(self.tail_key, key), concat(self.tail_value, value)
        if missing > 0:  # sinks fill up before anything is coded: tail and new tokens are still one stretch
            self.sink_key = concat(self.sink_key, keys[:, :, :missing])
            self.sink_value = concat(self.sink_value, values[:, :, :missing])
            keys, values = keys[:, :, missing:], values[:, :, missing:]
        full_keys = keys if self.sink_key is None else torch.cat((self.sink_key, keys), dim=2)
        full_values = values if self.sink_value is None else torch.cat((self.sink_value, values), dim=2)
        if self.coded:
            output = self.attend_coded(query, full_keys, full_values, scaling)
        else:
            start = full_keys.shape[2] - query.shape[2]
            turned = (query, full_keys) if self.rope is None else (self.rope(query, start), self.rope(full_keys))
            output = causal_attention(*turned, full_values, scaling, dropout)
        self.store(keys, values, key.shape[2])
        return output

    def attend_coded(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention over sinks, codes and tail; `keys` and `values` are sinks and tail."""
        if self.rope is not None:
            sinks, seen = self.method.n_sink, self.seen + query.shape[2]
            turned_tail = self.rope(keys[:, :, sinks:], seen - (keys.shape[2] - sinks))
            keys = torch.cat((self.rope(keys[:, :, :sinks]), turned_tail), dim=2)
            query = self.rope(query, self.seen)
        if self.method.attention == "dense":
            blocks = list(self.blocks())
            sinks = self.method.n_sink
            all_keys = [keys[:, :, :sinks], *(k for k, _ in blocks), keys[:, :, sinks:]]
            all_values = [values[:, :, :sinks], *(v for _, v in blocks), values[:, :, sinks:]]
            return causal_attention(query, torch.cat(all_keys, dim=2), torch.cat(all_values, dim=2), scaling)
        tables = self.method.attention in ("lut", "triton") and self.rope is None
        if tables and query.shape[2] <= LOOKUP_QUERIES:
            return self.attend_by_lookup(query, keys, values, scaling)
        # sinks are older than every query too, so they can stand before the tail in the causal part
        return blockwise_attention(query, self.blocks, (keys, values), scaling)

    def attend_by_lookup(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, counts: Tensor | None = None
    ) -> Tensor:
        """counts: which of the codes and of keys and values count; None: all."""
        batch, heads, m, width = query.shape
        groups = keys.shape[1]
        grouped = query.reshape(batch, groups, heads // groups * m, width)
        by_kernel = self.method.attention == "triton"
        scores, mix = (code_scores, code_mix) if by_kernel else (lookup_scores, histogram_mix)
        assert self.key_codes is not None and self.value_codes is not None
        key_codes = self.codes(self.key_codes, self.key_table())
        value_codes = self.codes(self.value_codes, self.value_table())
        middle = scores(grouped, key_codes, self.key_table()) * scaling
        full = (grouped @ keys.transpose(2, 3)).to(middle.dtype) * scaling
        if m > 1:
            hidden = torch.ones(m, keys.shape[2], dtype=torch.bool, device=keys.device).triu(keys.shape[2] - m + 1)
            full = full.unflatten(2, (-1, m)).masked_fill(hidden, float("-inf")).flatten(2, 3)
        weights = torch.cat((middle, full), dim=-1)
        if counts is not None:
            weights = weights.masked_fill(~counts, float("-inf"))
        of_codes, of_full = weights.softmax(-1).split((middle.shape[3], full.shape[3]), dim=-1)
        from_codes = mix(of_codes, value_codes, self.value_table())
        from_full = of_full.to(values.dtype) @ values
        return (from_codes.to(values.dtype) + from_full).reshape(batch, heads, m, values.shape[-1])

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The middle, rebuilt 8192 tokens at a time (keys rotated)."""
        for start in range(0, self.coded, TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            assert self.key_codes is not None and self.value_codes is not None
            keys = self.rebuilt(self.key_codes[:, :, part], self.key_table())
            if self.rope is not None:
                keys = self.rope(keys, self.method.n_sink + start)
            yield keys, self.rebuilt(self.value_codes[:, :, part], self.value_table())

    def rebuilt(self, held: Tensor, table: Tensor) -> Tensor:
        """The vectors of stored codes [B,G,t,·]."""
        return rebuild(self.codes(held, table), table)

    def store(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Encode the tokens of the tail that are old enough."""
        prompt = self.seen == 0
        self.warn_beyond(self.seen, self.seen + length)
        self.seen += length
        excess = max(0, keys.shape[2] - self.method.n_local)
        due = excess if prompt else excess // self.method.flush * self.method.flush
        if due:
            self.key_codes = concat(self.key_codes, self.packed(keys[:, :, :due], self.key_table()))
            self.value_codes = concat(self.value_codes, self.packed(values[:, :, :due], self.value_table()))
            self.coded += due
        self.tail_key, self.tail_value = keys[:, :, due:].clone(), values[:, :, due:].clone()

    def warn_beyond(self, before: int, tokens: int) -> None:
        """Once a text has become longer than those that the codebooks were trained on."""
        if 0 < self.trained_tokens < tokens and before <= self.trained_tokens:
            warnings.warn(
                f"VQKV: the codebooks were trained on texts of {self.trained_tokens} tokens, and rotated keys beyond "
                "are coded badly: run train_codebooks on texts as long as yours, or with rope='pre'",
                stacklevel=2,
            )

    # -- recorded steps

    def fix(self, slots: Slots) -> None:
        sinks = self.method.n_sink
        for side, table in (("key", self.key_table()), ("value", self.value_table())):
            tail, codes = getattr(self, f"tail_{side}"), getattr(self, f"{side}_codes")
            zero = torch.zeros(*tail.shape[:2], 1, table.shape[1], dtype=torch.long, device=tail.device)
            store = self.store_codes(zero, table).repeat(1, 1, slots.room, 1)
            store[:, :, : self.coded] = 0 if codes is None else codes[:, :, : self.coded]
            setattr(self, f"{side}_codes", store)
            if self.fixed is None:
                room = tail.new_zeros(*tail.shape[:2], sinks + self.method.n_local + self.method.flush, tail.shape[3])
                room[:, :, sinks : sinks + tail.shape[2]] = tail
                if sinks:
                    room[:, :, :sinks] = getattr(self, f"sink_{side}")
                setattr(self, f"tail_{side}", room)
        self.count = torch.full((1,), self.coded, device=slots.place.device)
        self.fixed = slots

    def release(self, length: int) -> None:
        if length == self.due:
            self.make_room()
        for side in ("key", "value"):
            tail, codes = getattr(self, f"tail_{side}"), getattr(self, f"{side}_codes")
            setattr(self, f"tail_{side}", tail[:, :, self.method.n_sink : length - self.coded].clone())
            setattr(self, f"{side}_codes", codes[:, :, : self.coded].clone() if self.coded else None)
        self.count = self.fixed = None

    def make_room(self) -> int:
        """Code the oldest tokens of the tail."""
        sinks, flush = self.method.n_sink, self.method.flush
        self.warn_beyond(self.seen - flush, self.seen)
        for side, table in (("key", self.key_table()), ("value", self.value_table())):
            tail, codes = getattr(self, f"tail_{side}"), getattr(self, f"{side}_codes")
            codes[:, :, self.coded : self.coded + flush] = self.packed(tail[:, :, sinks : sinks + flush], table)
            tail[:, :, sinks : tail.shape[2] - flush] = tail[:, :, sinks + flush :].clone()
        self.coded += flush
        assert self.count is not None
        self.count.fill_(self.coded)
        return self.seen

    def shared(self, slots: Slots) -> tuple[Tensor, ...]:
        """Where in the tail the new token goes, and which codes and tokens in full count."""
        assert self.count is not None and self.key_codes is not None and self.tail_key is not None
        slot = slots.place - self.count
        codes, full = (torch.arange(x.shape[2], device=slot.device) for x in (self.key_codes, self.tail_key))
        return slot, torch.cat((codes < self.count, full <= slot))

    def attend_fixed(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert self.tail_key is not None and self.tail_value is not None and self.fixed is not None
        slot, counts = self.fixed.shared
        self.tail_key.index_copy_(2, slot, key)
        self.tail_value.index_copy_(2, slot, value)
        self.seen += 1
        return self.attend_by_lookup(query, self.tail_key, self.tail_value, scaling, counts)

    # -- codes

    def packed(self, x: Tensor, table: Tensor) -> Tensor:
        heads = x.split(x.shape[1] // table.shape[0], dim=1)  # one part where heads share a set
        return self.store_codes(torch.cat([encode(part, books) for part, books in zip(heads, table)], dim=1), table)

    def store_codes(self, codes: Tensor, table: Tensor) -> Tensor:
        if self.method.pack == "bits":
            return pack(codes, bits_of(table))
        return (codes - 32768).to(torch.int16)

    def codes(self, held: Tensor, table: Tensor) -> Tensor:
        """Codes [B,G,t,N] in a form that ops take, such as int16 shifted by −32768."""
        return unpack(held, bits_of(table), table.shape[1]) if self.method.pack == "bits" else held


class TableHolder:
    """A layer's codebooks [1 or G, N, S, D]: shared by all states, so not a tensor of the state."""

    def __init__(self, context: LayerContext, side: str):
        self.table: Tensor = getattr(context.prepared, side)[context.index]

    def __call__(self) -> Tensor:
        return self.table
