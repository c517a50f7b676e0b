"""Trains a recipe in a folder, as torchrun starts it: `processes_child.py RECIPE FOLDER [STEP]`; killed at STEP.

ACCELERATE_USE_FSDP asks for FSDP2. accelerate knows it on GPUs alone; here its state is told that CPUs do it too, as
torch's `fully_shard` does over gloo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate.state
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from fathom.train import load_recipe, train_run

initialise = accelerate.state.AcceleratorState.__init__


def sharded_on_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    initialise(self, *args, fsdp_plugin=fsdp_plugin, **options)
    self.fsdp_plugin = fsdp_plugin or getattr(self, "fsdp_plugin", None)
    if self.fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os._exit(9)


if __name__ == "__main__":
    accelerate.state.AcceleratorState.__init__ = sharded_on_cpu  # type: ignore[method-assign]
    recipe, folder, *step = sys.argv[1:]
    loaded = load_recipe(recipe)
    data = loaded.task.prepare(loaded.data, Path(recipe).parent / ".data")
    killed = [Killed(int(number)) for number in step]
    train_run(loaded, loaded.methods[0], seed=0, folder=folder, data=data, callbacks=killed)
