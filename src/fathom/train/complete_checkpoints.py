"""Checkpoints that count only when they are complete.

The last file to appear in a checkpoint folder is `complete.json`, the size of every other file. A process killed at any
moment before that leaves a folder without it, or with a file missing or short; such a folder is not resumed from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from fathom.writing import write_json

MARKER = "complete.json"
PREFIX = "checkpoint-"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return [path for path in _folders(folder) if is_complete(path)]


def is_complete(checkpoint: Path) -> bool:
    """Whether the marker is there and every file it lists has its size."""
    try:
        sizes = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def step_of(checkpoint: Path) -> int:
    """The optimiser step in a checkpoint folder's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def mark_complete(checkpoint: Path) -> None:
    """Flush the files of a checkpoint to disk and write the marker."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(
        checkpoint / MARKER, {"files": {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}}
    )


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its marker first."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def remove_incomplete(folder: Path) -> None:
    """Delete what killed runs left: a new checkpoint of that step must not mix with old files."""
    for path in _folders(folder):
        if not is_complete(path):
            remove(path)


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints. Call it only after a new one is complete."""
    for path in checkpoints(folder)[:-keep]:
        remove(path)


class CompleteCheckpoints(TrainerCallback):
    """After the Trainer has saved: the final model (at the last step), the marker, rotation, in this order."""

    def __init__(self, folder: Path, keep: int, save_final_model: Callable[[], None]) -> None:
        self.folder, self.keep, self.save_final_model = folder, keep, save_final_model

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            self.save_final_model()
        PartialState().wait_for_everyone()  # every rank has written its part
        if args.should_save:
            mark_complete(self.folder / f"{PREFIX}{state.global_step}")
            rotate(self.folder, self.keep)


def _folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit() and path.is_dir()]
    return sorted(found, key=step_of)
