"""A recipe in stages: several trainings of one method, each of which may start from the model of an earlier one.

name: codar
data: {…}                                   what all stages share; a stage's own fields lie over it
stages:
  encoder: {task: masked_diffusion, model: {…}, training: {…}}
  denoiser: {task: latent_diffusion, model: {encoder: stage:encoder, …}, data: {tokenizer: stage:encoder}, …}

`stage:NAME` is replaced by the folder of that stage's trained model with the same seed. A stage is an ordinary recipe
with one method. Rerun the command to resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom.models.registry import nearest
from fathom.train.loading import build, check_keys, convert, parse_yaml
from fathom.train.recipe import Recipe, one_training
from fathom.train.result import TrainResult
from fathom.train.trainer import train_run

REFERENCE = "stage:"
SHARED = ("data",)


@dataclass(frozen=True)
class Stages:
    """Stages in the order in which they run.

    Attributes:
        stages: raw recipes by name.
        seeds: each trains all stages.
        more: other sections of the file, for the command that reads it.
    """

    name: str
    stages: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    more: dict[str, Any]

    def recipe(self, name: str, models: dict[str, Path]) -> Recipe:
        """The recipe of a stage, given the folders of earlier stages' models."""
        return build(Recipe, replaced(self.stages[name], models, f"stages.{name}"))


def load_stages(path: str | Path, sections: tuple[str, ...] = ()) -> Stages:
    """The stages in a YAML file, which may have further `sections`.

    Raises OSError if the file cannot be read; ValueError, naming the key, if it is no recipe in stages.
    """
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or not isinstance(raw.get("stages"), dict) or not raw["stages"]:
            raise ValueError("stages is missing: give a mapping from names to recipes")
        check_keys(raw, ["name", "stages", "seeds", *SHARED, *sections], "")
        shared = {key: raw[key] for key in SHARED if key in raw}
        stages: dict[str, dict[str, Any]] = {}
        for name, stage in raw["stages"].items():
            if not isinstance(stage, dict):
                raise ValueError(f"stages.{name}={stage!r}: give a recipe")
            data = {**shared.get("data", {}), **stage.get("data", {})}
            stages[name] = {"name": name, **stage, "data": data}
            replaced(stages[name], dict.fromkeys(list(stages)[:-1], Path()), f"stages.{name}")  # no later one is named
        seeds = convert(raw.get("seeds", [0]), tuple[int, ...], "seeds")
        more = {key: raw[key] for key in sections if key in raw}
        found = Stages(str(raw.get("name", Path(path).stem)), stages, seeds, more)
        for name in stages:  # a mistake in the last one is told before the first one trains
            one_training(found.recipe(name, dict.fromkeys(stages, Path())), f"stages.{name}", "`seeds` of the file")
        return found
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def run_stages(
    stages: Stages, output: Path, seed: int, say: Callable[[str], None] = print
) -> dict[str, tuple[Recipe, TrainResult]]:
    """Train every stage with this seed, in `output/<name>/seed-<seed>/<stage>`; finished stages are loaded."""
    found: dict[str, tuple[Recipe, TrainResult]] = {}
    for name in stages.stages:
        recipe = stages.recipe(name, {other: result.model.resolve() for other, (_, result) in found.items()})
        (method,) = recipe.methods
        data = recipe.task.prepare(recipe.data, output / ".data")
        folder = output / stages.name / f"seed-{seed}" / name
        result = train_run(recipe, method, seed=seed, folder=folder, data=data)
        scores = ", ".join(f"{key} {value:.4f}" for key, value in result.scores.items() if value is not None)
        say(f"{name}: {result.tokens:,} tokens, {scores}")
        for remark in recipe.task.remarks(result.scores):
            say(f"{name}: {remark}")
        found[name] = recipe, result
    return found


def replaced(value: Any, models: dict[str, Path], where: str) -> Any:
    """The value with `stage:NAME` replaced by folders. Raises ValueError for a name that no earlier stage has."""
    if isinstance(value, dict):
        return {key: replaced(item, models, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, models, where) for item in value]
    if isinstance(value, str) and value.startswith(REFERENCE):
        name = value.removeprefix(REFERENCE)
        if name not in models:
            known = ", ".join(models) or "none"
            raise ValueError(
                f"{where}={value!r}: no stage before it has this name{nearest(name, list(models))}; {known}"
            )
        return str(models[name])
    return value
