"""Facts about a finished training, saved beside the model for its card (models/model_card.py)."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from fathom.version import __version__

if TYPE_CHECKING:
    from fathom.data import PreparedData
    from fathom.train.recipe import MethodConfig, Recipe
    from fathom.train.result import TrainResult


def training_facts(
    recipe: Recipe, method: MethodConfig, result: TrainResult, data: PreparedData, config: Any
) -> dict[str, Any]:
    """Recipe, data, length and scores of a run, as JSON. Local files are given by name, without their path."""
    checkpoint = recipe.model.get("checkpoint")
    training = {**_said(recipe.training), "tokens": result.tokens, "lr": result.lr}
    for name in ("examples", "report_to", "tensorboard", "num_workers"):  # what no weight depends on
        training.pop(name, None)
    section = {"name": recipe.task.name, **_said(recipe.task)}
    said = {
        "name": recipe.name,
        "model": recipe.model,
        "methods": [{"name": method.name, **method.fields}],
        "task": section,
        "data": {"train": recipe.data.train, "validation": recipe.data.validation, **_said(recipe.data)},
        "training": training,
        "seeds": [result.seed],
    }
    return {
        "recipe": _shared(said),
        "base_model": None if checkpoint is None else _shared(checkpoint),
        "license": recipe.license,
        "seed": result.seed,
        "steps": result.steps,
        "tokens": result.tokens,
        "train_flops": result.train_flops,
        "held_out": f"{recipe.task.held_out} ({recipe.task.held_out_size(data)})" if data.validation else "nothing",
        "held_out_name": _shared(str(recipe.data.validation)),
        "scores": [
            {
                "name": score.name,
                "value": result.scores.get(score.name),
                "unit": score.unit_of(recipe.task.exact(config)),
                "meaning": score.meaning.format(block_size=recipe.data.block_size),
            }
            for score in recipe.task.scores
        ],
        "notes": result.notes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU ({platform.machine()})",
        "versions": {"fathom": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _said(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    found = {}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        made = field.default_factory() if callable(field.default_factory) else field.default  # type: ignore[misc]
        if given != made:
            found[field.name] = dataclasses.asdict(given) if dataclasses.is_dataclass(given) else given  # type: ignore[arg-type]
    return found


def _shared(value: Any) -> Any:
    """A value as it may be published: a path on this machine becomes a name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _shared(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): _shared(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(item) for item in value]
    if isinstance(value, str) and Path(value).name != value and (Path(value).is_absolute() or Path(value).exists()):
        return Path(value).name
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
