"""Decode speed and time to first token under a cache, eager or as one CUDA graph.

The cache is filled with random keys and values up to the context (a cache of fixed size only to its capacity: its state
is then the same as after any longer text), so no prompt has to be read to time the steps after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import StaticCache

from fathom.caches import versions
from fathom.caches.base import CacheMethod, CompressedCache, CompressedLayer
from fathom.caches.compress import compress, prefill
from fathom.caches.fourier_attention import FourierState
from fathom.caches.full import FullState
from fathom.caches.kivi import KIVIState
from fathom.caches.versions import CACHE_NAME
from fathom.caches.vqkv import VQState

PART = 2048  # tokens that are filled in at a time


@torch.no_grad()
def fill(cache: CompressedCache, model: nn.Module, batch: int, tokens: int) -> None:
    """Put `tokens` random tokens into every compressed layer, as if they had been read."""
    config = versions.text_config(versions.causal_lm(model))
    device, dtype = next(model.parameters()).device, versions.causal_lm(model).dtype
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device=device).manual_seed(0)

    def random(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, width, generator=generator, device=device, dtype=dtype)

    for layer in cache.compressed_layers():
        state: Any = layer.states[0]
        queries, heads = config.num_attention_heads, config.num_key_value_heads
        if isinstance(state, (FullState, FourierState)):
            key, value = random(heads, tokens), random(heads, tokens)
            if isinstance(state, FullState):
                state.key, state.value, state.seen = key, value, tokens
            else:
                state.local_key, state.local_value, state.seen = key, value, tokens
                if tokens > state.method.threshold:
                    state.compress()
        elif isinstance(state, (KIVIState, VQState)):
            _fill_coded(state, random, heads, tokens)
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


def _fill_coded(state: Any, random: Callable[[int, int], torch.Tensor], heads: int, tokens: int) -> None:
    if isinstance(state, VQState) and state.method.n_sink:
        state.sink_key, state.sink_value = random(heads, state.method.n_sink), random(heads, state.method.n_sink)
        state.seen = state.method.n_sink
    while state.seen < tokens:
        length = min(PART, tokens - state.seen)
        names = ("key", "value") if isinstance(state, KIVIState) else ("tail_key", "tail_value")
        held = [getattr(state, name) for name in names]
        new = [random(heads, length), random(heads, length)]
        keys, values = (n if h is None else torch.cat((h, n), dim=2) for h, n in zip(held, new))
        state.store(keys, values, length)


def _seen(layer: CompressedLayer, batch: int, heads: int, width: int, dtype: torch.dtype, tokens: int) -> None:
    layer.seen, layer.is_initialized, layer.batch_size = tokens, True, batch
    layer.token_bytes = heads * 2 * width * dtype.itemsize


def timed(step: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call, after two warm-up calls; the device is synchronised around every one."""
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for turn in range(repeats + 2):
        synchronise()
        start = time.perf_counter()
        step()
        synchronise()
        if turn >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def decode_speed(
    model: nn.Module, method: CacheMethod | None, context: int, batch: int, graph: bool, repeats: int = 20
) -> dict[str, Any]:
    """Tokens a second of single-token steps at `context` tokens. `method=None`: transformers' StaticCache, stock SDPA.

    With `graph` the step is one CUDA graph (methods whose cache has a fixed size, and the static cache).
    """
    device = next(model.parameters()).device
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    position = torch.full((batch, 1), context, device=device)
    result: dict[str, Any] = {"context": context, "batch": batch, "mode": "graph" if graph else "eager"}
    if method is None:
        inner = versions.causal_lm(model)
        static = StaticCache(config=inner.config, max_cache_len=context + repeats + 64)
        _fill_static(static, inner, batch, context)

        def step() -> Any:
            return inner(input_ids=token, position_ids=position, use_cache=True, **{CACHE_NAME: static}).logits

        held: list[Any] = static.layers
        result["bytes"] = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in held)
        return {**result, **_measure(step, graph, repeats, batch, device)}
    with compress(model, method):
        cache = build_cache_for(model, method)
        fill(cache, model, batch, context)
        result["bytes"] = cache.nbytes()

        def step() -> Any:
            return model(input_ids=token, position_ids=position, use_cache=True, **{CACHE_NAME: cache}).logits

        return {**result, **_measure(step, graph, repeats, batch, device)}


def build_cache_for(model: nn.Module, method: CacheMethod) -> CompressedCache:
    """An empty cache while `compress` is on: made by the binding that is in place."""
    binding = versions.attention_modules(versions.causal_lm(model))[0].__dict__["_fathom_binding"]
    return binding.new_cache()


def _fill_static(cache: StaticCache, model: Any, batch: int, context: int) -> None:
    config, device = versions.text_config(model), next(model.parameters()).device
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


def _measure(step: Callable[[], Any], graph: bool, repeats: int, batch: int, device: torch.device) -> dict[str, Any]:
    if graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        seconds = timed(captured.replay, repeats, device)
    else:
        seconds = timed(step, repeats, device)
    median = statistics.median(seconds)
    return {
        "seconds_per_step": median,
        "spread": [min(seconds), max(seconds)],
        "tokens_per_second": batch / median,
    }


@torch.no_grad()
def first_token(
    model: nn.Module, method: CacheMethod, context: int, batch: int, chunk: int = 4096, repeats: int = 3
) -> dict[str, Any]:
    """Seconds from a prompt of random tokens to its first logits, read in chunks of `chunk`, and the peak memory."""
    device = next(model.parameters()).device
    vocabulary = versions.text_config(versions.causal_lm(model)).vocab_size
    ids = torch.randint(1, vocabulary, (batch, context), device=device)
    cuda = device.type == "cuda"
    with compress(model, method):
        if cuda:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda: prefill(model, ids, chunk_size=chunk), repeats, device)
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
