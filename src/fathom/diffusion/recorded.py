"""One kind of pass at fixed addresses: it runs kernel by kernel once, is recorded, and replayed from then on.

Canvas and columns are in buffers of their own; everything else that the pass reads must keep its address
(`Passes.run`). The first pass runs unrecorded, so that libraries are loaded. A replay gives the same bits: the same
kernels run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from fathom.decoding.graphs import Recorder

logger = logging.getLogger("fathom.diffusion")


class Recorded:
    """A pass, canvas [R, L] and columns [R, m] → states [R, m, d], which the next one overwrites."""

    def __init__(self, recorder: Recorder, forward: Callable[[Tensor, Tensor], Tensor], canvas: Tensor, index: Tensor):
        self.recorder, self.forward = recorder, forward
        self.canvas, self.index = canvas.clone(), index.contiguous().clone()
        self.warm = self.given_up = False
        self.replay: Any = None

    def __call__(self, canvas: Int[Tensor, "R L"], index: Int[Tensor, "R m"]) -> Float[Tensor, "R m d"]:
        self.canvas.copy_(canvas)
        self.index.copy_(index)
        if self.warm and self.replay is None and not self.given_up:
            self.record()
        if self.replay is None:
            self.run()
            self.warm = True
        else:
            self.replay()
        return self.states

    def run(self) -> None:
        """Run one pass. This is the function that is recorded."""
        self.states = self.forward(self.canvas, self.index)

    def record(self) -> None:
        try:
            self.replay = self.recorder.record(self.run)
        except RuntimeError as error:  # out of memory, or an operation that waits for the device
            logger.warning("a pass of the sampler could not be recorded, and runs kernel by kernel: %s", error)
            self.given_up = True
