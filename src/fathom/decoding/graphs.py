"""CUDA graphs behind an interface small enough for a test double: all that is recorded, is recorded here.

`record(function)` records the kernels that `function` launches, without running them, and returns a function that
replays them. A replay reads and writes the tensors that `function` used when it was recorded, at the same addresses; no
Python runs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fathom.decoding import switch

ONE_AT_A_TIME = threading.Lock()  # Python's collector, which a recording holds off, is all threads'


class Recorder(Protocol):
    """The interface of an object that records a step."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]: ...


class CudaGraphs:
    """CUDA graphs on the current device, which share a memory pool for as long as one of them lives."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        with ONE_AT_A_TIME:
            return self.captured(function).replay

    def captured(self, function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of what `function` launches."""
        if not self.alive:  # torch refuses a pool whose graphs are gone while a tensor of theirs is left
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # another graph that is collected meanwhile cannot be freed, and spoils this one
        # "thread_local": another thread may allocate memory meanwhile, as a server's do
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            # torch has freed the pool, and its generator still believes it is recorded: every later draw would fail
            self.alive = weakref.WeakSet()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
        self.alive.add(graph)
        return graph


def warm_and_record(function: Callable[[], Any], warm: int = 2) -> Callable[[], Any]:
    """A replay of `function`, which runs `warm` times before, so that libraries have chosen their kernels."""
    aside = torch.cuda.Stream()  # as a recording runs on a stream aside: workspaces are made for each
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(warm):
            function()
    torch.cuda.current_stream().wait_stream(aside)
    return CudaGraphs().record(function)


def records(device: torch.device) -> bool:
    """Whether a device replays recorded steps, so that steps of fixed shape pay there."""
    return device.type == "cuda"


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder for this device; None if there is none or `switch.GRAPHS` is off."""
    return CudaGraphs() if switch.GRAPHS and records(device) else None


def unrecordable(model: Any) -> str:
    """Why a forward of this model cannot be recorded; "" if the model allows it."""
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantised"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves the weights of {name or 'the model'}"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not getattr(hook, "only_python", False) for hook in hooks):
            return f"{name or 'the model'} has forward hooks, which a replay would not call"
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            return "the model is compiled"
    return ""
