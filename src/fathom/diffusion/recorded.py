"""A function of tensors of one shape, at fixed addresses: it runs kernel by kernel once, is recorded, and replayed from
then on.

Its arguments lie in buffers of their own. The first call makes libraries ready; what the function reads and writes
beside them must stay in place. A replay gives the bits of the function that was recorded: the same kernels run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fathom.decoding.graphs import Recorder

logger = logging.getLogger("fathom.diffusion")


class Recorded:
    """The function, whose result the next call overwrites."""

    def __init__(self, recorder: Recorder, function: Callable[..., Any], *inputs: Tensor):
        self.recorder, self.function = recorder, function
        self.inputs = [x.contiguous().clone() for x in inputs]
        self.warm = self.given_up = False
        self.replay: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        if self.warm and self.replay is None and not self.given_up:
            self.record()
        if self.replay is None:
            self.run()
            self.warm = True
        else:
            self.replay()
        return self.output

    def run(self) -> None:
        """Call the function once. This is what is recorded."""
        self.output = self.function(*self.inputs)

    def record(self) -> None:
        try:
            self.replay = self.recorder.record(self.run)
        except RuntimeError as error:  # out of memory, or an operation that waits for the device
            logger.warning("a part of a step could not be recorded, and runs kernel by kernel: %s", error)
            self.given_up = True
