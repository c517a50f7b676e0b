"""Decode speed and time to first token under a cache, eager or as one CUDA graph.

The cache is filled with random keys, values and codes up to the context (a cache of fixed size only to its capacity:
its state is then the same as after any longer text), so no prompt has to be read to time the steps after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from fathom.caches import versions
from fathom.caches.base import CacheMethod, CompressedCache, CompressedLayer, concat
from fathom.caches.compress import cache_shape, compress, prefill
from fathom.caches.methods.fourier_attention import FourierState
from fathom.caches.methods.full import Full, FullState
from fathom.caches.methods.kivi import KIVIState
from fathom.caches.methods.vqkv import VQState
from fathom.caches.versions import CACHE_NAME
from fathom.decoding.graphs import warm_and_record
from fathom.ops.cached_attention import causal_attention

PART = 2048  # tokens that are filled in at a time
# What stands for the full cache: transformers' StaticCache, or the least that a full cache can cost in SDPA.
STATIC, BUFFER = "static", "buffer"


class BufferState(FullState):
    """The full cache in a preallocated buffer [B,G,context + 1,D]: a step overwrites the last slot, and
    nothing moves.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        assert self.key is not None and self.value is not None
        self.key[:, :, -1:] = key
        self.value[:, :, -1:] = value
        return causal_attention(query, self.key, self.value, scaling, dropout)


@torch.no_grad()
def fill(cache: CompressedCache, model: nn.Module, batch: int, tokens: int) -> None:
    """Put `tokens` random tokens into every compressed layer, as if they had been read."""
    config = versions.text_config(versions.causal_lm(model))
    device, dtype = versions.execution_device(model), versions.causal_lm(model).dtype
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device=device).manual_seed(0)

    def random(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, width, generator=generator, device=device, dtype=dtype)

    for layer in cache.compressed_layers():
        state: Any = layer.states[0]
        queries = getattr(config, "heads_seen", config.num_attention_heads)  # of our own decoder
        heads = config.num_key_value_heads
        if isinstance(state, (FullState, FourierState)):
            key, value = random(heads, tokens), random(heads, tokens)
            if isinstance(state, FullState):
                state.key, state.value, state.seen = key, value, tokens
            else:
                state.local_key, state.local_value, state.seen = key, value, tokens
                if tokens > state.method.threshold:
                    state.compress()
        elif isinstance(state, KIVIState):
            while state.seen < tokens:
                length = min(PART, tokens - state.seen)
                key, value = concat(state.key, random(heads, length)), concat(state.value, random(heads, length))
                state.store(key, value, length)
        elif isinstance(state, VQState):
            _fill_codes(state, random, generator, batch, heads, tokens)
        else:
            capacity = getattr(state.method, "budget", tokens)
            left = min(tokens, capacity + PART)
            while left > 0:
                length = min(PART, left)
                state.attend(random(queries, length), random(heads, length), random(heads, length), width**-0.5)
                left -= length
            if state.stored < capacity <= tokens and hasattr(state, "pointer"):  # block sweeps keep a little less
                missing = capacity - state.stored
                state.attend(random(queries, missing), random(heads, missing), random(heads, missing), width**-0.5)
            state.seen = tokens
        _seen(layer, batch, heads, width, dtype, tokens)
    cache.groups.empty = [False]


def _fill_codes(
    state: VQState, random: Callable[[int, int], Tensor], generator: Any, batch: int, heads: int, tokens: int
) -> None:
    """Fill a state with random codes. To encode random vectors would take longer than the whole measurement."""
    method, coded = state.method, state.method.coded(tokens, 0)
    sinks = min(method.n_sink, tokens)
    state.sink_key, state.sink_value = random(heads, sinks), random(heads, sinks)
    state.tail_key, state.tail_value = (random(heads, tokens - sinks - coded) for _ in range(2))
    if coded:
        for name, table in (("key_codes", state.key_table()), ("value_codes", state.value_table())):
            size, place = (batch, heads, coded, table.shape[1]), {"generator": generator, "device": table.device}
            setattr(state, name, state.store_codes(torch.randint(table.shape[2], size, **place), table))
    state.seen, state.coded = tokens, coded


def _seen(layer: CompressedLayer, batch: int, heads: int, width: int, dtype: torch.dtype, tokens: int) -> None:
    layer.seen, layer.is_initialized, layer.batch_size, layer.dtype = tokens, True, batch, dtype
    layer.token_bytes = heads * 2 * width * dtype.itemsize


def timed(step: Callable[[], Any], repeats: int, device: torch.device, warm: int = 2) -> list[float]:
    """Seconds of each call, after `warm` calls that do not count; the device is synchronised around every one."""
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for turn in range(repeats + warm):
        synchronise()
        start = time.perf_counter()
        step()
        synchronise()
        if turn >= warm:
            seconds.append(time.perf_counter() - start)
    return seconds


