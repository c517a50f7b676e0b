"""The learning rate of a method: one number, or the best of several on held-out examples."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from fathom.data import PreparedData
from fathom.tasks import Score
from fathom.train.recipe import MethodConfig, Recipe, candidates
from fathom.train.result import TrainResult
from fathom.train.trainer import train_run


@dataclass(frozen=True)
class LearningRateSweep:
    """The result of a sweep.

    Attributes:
        best: the candidate with the best headline score of the task; among equal ones, the lowest held-out loss.
        trials: every candidate's run, in the recipe's order; empty if there was no choice.
        at_edge: the best is the smallest or largest candidate, so a better one may lie outside.
    """

    best: float
    trials: tuple[TrainResult, ...] = ()

    @property
    def at_edge(self) -> bool:
        candidates = [trial.lr for trial in self.trials]
        return bool(candidates) and self.best in (min(candidates), max(candidates))


def try_lr(
    recipe: Recipe, method: MethodConfig, lr: float, *, seed: int, folder: str | Path, data: PreparedData
) -> TrainResult:
    """The run of one candidate of a sweep: `sweep_fraction` of the training with a full schedule, or loaded if
    finished.

    A second process that wants the same trial waits for the first. Raises ValueError without held-out examples.
    """
    if data.validation is None:
        raise ValueError(f"lr={lr:g}: a sweep needs {recipe.task.held_out}; set data.validation or one training.lr")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # ranks of one run share the folder, and wait for each other
    with FileLock(folder / f"lr-{lr:g}.lock") if alone else contextlib.nullcontext():
        return train_run(
            recipe, method, seed=seed, folder=folder / f"lr-{lr:g}", data=data, lr=lr, tokens=recipe.trial_tokens(data)
        )


def sweep_lr(
    recipe: Recipe, method: MethodConfig, *, seed: int, folder: str | Path, data: PreparedData
) -> LearningRateSweep:
    """The sweep over a method's learning rates: every candidate is tried if there are several; one that diverges loses.

    Trials are kept in `folder`, finished ones are not repeated. Raises ValueError without held-out examples or if every
    candidate diverges.
    """
    rates = candidates(recipe, method)
    if len(rates) == 1:
        return LearningRateSweep(rates[0])
    trials = [try_lr(recipe, method, lr, seed=seed, folder=folder, data=data) for lr in rates]
    return best_of(method, trials, recipe.task.headline)


def best_of(method: MethodConfig, trials: Sequence[TrainResult], score: Score) -> LearningRateSweep:
    """The sweep with these trials, judged by `score`. Raises ValueError if all of them diverged."""

    def badness(trial: TrainResult) -> tuple[float, float]:
        value = trial.scores[score.name]
        if value is None or trial.validation_loss is None:
            return math.inf, math.inf
        return score.loss(value), trial.validation_loss

    best = min(trials, key=badness)
    if badness(best)[0] == math.inf:
        rates = [trial.lr for trial in trials]
        raise ValueError(f"training.lr={rates!r}: {method.name} diverges with every candidate; try smaller ones")
    return LearningRateSweep(best.lr, tuple(trials))
