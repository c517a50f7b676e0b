"""Trackers of a recipe's `training.report_to`: the Trainer's own integrations, one run of the tracker a run of ours.

What they get is what the Trainer logs. `metrics.jsonl` is written whatever is tracked. Offline, TensorBoard and Trackio
write here anyway, and Weights & Biases does with WANDB_MODE=offline.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

TRACKERS = ("tensorboard", "wandb", "trackio")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ImportError with the pip command for a tracker that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"training.report_to={list(names)!r} needs {name}: pip install 'fathom-lm[{name}]'")


def place(folder: Path, recipe: str) -> str:
    """Where a run lies below its recipe's folder: what tells trials, budgets and numbers of layers apart in a tracker,
    which would draw runs of one name as one."""
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index(recipe) :] if recipe in parts[:-1] else parts[-1:]
    return "/".join(below)


@contextlib.contextmanager
def tracking(names: Sequence[str], folder: Path, saves: bool) -> Iterator[list[TrainerCallback]]:
    """Callbacks for a run's Trainer. The tracker's run ends with the block: the next one must not go on in it.

    `saves`: of one process among several, which alone tracks.
    """
    made: list[TrainerCallback] = []
    if saves:
        made = [_callback(name, folder) for name in names]
    try:
        yield made
    finally:
        for callback in made:
            if isinstance(callback, _Wandb):
                callback.finish()


def _callback(name: str, folder: Path) -> TrainerCallback:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardCallback(tb_writer=SummaryWriter(str(folder / "tensorboard")))
    return _Wandb(folder) if name == "wandb" else TrackioCallback()


class _Wandb(WandbCallback):
    """The Trainer's own, which leaves a run open at the end of training, and files beside the working folder."""

    _wandb: Any

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.began = folder, False

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if self._wandb.run is None:  # else somebody has begun one around us, which is theirs to end
            project = os.environ.get("WANDB_PROJECT", args.project)
            self._wandb.init(project=project, name=args.run_name, dir=str(self.folder))
            self.began = True
        super().setup(args, state, model, **kwargs)

    def finish(self) -> None:
        if self.began:
            self._wandb.finish()
            self.began = False
