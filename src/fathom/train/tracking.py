"""Trackers of a recipe's `training.report_to`: the Trainer's own integrations, with one run of the tracker for each of
ours.

They get what the Trainer logs; `metrics.jsonl` is always written as well. Offline, TensorBoard and Trackio write to
local files anyway, and Weights & Biases does with WANDB_MODE=offline.
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


def check_trackers(names: Sequence[str]) -> None:
    """Raise ImportError with the pip command for a tracker that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"training.report_to={list(names)!r} needs {name}: pip install 'fathom-lm[{name}]'")


def place(folder: Path, recipe: str) -> str:
    """A run's path below its recipe's folder. As a name in a tracker it tells trials, budgets and numbers of layers
    apart; runs of one name would be drawn as one.
    """
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index(recipe) :] if recipe in parts[:-1] else parts[-1:]
    return "/".join(below)


@contextlib.contextmanager
def tracking(names: Sequence[str], folder: Path, saves: bool) -> Iterator[list[TrainerCallback]]:
    """A context that yields callbacks for a run's Trainer. The tracker's run ends with it, so that the next starts
    anew.

    saves: whether this is the process that tracks, one of several.
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
    """The Trainer's own integration, which leaves a run open after training and writes files to the working folder."""

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