def bytes_per_step(model: nn.Module, method: CacheMethod, context: int, batch: int) -> int:
    """Bytes that a decode step must read: all weights but the embedding table, and the cache (closed form)."""
    inner = versions.causal_lm(model)
    embedding = inner.get_input_embeddings().weight  # type: ignore[union-attr]
    tied = inner.get_output_embeddings() is not None and inner.get_output_embeddings().weight is embedding
    weights = sum(p.numel() * p.element_size() for p in inner.parameters() if tied or p is not embedding)
    return weights + method.table_bytes(inner) + method.cache_bytes(cache_shape(inner, batch), context)


@torch.no_grad()
def decode_speed(
    model: nn.Module, method: CacheMethod | str, context: int, batch: int, graph: bool, repeats: int = 20
) -> dict[str, Any]:
    """Tokens per second of single-token steps at `context` tokens, and the bytes that such a step must read.

    method: a cache method; "static" (transformers' StaticCache, stock SDPA); or "buffer" (the full cache, preallocated,
        with SDPA over exactly its tokens).
    graph: run the step as one CUDA graph. A cache that grows cannot replay its graph when tokens are really added: its
        row (`grows`) is the device's time for one step at this length.
    """
    device = versions.execution_device(model)
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    position = torch.full((batch, 1), context, device=device)
    known: CacheMethod = Full() if isinstance(method, str) else method
    result: dict[str, Any] = {"context": context, "batch": batch, "mode": "graph" if graph else "eager"}
    result["bytes_per_step"] = bytes_per_step(model, known, context, batch)
    if method == STATIC:
        inner = versions.causal_lm(model)
        static = StaticCache(config=inner.config, max_cache_len=context + repeats + 64)
        _fill_static(static, inner, batch, context)

        def static_step() -> Any:
            return inner(input_ids=token, position_ids=position, use_cache=True, **{CACHE_NAME: static}).logits

        held: list[Any] = static.layers
        result["bytes"] = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in held)
        return {**result, **_measure(static_step, graph, repeats, batch, device)}
    with compress(model, known):
        cache = _new_cache(model)
        fill(cache, model, batch, context + 1 if method == BUFFER else context)
        if method == BUFFER:
            for layer in cache.compressed_layers():
                buffer = BufferState()
                vars(buffer).update(vars(layer.states[0]))
                layer.states = [buffer]
        result["bytes"] = cache.nbytes()

        def step() -> Any:
            return model(input_ids=token, position_ids=position, use_cache=True, **{CACHE_NAME: cache}).logits

        return {**result, **_measure(step, graph, repeats, batch, device, cache)}


def _new_cache(model: nn.Module) -> CompressedCache:
    """An empty cache for a model that is under `compress`."""
    binding = versions.attention_modules(versions.causal_lm(model))[0].__dict__["_fathom_binding"]
    return binding.new_cache()


def _fill_static(cache: StaticCache, model: Any, batch: int, context: int) -> None:
    config, device = versions.text_config(model), versions.execution_device(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    cache.early_initialization(batch, heads, width, model.dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()  # type: ignore[union-attr]
        layer.values.normal_()  # type: ignore[union-attr]
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            layer.cumulative_length.fill_(context)  # type: ignore[union-attr]
        elif hasattr(layer, "cumulative_length"):
            layer.cumulative_length = context  # type: ignore[union-attr]


def _measure(
    step: Callable[[], Any],
    graph: bool,
    repeats: int,
    batch: int,
    device: torch.device,
    cache: CompressedCache | None = None,
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if graph:
        held: list[Tensor] = []

        def contents() -> list[Tensor]:
            layers = [] if cache is None else cache.compressed_layers()
            return [x for layer in layers for _, x in layer.states[0].tensors()]

        def note_and_step() -> None:
            held[:] = contents()  # replays read what the cache held before the recorded step: keep it alive
            step()

        replay = warm_and_record(note_and_step, warm=3)
        if cache is not None:
            places = {x.data_ptr() for x in held}
            result["grows"] = any(x.data_ptr() not in places for x in contents())
        seconds = timed(replay, repeats, device)
        del held
    else:
        seconds = timed(step, repeats, device)
    median = statistics.median(seconds)
    return {
        **result,
        "seconds_per_step": median,
        "spread": [min(seconds), max(seconds)],
        "tokens_per_second": batch / median,
    }


@torch.no_grad()
def first_token(
    model: nn.Module,
    method: CacheMethod,
    context: int,
    batch: int,
    chunk: int = 4096,
    repeats: int = 3,
    warm: int = 2,
) -> dict[str, Any]:
    """Seconds from a prompt of random tokens to its first logits, read in chunks of `chunk`, and the peak memory."""
    device = versions.execution_device(model)
    vocabulary = versions.text_config(versions.causal_lm(model)).vocab_size
    ids = torch.randint(1, vocabulary, (batch, context), device=device)
    cuda = device.type == "cuda"
    with compress(model, method):
        if cuda:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda: prefill(model, ids, chunk_size=chunk), repeats, device, warm)
        peak = torch.cuda.max_memory_allocated() - before if cuda else None
    median = statistics.median(seconds)
    return {
        "context": context,
        "batch": batch,
        "chunk": chunk,
        "seconds": median,
        "spread": [min(seconds), max(seconds)],
        "peak_minus_weights": peak,
    }
