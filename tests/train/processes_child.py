"""Trains a recipe in a folder, as torchrun starts it: `processes_child.py RECIPE FOLDER [STEP]`; killed at STEP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from fathom.train import load_recipe, train_run
from sharded_on_cpu import allow_fsdp_on_cpu


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os._exit(9)


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    recipe, folder, *step = sys.argv[1:]
    loaded = load_recipe(recipe)
    data = loaded.task.prepare(loaded.data, Path(recipe).parent / ".data")
    killed = [Killed(int(number)) for number in step]
    train_run(loaded, loaded.methods[0], seed=0, folder=folder, data=data, callbacks=killed)
