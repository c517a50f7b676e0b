"""A step recorded once and replayed: what `fixed.py` and the sampler of diffusion models (`diffusion/recorded.py`) need
of CUDA graphs, so that a test can put a double there.

The contract: `record(function)` notes what `function` launches without running it, and returns what runs it. A replay
reads and writes the tensors that `function` named when it was recorded, at the same addresses; Python does not run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fathom.decoding import switch


class Recorder(Protocol):
    """What records a step."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]: ...


class CudaGraphs:
    """CUDA graphs on the current device, in one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
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
        return graph.replay


def records(device: torch.device) -> bool:
    """Whether a device replays recorded steps, so that steps of fixed shape pay there."""
    return device.type == "cuda"


def recorder_for(device: torch.device) -> Recorder | None:
    """What records steps on this device; None: nothing does. `switch.GRAPHS` must be set."""
    return CudaGraphs() if switch.GRAPHS and records(device) else None


def unrecordable(model: Any) -> str:
    """Why a forward of this model cannot be recorded; "" where nothing of its own stands against it."""
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
