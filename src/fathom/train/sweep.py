"""The learning rate of a method: one number, or the best of several on held-out text."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from fathom.data import PreparedData
from fathom.train.recipe import MethodConfig, Recipe
from fathom.train.trainer import TrainResult, train_run


@dataclass(frozen=True)
class LearningRateSweep:
    """What a sweep found.

    Attributes:
        best: the candidate with the lowest held-out loss.
        trials: every candidate's run, in the recipe's order; empty if there was no choice.
        at_edge: the best is the smallest or largest candidate, so a better one may lie outside.
    """

    best: float
    trials: tuple[TrainResult, ...] = ()

    @property
    def at_edge(self) -> bool:
        candidates = [trial.lr for trial in self.trials]
        return bool(candidates) and self.best in (min(candidates), max(candidates))


def sweep_lr(
    recipe: Recipe, method: MethodConfig, *, seed: int, folder: str | Path, data: PreparedData
) -> LearningRateSweep:
    """Train every candidate on `sweep_fraction` of the tokens, each with its full schedule, and compare held-out loss.

    Candidates are the method's `lr`, else `training.lr`; one that diverges loses. Trials are kept in `folder`, finished
    ones are not repeated, and a second process that wants the same sweep waits for the first. Raises ValueError without
    held-out text or if every candidate diverges.
    """
    candidates = recipe.training.lr if method.lr is None else method.lr
    if not isinstance(candidates, tuple):
        return LearningRateSweep(candidates)
    if len(candidates) == 1:
        return LearningRateSweep(candidates[0])
    if data.validation is None:
        raise ValueError(f"training.lr={list(candidates)!r}: a sweep needs held-out text; set data.validation")
    tokens = int(recipe.training.tokens * recipe.training.sweep_fraction)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # ranks of one run share the folder, and wait for each other
    with FileLock(folder / ".lock") if alone else contextlib.nullcontext():
        trials = [
            train_run(recipe, method, seed=seed, folder=folder / f"lr-{lr:g}", data=data, lr=lr, tokens=tokens)
            for lr in candidates
        ]
    losses = [math.inf if trial.validation_loss is None else trial.validation_loss for trial in trials]
    if min(losses) == math.inf:
        raise ValueError(
            f"training.lr={list(candidates)!r}: {method.name} diverges with every candidate; try smaller ones"
        )
    return LearningRateSweep(candidates[losses.index(min(losses))], tuple(trials))
