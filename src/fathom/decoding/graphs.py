"""CUDA graphs behind an interface small enough for a test double: `fixed.py` and diffusion's sampler use it.

`record(function)` records the kernels that `function` launches, without running them, and returns a function that
replays them. A replay reads and writes the tensors that `function` used when it was recorded, at the same addresses; no
Python runs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fathom.decoding import switch

ONE_AT_A_TIME = threading.Lock()  # Python's collector, which a recording holds off, is all threads'


class Recorder(Protocol):
    """The interface of an object that records a step."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]: ...


class CudaGraphs:
    """CUDA graphs on the current device, in one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        with ONE_AT_A_TIME:
            return self.captured(function).replay

    def captured(self, function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of what `function` launches."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # another graph that is collected meanwhile cannot be freed, and spoils this one
        # "thread_local": another thread may allocate memory meanwhile, as a server's do
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            # torch has freed the pool, and its generator still believes it is recorded: every later draw would fail
            self.pool = torch.cuda.graph_pool_handle()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
        return graph


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
