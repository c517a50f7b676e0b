"""FourierAttention (arXiv 2506.11886): most channels of the middle context become Fourier coefficients over time."""

from __future__ import annotations

import bisect
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.caches.base import Appending, CacheMethod, CacheShape, Calibration, LayerContext, concat
from fathom.caches.budgets import NotReachable, fullest
from fathom.caches.channels import (
    ChannelSets,
    affine_repair,
    check_widths,
    default_channels,
    flatten_heads,
    load_channels,
    search_channels,
)
from fathom.decoding.fixed import Slots
from fathom.ops import fourier_coefficients as fourier
from fathom.ops import fourier_grid
from fathom.ops.cached_attention import blockwise_attention, causal_attention
from fathom.ops.fourier_decode import raw_partials

TOKENS_AT_ONCE = 4096  # rebuilt at a time for calls of several tokens
OUTGROWN = 2  # a middle this many times as long as at compression has outgrown the affine statistics


@dataclasses.dataclass(frozen=True)
class FourierAttention(CacheMethod):
    """Keep sinks, the newest n_local tokens and the sensitive channels; of every other channel, 2N coefficients.

    A prompt of more than n_sink + n_local + 2N tokens is compressed after its (exact) attention; a shorter one as soon
    as decoding reaches that length. Then every step slides the oldest local token into the coefficients, and attends.

    channels: JSON from `search_channels`; "" for the data-free rule (first dims in RoPE order, the paper's ratios).
    n_sink: first tokens that stay whole.
    n_local: newest tokens that stay whole.
    frequencies: N, coefficients kept per channel (complex numbers).
    window: Tw, the longest middle that the coefficients can hold; "auto" is the middle at compression + `headroom`,
        rounded up to an FFT-friendly length. A full window raises.
    headroom: tokens that window="auto" leaves for what is generated.
    flush_every: tokens that slide together once n_local + flush_every are held. The paper has 1; a larger number
        copies the raw channels less often.
    reconstruction: "affine" (the paper's: statistics frozen at compression, so read the prompt in one call) or
        "projection" (orthogonal, no statistics, right however the text is read).
    attention: "fft" (scores and outputs in coefficient space, nothing is rebuilt), "triton" (the same in one kernel
        that reads the raw channels once and writes no scores; on a GPU, not for float64 models) or "dense" (rebuild,
        then attend: the reference).

    Keys are stored rotated, at their true positions.
    Bytes per layer (e a number, f = 4 or 8 for coefficients): B·[2e(n − n_mid)M + e·n_mid(|D_ku| + |D_vu|)
    + 2N·f·(|D_kc| + |D_vc|) + 2f·(|D_kc| + |D_vc|) for "affine"], M = G·D.
    """

    channels: str = ""
    n_sink: int = 4
    n_local: int = 1024
    frequencies: int = 512
    window: int | str = "auto"
    headroom: int = 4096
    flush_every: int = 1
    reconstruction: str = "affine"
    attention: str = "fft"

    name = "fourier_attention"
    paper = "Beyond Homogeneous Attention: Memory-Efficient LLMs via Fourier-Approximated KV Cache, arXiv 2506.11886"
    summary = "Keep most channels of the middle as a few Fourier coefficients over time."
    equation = "C[n] = Σ_t e^{−2πint/Tw} x_t,  n < N, per compressed channel;  x_t ≈ Re Σ_n C[n] e^{2πint/Tw}"
    variants = ({"n_sink": 2, "n_local": 4, "frequencies": 4, "headroom": 64},)
    identity = {"n_local": 256, "frequencies": 8}  # noqa: RUF012
    calibration = Calibration(option="channels", made_by="search_channels", needed=False)

    def __post_init__(self) -> None:
        self.check_path("channels")
        self.check_at_least("n_sink", 0)
        self.check_at_least("n_local", 1)
        self.check_at_least("frequencies", 1)
        self.check_at_least("headroom", 1)
        self.check_at_least("flush_every", 1)
        self.check_choice("reconstruction", ("affine", "projection"))
        self.check_choice("attention", ("fft", "triton", "dense"))
        if self.window != "auto":
            self.check_at_least("window", 2 * self.frequencies + 1)

    @property
    def threshold(self) -> int:
        """Tokens above which the cache is compressed."""
        return self.n_sink + self.n_local + 2 * self.frequencies

    def prepare(self, model: PreTrainedModel, shape: CacheShape) -> ChannelSets:
        check_widths(shape)
        sets = load_channels(self.channels, model) if self.channels else default_channels(shape)
        if len(sets.key) != shape.layers or (sets.kv_heads, sets.head_dim) != (shape.kv_heads, shape.key_dim):
            raise self.refuse("channels", self.channels, f"sets are for another shape than {shape}")
        if self.attention == "triton":
            self.check_triton(model, "use attention='fft': the same result on every device")
        return sets

    def middle(self, prompt: int, generated: int) -> int:
        """Compressed tokens after one call of `prompt` tokens and `generated` single steps that reach the threshold."""
        start = max(prompt, self.threshold + 1)
        later = (prompt + generated - start) // self.flush_every * self.flush_every
        return start - self.n_sink - self.n_local + later

    def new_state(self, context: LayerContext) -> FourierState:
        return FourierState(self, context)

    def layer_bytes(self, shape: CacheShape, prompt: int, generated: int = 0, layer: int = 0) -> int:
        tokens = prompt + generated
        if tokens <= self.threshold:
            return tokens * shape.token_bytes()
        sets = load_channels(self.channels) if self.channels else default_channels(shape)
        compressed = len(sets.key[layer]) + len(sets.value[layer])
        kept = 2 * shape.kv_heads * shape.key_dim - compressed
        middle, wide = self.middle(prompt, generated), shape.wide_bytes()
        statistics = 2 if self.reconstruction == "affine" else 0
        coefficients = (2 * self.frequencies + statistics) * wide * compressed * shape.batch
        full = (tokens - middle) * shape.token_bytes()
        return full + middle * kept * shape.element_bytes * shape.batch + coefficients

    @classmethod
    def at_fraction(
        cls, fraction: float, shape: CacheShape, tokens: int, chunk: int | None = None, **options: Any
    ) -> CacheMethod | NotReachable:
        # texts are read in parts here, and the statistics of "affine" hold for the first part only
        common = {"window": tokens, "reconstruction": "projection", **options}
        sizes = [(n, local) for n in (512, 256, 128, 64, 32) for local in (1024, 512, 256, 128, 64)]
        candidates = [cls(frequencies=n, n_local=local, **common) for n, local in sizes if 2 * n < tokens]
        return fullest(candidates, fraction, shape, tokens, chunk)

    @classmethod
    def calibrate(cls, model: nn.Module, input_ids: Tensor, **sizes: Any) -> ChannelSets:
        return search_channels(model, list(input_ids.split(1)), **sizes)

    @classmethod
    def calibration_sizes(cls, fraction: float, shape: CacheShape, tokens: int) -> dict[str, Any]:
        return {"frequencies": tokens // 16, "n_local": 64}


class Side:
    """Ids of one layer's channels, for keys or for values: those kept as coefficients, and those kept raw.

    Flat ids are sorted, so head g's raw channels lie side by side, from starts[g] to starts[g + 1].
    """

    def __init__(self, compressed: tuple[int, ...], heads: int, width: int):
        chosen = set(compressed)
        raw = [c for c in range(heads * width) if c not in chosen]
        self.compressed = torch.tensor(compressed, dtype=torch.long)
        self.raw = torch.tensor(raw, dtype=torch.long)
        self.starts = [bisect.bisect_left(raw, head * width) for head in range(heads + 1)]

    def to(self, device: torch.device) -> Side:
        self.compressed, self.raw = self.compressed.to(device), self.raw.to(device)
        return self


class FourierState(Appending):
    """sink_*, local_* [B,G,·,D]; raw_* [B,n_mid,|D_u|]; coefficients_* [B,2N,|D_c|]; scale_*, shift_* [B,1,|D_c|].

    While steps are recorded raw_* have room, and local_* are rings of n_local slots, in which a new token takes the
    place of the one that slides.
    """

    def __init__(self, method: FourierAttention, context: LayerContext):
        super().__init__()
        self.method, sets = method, context.prepared
        chosen = {"key": sets.key[context.index], "value": sets.value[context.index]}
        self.sides = {name: Side(ids, sets.kv_heads, sets.head_dim) for name, ids in chosen.items()}
        self.middle = 0
        self.window = 0
        for name in ("sink", "local", "raw", "coefficients", "scale", "shift"):
            setattr(self, f"{name}_key", None)
            setattr(self, f"{name}_value", None)

    @property
    def stored(self) -> int:
        return self.seen

    @property
    def compressed(self) -> bool:
        return self.window > 0

    @property
    def appends(self) -> bool:
        return self.compressed and self.method.flush_every == 1 and self.method.attention == "fft"

    @property
    def due(self) -> int | None:
        """The number of slots at which the window is full; the next step is refused."""
        return self.method.n_sink + self.method.n_local + self.window

    @property
    def drops_weights(self) -> bool:  # type: ignore[override]
        return not self.compressed

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        if self.fixed is not None:
            return self.attend_fixed(query, key, value, scaling)
        length = key.shape[2]
        self.check_room(length)
        self.seen += length
        self.local_key: Tensor | None = concat(self.local_key, key)
        self.local_value: Tensor | None = concat(self.local_value, value)
        if not self.compressed:
            output = causal_attention(query, self.local_key, self.local_value, scaling, dropout)
            if self.seen > self.method.threshold:
                self.compress()
            return output
        if length == 1:  # slide first, then attend
            self.slide()
            if self.method.attention == "dense":
                return causal_attention(query, *self.dense(), scaling)
            attend = self.attend_triton if self.method.attention == "triton" else self.attend_fft
            return attend(query, scaling)
        output = blockwise_attention(query, self.blocks, self.full(), scaling)
        self.slide()
        return output

    # -- compression

    def compress(self) -> None:
        """Split what is held into sinks, middle and local; turn the middle into coefficients and raw channels."""
        method = self.method
        middle = self.seen - method.n_sink - method.n_local
        if isinstance(method.window, int):
            self.window = method.window
        else:
            self.window = fourier.fast_length(middle + method.headroom)
        for name, side in self.sides.items():
            held = getattr(self, f"local_{name}")
            side.to(held.device)
            setattr(self, f"sink_{name}", held[:, :, : method.n_sink].clone())
            setattr(self, f"local_{name}", held[:, :, method.n_sink + middle :].clone())
            x = flatten_heads(held[:, :, method.n_sink : method.n_sink + middle])
            setattr(self, f"raw_{name}", x[..., side.raw].contiguous())
            x = x[..., side.compressed]
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            coefficients = fourier.transform(x, method.frequencies, self.window)
            setattr(self, f"coefficients_{name}", coefficients)
            if method.reconstruction == "affine":
                rebuilt = fourier.rebuild(coefficients, self.weight(coefficients), 0, middle, self.window)
                scale, shift = affine_repair(x, rebuilt)
                setattr(self, f"scale_{name}", scale)
                setattr(self, f"shift_{name}", shift)
        self.middle = self.middle_at_compression = middle

    def slide(self) -> None:
        """Move local tokens beyond n_local into the middle: raw channels appended, coefficients updated."""
        excess = 0 if self.local_key is None else self.local_key.shape[2] - self.method.n_local
        leavers = excess // self.method.flush_every * self.method.flush_every
        if leavers <= 0:
            return
        update = None
        for name, side in self.sides.items():
            held = getattr(self, f"local_{name}")
            x = flatten_heads(held[:, :, :leavers])
            setattr(self, f"local_{name}", held[:, :, leavers:].clone())
            setattr(self, f"raw_{name}", concat(getattr(self, f"raw_{name}"), x[..., side.raw], dim=1))
            coefficients = getattr(self, f"coefficients_{name}")
            x = x[..., side.compressed].to(coefficients.dtype)
            if update is None:
                update = fourier.basis(
                    self.middle, self.middle + leavers, self.method.frequencies, self.window, x.dtype, x.device
                )
            setattr(self, f"coefficients_{name}", coefficients + update @ x)
        self.middle += leavers
        self.warn_outgrown()

    def warn_outgrown(self) -> None:
        if self.method.reconstruction == "affine" and self.middle > OUTGROWN * self.middle_at_compression:
            warnings.warn(
                f"FourierAttention: affine statistics were taken over {self.middle_at_compression} middle tokens and "
                "no longer fit: use reconstruction='projection', or read the whole prompt in one call",
                stacklevel=2,
            )

    def check_room(self, length: int) -> None:
        """Refuse tokens that would slide beyond the window."""
        method, tokens = self.method, self.seen + length
        window: int | str = self.window
        if self.compressed:
            local = 0 if self.local_key is None else self.local_key.shape[2]
            middle = self.middle + max(0, local + length - method.n_local) // method.flush_every * method.flush_every
        else:  # "auto" makes a window that fits
            middle, window = tokens - method.n_sink - method.n_local, method.window
        if tokens > method.threshold and isinstance(window, int) and middle > window:
            raise ValueError(
                f"FourierAttention: {middle} middle tokens do not fit the window of {window}; set window=(longest "
                f"text − {self.method.n_sink + self.method.n_local}) before the prompt, or a larger headroom"
            )

    def weight(self, like: Tensor) -> Tensor:
        method = self.method
        return fourier.weights(method.reconstruction, method.frequencies, self.window, like.dtype, like.device)

    # -- recorded steps

    def fix(self, slots: Slots) -> None:
        length = slots.length
        self.middle = length - self.method.n_sink - self.method.n_local
        self.warn_outgrown()
        room = min(slots.room, self.window)
        for name in ("key", "value"):
            raw, local = getattr(self, f"raw_{name}"), getattr(self, f"local_{name}")
            store = raw.new_zeros(raw.shape[0], room, raw.shape[2])
            store[:, : self.middle] = raw[:, : self.middle]
            setattr(self, f"raw_{name}", store)
            if self.fixed is None:
                tokens = torch.arange(length - self.method.n_local, length, device=local.device)
                ring = torch.empty_like(local).index_copy_(2, tokens % self.method.n_local, local)
                setattr(self, f"local_{name}", ring)
        self.fixed = slots

    def release(self, length: int) -> None:
        self.middle = length - self.method.n_sink - self.method.n_local
        self.warn_outgrown()
        for name in ("key", "value"):
            raw, ring = getattr(self, f"raw_{name}"), getattr(self, f"local_{name}")
            setattr(self, f"raw_{name}", raw[:, : self.middle].clone())
            tokens = torch.arange(length - self.method.n_local, length, device=ring.device)
            setattr(self, f"local_{name}", ring[:, :, tokens % self.method.n_local])
        self.fixed = None

    def make_room(self) -> int:
        self.middle = self.window
        self.check_room(1)
        raise AssertionError("a full window has no room")

    def shared(self, slots: Slots) -> tuple[Tensor, ...]:
        """The slot of the ring that gets the new token, the number of the middle that its old one gets, the basis of
        the coefficients there, and which of raw_* count."""
        method, like = self.method, self.coefficients_key  # type: ignore[attr-defined]
        middle = slots.place - method.n_local - method.n_sink
        basis = fourier.basis_at(middle, method.frequencies, self.window, like.dtype)
        tokens = torch.arange(self.raw_key.shape[1], device=like.device)  # type: ignore[attr-defined]
        return slots.place % method.n_local, middle, basis, tokens <= middle

    def attend_fixed(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert self.fixed is not None
        slot, middle, basis, counts = self.fixed.shared
        for name, new in (("key", key), ("value", value)):
            side, ring = self.sides[name], getattr(self, f"local_{name}")
            coefficients = getattr(self, f"coefficients_{name}")
            x = flatten_heads(ring.index_select(2, slot))
            getattr(self, f"raw_{name}").index_copy_(1, middle, x[..., side.raw])
            coefficients.add_(basis @ x[..., side.compressed].to(coefficients.dtype))
            ring.index_copy_(2, slot, new)
        self.seen += 1
        return self.attend_fft(query, scaling, counts)

    # -- attention

    def full(self) -> tuple[Tensor, Tensor]:
        """Sinks and local tokens, keys and values [B,G,·,D]."""
        pairs = [(getattr(self, f"sink_{name}"), getattr(self, f"local_{name}")) for name in ("key", "value")]
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        return keys, values

    def rebuilt(self, name: str, start: int, stop: int) -> Tensor:
        """Keys or values of middle tokens start … stop − 1, [B,G,·,D] in the model's dtype."""
        side, coefficients = self.sides[name], getattr(self, f"coefficients_{name}")
        x = fourier.rebuild(coefficients, self.weight(coefficients), start, stop, self.window)
        if self.method.reconstruction == "affine":
            x = x * getattr(self, f"scale_{name}") + getattr(self, f"shift_{name}")
        raw, local = getattr(self, f"raw_{name}"), getattr(self, f"local_{name}")
        out = raw.new_empty(x.shape[0], stop - start, local.shape[1] * local.shape[3])
        out[..., side.compressed] = x.to(raw.dtype)
        out[..., side.raw] = raw[:, start:stop]
        return out.unflatten(2, (local.shape[1], local.shape[3])).transpose(1, 2)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.middle, TOKENS_AT_ONCE):
            stop = min(start + TOKENS_AT_ONCE, self.middle)
            yield self.rebuilt("key", start, stop), self.rebuilt("value", start, stop)

    def dense(self) -> tuple[Tensor, Tensor]:
        """The reference: every key and value of [sinks; middle rebuilt; local]."""
        sides = []
        for name in ("key", "value"):
            parts = getattr(self, f"sink_{name}"), self.rebuilt(name, 0, self.middle), getattr(self, f"local_{name}")
            sides.append(torch.cat(parts, dim=2))
        return sides[0], sides[1]

    # One query over coefficients: project q on them, one inverse FFT gives all scores; outputs the other way.
    #   scores_t = Σ_n w_n [cos·(C_k[n]·q s) + sin·(C_k[N+n]·q s)] + q·shift + q_raw·k_raw,t
    #   output_c = s_c Σ_n w_n (C_v[n,c] Σ_t p_t cos + C_v[N+n,c] Σ_t p_t sin) + shift_c Σ_t p_t

    def attend_fft(self, query: Tensor, scaling: float, counts: Tensor | None = None) -> Tensor:
        """counts: which tokens of raw_* count; None: all."""
        own, held = self.own_channels(query), self.raw_key.shape[1]  # type: ignore[attr-defined]
        middle = fourier.evaluate(self.amplitude(own) * scaling, held, self.window)
        raw = own[..., self.sides["key"].raw] @ self.raw_key.transpose(1, 2)  # type: ignore[attr-defined]
        middle = torch.add(middle, raw, alpha=scaling)  # widens in the same pass
        if counts is not None:
            middle = middle.masked_fill(~counts, float("-inf"))
        weights = torch.cat((middle, self.exact_scores(query, middle.dtype) * scaling), dim=-1).softmax(-1)
        p, p_exact = weights[..., :held], weights[..., held:]
        raw_value = self.raw_value  # type: ignore[attr-defined]
        projected = fourier.project(p, self.method.frequencies, self.window)
        compressed = self.output_of_coefficients(projected, p.sum(-1, keepdim=True))
        output = self.middle_output(compressed, p.to(raw_value.dtype) @ raw_value)
        return output.to(raw_value.dtype) + self.exact_output(p_exact)

    def attend_triton(self, query: Tensor, scaling: float) -> Tensor:
        """The result of `attend_fft` by one kernel that reads the raw channels once; a coarse grid replaces the FFT.

        The kernel's softmax covers the middle; sinks and local tokens are added to it here.
        """
        own = self.own_channels(query)
        key, value = self.sides["key"], self.sides["value"]
        grid = fourier_grid.make_grid(self.method.frequencies, self.window, fourier_grid.block_tokens(query.dtype))
        spectrum = fourier_grid.spectrum(grid, query.device)
        scores = fourier.evaluate(self.amplitude(own) / spectrum, grid.points, grid.points)
        top, total, raw, spread = raw_partials(
            own[..., key.raw],
            scores,
            self.raw_key,  # type: ignore[attr-defined]
            self.raw_value,  # type: ignore[attr-defined]
            key.starts,
            value.starts,
            grid,
            scaling,
        )
        exact = self.exact_scores(query, top.dtype) * scaling
        weights = torch.cat((top + total.log(), exact), dim=-1).softmax(-1)  # the middle counts as one token
        projected = fourier.project(spread, self.method.frequencies, grid.points) / spectrum
        output = self.middle_output(self.output_of_coefficients(projected, total), raw)
        output = output * (weights[..., :1] / total).unsqueeze(2)
        return output.to(query.dtype) + self.exact_output(weights[..., 1:])

    def exact_scores(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """q·k of sinks and local tokens, unscaled, [B,H,·]."""
        sink, local = self.sink_key, self.local_key  # type: ignore[attr-defined]
        assert local is not None
        grouped = query.unflatten(1, (local.shape[1], -1)).squeeze(3)
        return torch.cat([grouped @ keys.transpose(2, 3) for keys in (sink, local)], dim=-1).flatten(1, 2).to(dtype)

    def exact_output(self, p: Tensor) -> Tensor:
        """Σ p v over sinks and local tokens, [B,H,1,D]."""
        sink, local = self.sink_value, self.local_value  # type: ignore[attr-defined]
        assert local is not None
        grouped = p.to(local.dtype).unflatten(1, (local.shape[1], -1))
        p_sink, p_local = grouped.split((sink.shape[2], local.shape[2]), dim=-1)
        return (p_sink @ sink + p_local @ local).flatten(1, 2).unsqueeze(2)

    def middle_output(self, compressed: Tensor, raw: Tensor) -> Tensor:
        """[B,H,1,D] from the outputs of the compressed and of the raw channels of all heads [B,H,·]."""
        side = self.sides["value"]
        flat = compressed.new_empty(*compressed.shape[:2], len(side.compressed) + len(side.raw))
        flat[..., side.compressed] = compressed
        flat[..., side.raw] = raw.to(flat.dtype)
        return self.own_outputs(flat)

    def own_channels(self, query: Tensor) -> Tensor:
        """Queries over the flat channels of all key heads [B,H,G·D]: each head's own channels, zero elsewhere."""
        groups = self.local_key.shape[1]  # type: ignore[union-attr]
        own = torch.eye(groups, dtype=query.dtype, device=query.device)[:, None, :, None]
        return (query.unflatten(1, (groups, -1)) * own).flatten(3).flatten(1, 2)

    def own_outputs(self, flat: Tensor) -> Tensor:
        """The channels [B,H,1,D] of every query head's own key head, out of [B,H,G·D]."""
        groups = self.local_key.shape[1]  # type: ignore[union-attr]
        parts = flat.unflatten(2, (groups, -1)).unflatten(1, (groups, -1))  # [B,G,h,G,D]
        return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(1, 2).unsqueeze(2)

    def amplitude(self, own: Tensor) -> Tensor:
        """a with q·k̃_t = Σ_n a_n cos + a_{N+n} sin over the compressed channels, unscaled, [B,H,2N]."""
        coefficients = self.coefficients_key  # type: ignore[attr-defined]
        q, shift = own[..., self.sides["key"].compressed].to(coefficients.dtype), None
        if self.method.reconstruction == "affine":
            shift = q @ self.shift_key.transpose(1, 2)  # type: ignore[attr-defined]
            q = q * self.scale_key  # type: ignore[attr-defined]
        amplitude = q @ coefficients.transpose(1, 2) * self.weight(coefficients)
        if shift is not None:
            amplitude[..., :1].add_(shift)  # a constant is the cosine of frequency 0
        return amplitude

    def output_of_coefficients(self, projected: Tensor, mass: Tensor) -> Tensor:
        """Σ_t p_t ṽ_t over the compressed channels of all heads, [B,H,|D_c|], from Σ_t p_t cos, sin and Σ_t p_t."""
        coefficients = self.coefficients_value  # type: ignore[attr-defined]
        mixed = projected * self.weight(coefficients) @ coefficients
        if self.method.reconstruction == "affine":
            mixed = torch.addcmul(self.shift_value * mass, mixed, self.scale_value)  # type: ignore[attr-defined]
        return mixed
