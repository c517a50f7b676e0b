"""A double of CUDA graphs for a CPU, which replays recorded operations on the very tensors that were recorded.

What it tests is the discipline that a CUDA graph needs: fixed addresses, no number of Python's that changes from step
to step, no waiting for values. The capture itself needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")


class Recording(TorchDispatchMode):
    """Notes every operation with its tensors, and what the tensors from outside held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(function).startswith(WAITING):
            raise RuntimeError(f"{function} waits for the device")
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                place = x.untyped_storage().data_ptr()
                if place not in self.made and place not in self.before:
                    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                    self.before[place] = flat, flat.clone()
        out = function(*args, **kwargs)
        self.made |= {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, torch.Tensor)} - {
            *self.before
        }
        self.calls.append((function, args, kwargs, out))
        return out


class Double:
    """Stands for CUDA graphs: `record` runs nothing that lasts, a replay writes where the recording wrote."""

    def __init__(self) -> None:
        self.operations = 0
        self.recordings = 0

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        with Recording() as recording:
            try:
                function()
            finally:  # a capture that fails has run nothing either
                with torch.utils._python_dispatch._disable_current_modes():
                    for now, before in recording.before.values():
                        now.copy_(before)
        self.recordings += 1

        def replay() -> None:
            for call, args, kwargs, out in recording.calls:
                self.operations += 1
                again = call(*args, **kwargs)
                for to, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(to, torch.Tensor) and to.data_ptr() != new.data_ptr():
                        to.copy_(new)

        return replay
