"""Compiled layers under a recorded step: fewer kernels, for seconds of compiling. `generate(compile_config=…)` asks.

All layers run one compiled function, which gets a layer and that layer's part of the cache. So one graph serves them
all, and steps of later calls; what a layer reads by its number would make a graph for each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig

from fathom.decoding.versions import CACHE_NAME

# The step is recorded anyhow, so modes that would record what they compile are those without it.
UNRECORDED = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
# Graphs of one function, which serves all models, dtypes and modes of a process. Beyond them it would run uncompiled.
GRAPHS = 256


class OneLayer:
    """The cache as a single layer sees it."""

    def __init__(self, layer: Any):
        self.layer = layer

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layer.update(key, value)


def forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's result. This is the function that is compiled."""
    return layer._call_impl(*args, **kwargs)


@functools.cache
def compiled(backend: Any, mode: str | None, fullgraph: bool, dynamic: bool | None, options: Any) -> Callable[..., Any]:
    """`forward`, compiled; one for all models and calls."""
    return torch.compile(
        forward, backend=backend, mode=mode, fullgraph=fullgraph, dynamic=dynamic, options=dict(options) or None
    )


def unsuited_layers(model: Any) -> str:
    """Why the layers of this model are not compiled; "" where they are."""
    config = model.config
    if getattr(config, "mixer", None) is None:
        return f"{type(model).__name__} is no decoder of Fathom's"
    for section, alike in (("mixer", "none"), ("residual", "standard"), ("feed_forward", "dense")):
        name = getattr(config, section)["name"]
        if name != alike:
            return f"with {section}={name!r} layers are not alike, or wait for the device"
    return ""


@contextlib.contextmanager
def compiled_layers(model: Any, cache: Any, how: CompileConfig) -> Iterator[None]:
    """A context in which the decoder's layers run compiled on this cache; forwards on any other run as they are."""
    options = tuple(sorted((how.options or {}).items()))
    run = compiled(how.backend, UNRECORDED.get(how.mode, how.mode), how.fullgraph, how.dynamic, options)

    def call(layer: Any, *args: Any, cache_layer: int, **kwargs: Any) -> Any:
        others = kwargs.get(CACHE_NAME) is not cache  # of another thread
        if others:
            return layer._call_impl(*args, cache_layer=cache_layer, **kwargs)
        return run(layer, args, {**kwargs, CACHE_NAME: OneLayer(cache.layers[cache_layer])})

    layers = list(model.model.layers)
    before = [layer._compiled_call_impl for layer in layers]
    try:
        for layer in layers:
            layer._compiled_call_impl = functools.partial(call, layer)
        with torch._dynamo.config.patch(recompile_limit=max(GRAPHS, torch._dynamo.config.recompile_limit)):
            yield
    finally:
        for layer, its_own in zip(layers, before, strict=True):
            layer._compiled_call_impl = its_own
