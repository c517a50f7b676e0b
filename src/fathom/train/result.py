"""What a finished run reports: read from its metrics, kept in its result.json."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from fathom.data import PreparedData
from fathom.tasks import Task
from fathom.tasks.base import scores_read, with_scores
from fathom.train.metrics import read_metrics
from fathom.writing import write_json

MODEL = "model"
RESULT = "result.json"
FEWEST_STRETCHES = 5  # of which an interval of the speed can be told


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a finished run. Losses are means over the task's targets; None where not finite or without held-out
    examples.

    Attributes:
        folder: of the run; `folder / "model"` is the trained model.
        tokens, train_flops: of the whole run, in all processes; FLOPs are `fathom.cost`'s matrix products.
        train_loss: of the last logged steps.
        validation_loss: on the held-out examples after the last step.
        scores: the task's, by name, on the held-out examples after the last step.
        tokens_per_second: of all processes, without evaluation and saving: the median over the intervals between
            logged losses. The first interval after a start, which warms up, counts only if there is no other.
        seconds: of training, without evaluation and saving.
        peak_memory_bytes: allocated on rank 0's GPU; None on a CPU, where only the whole process's is known.
        tokens_per_second_interval: 10th and 90th percentile over these intervals; None for fewer than 5.
        interruptions: how often the run was resumed from a checkpoint.
        busy: on a CPU, the mean share of the time that the process was on a core (metrics.py).
        notes: sentences about changes to the data that a reader should know.
        history: the lines of metrics.jsonl.
    """

    folder: Path
    method: str
    seed: int
    lr: float
    steps: int
    tokens: int
    train_flops: float
    parameters: int
    train_loss: float | None
    validation_loss: float | None
    scores: dict[str, float | None]
    tokens_per_second: float
    seconds: float
    peak_memory_bytes: int | None
    tokens_per_second_interval: list[float] | None = None
    interruptions: int | None = None
    busy: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    history: tuple[dict[str, Any], ...] = ()

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @classmethod
    def load(cls, folder: str | Path) -> TrainResult | None:
        """The result in a run's folder, None if the run is not finished."""
        folder = Path(folder)
        try:
            values = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(folder=folder, history=tuple(read_metrics(folder)), **scores_read(values))

    def save(self) -> None:
        values = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("folder", "history")
        }
        write_json(self.folder / RESULT, with_scores(values))


def report(
    folder: Path, method: str, seed: int, lr: float, parameters: int, data: PreparedData, task: Task
) -> TrainResult:
    """The result of the finished run in this folder, from its metrics and its model."""
    history = read_metrics(folder)
    logged = [line for line in history if "loss" in line]
    validation = [line["validation_loss"] for line in history if "validation_loss" in line]
    loss = validation[-1] if validation else None
    steady = _steady(history) or logged
    speeds = [line["tokens_per_second"] for line in steady]
    tenths = statistics.quantiles(speeds, n=10, method="inclusive") if len(speeds) >= FEWEST_STRETCHES else None
    memory = [line["peak_memory_bytes"] for line in logged if "peak_memory_bytes" in line]
    busy = [line["busy"] for line in steady if "busy" in line]
    return TrainResult(
        folder=folder,
        method=method,
        seed=seed,
        lr=lr,
        steps=logged[-1]["step"],
        tokens=logged[-1]["tokens"],
        train_flops=logged[-1]["train_flops"],
        parameters=parameters,
        train_loss=logged[-1]["loss"],
        validation_loss=loss,
        scores={name: _finite(value) for name, value in task.score(data, loss, folder / MODEL).items()},
        tokens_per_second=statistics.median(speeds),
        seconds=logged[-1]["seconds"],
        peak_memory_bytes=max(memory, default=None),
        tokens_per_second_interval=None if tenths is None else [tenths[0], tenths[-1]],
        interruptions=sum("resumed" in line for line in history),
        busy=statistics.fmean(busy) if busy else None,
        notes=list(data.notes),
        history=tuple(history),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _steady(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training lines except the first one after each start."""
    found, warm = [], False
    for line in history:
        if "resumed" in line:
            warm = False
        elif "loss" in line:
            if warm:
                found.append(line)
            warm = True
    return found
