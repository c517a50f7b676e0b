"""Which run a folder is of: run.json says what decides the trained weights, and a folder of another run is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets

from fathom.data import PreparedData
from fathom.data.mixing import MixedBlocks
from fathom.models.configuration import FathomConfig
from fathom.tasks import DEFAULT, tasks
from fathom.train import complete_checkpoints as checkpoints
from fathom.train.metrics import read_metrics
from fathom.train.recipe import MethodConfig, Recipe, Training
from fathom.train.result import MODEL
from fathom.writing import write_json

ROWS_SEEN = 256  # of a data set, to tell it from another one
READ = ("input_ids", "labels")  # columns of these
# Settings that change what is written and how fast, not what is learned: they may differ when a run is resumed.
_FREE = (
    "lr",
    "tokens",
    "examples",
    "sweep_fraction",
    "log_every",
    "eval_every",
    "save_every",
    "keep",
    "num_workers",
    "tensorboard",
    "report_to",
)


def identity(
    recipe: Recipe,
    method: MethodConfig,
    config: FathomConfig,
    seed: int,
    lr: float,
    steps: int,
    tokens_per_step: int,
    prepared: PreparedData,
) -> dict[str, Any]:
    """Everything that decides the trained weights, and the number of processes, which decides their last digits."""
    data = dataclasses.asdict(recipe.data)
    data.pop("num_proc")
    data["content"] = content(prepared)  # of files that may change under their names
    if method.weights is not None:
        for name, source in data["train"].items():
            source["weight"] = method.weights.get(name, 0.0)
    training = {key: value for key, value in dataclasses.asdict(recipe.training).items() if key not in _FREE}
    training["trains"] = recipe.trains(method)
    if training["trains"] != "lora":
        training.pop("lora")
    if training["optimizer"] == "adamw":  # runs of versions that had no other say nothing of it
        training.pop("optimizer")
    if training["eps"] == Training.eps:
        training.pop("eps")
    model = {key: value for key, value in config.to_diff_dict().items() if not key.endswith("_version")}
    model["checkpoint"] = recipe.model.get("checkpoint")
    spec = {"method": method.name, "seed": seed, "lr": lr, "steps": steps, "tokens_per_step": tokens_per_step}
    spec["processes"] = processes()
    spec["task"] = recipe.task.section
    return json.loads(json.dumps({**spec, "model": model, "data": data, "training": training}, default=str))


def content(data: PreparedData) -> list[str]:
    """Digests of token ids and labels in some rows of every data set that is trained on, and of what is held out; of
    the whole where it is short, and the digest of files that rows name. A text that changes moves all that follows it
    to other rows."""
    parts = list(data.train.sources.values()) if isinstance(data.train, MixedBlocks) else [data.train]
    digests = [data.files] if data.files else []
    for rows in (*parts, data.validation):
        if not isinstance(rows, datasets.Dataset) or not len(rows):  # made as they are read, by options of run.json
            continue
        chosen = sorted({*range(0, len(rows), max(1, len(rows) // ROWS_SEEN)), len(rows) - 1})
        table = rows.with_format("arrow")[chosen]
        read = [len(rows), *(table[name].to_pylist() for name in READ if name in table.column_names)]
        digests.append(hashlib.sha256(repr(read).encode()).hexdigest()[:16])
    return digests


def claim(folder: Path, spec: dict[str, Any], write: bool) -> None:
    """Write run.json, or raise ValueError if the folder holds another run that has trained.

    The number of processes only affects rounding and which random numbers are drawn, so a run may be resumed with
    another number.
    """
    path = folder / "run.json"
    if path.exists() and has_trained(folder):
        stored, wanted = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(spec)
        stored.setdefault("task.name", DEFAULT)
        for key, value in {"training.trains": "all", "data.atoms": []}.items():  # of a time without the field
            stored.setdefault(key, value)
        task = tasks().get(stored["task.name"])  # None: one of somebody's own, not registered here
        for option in () if task is None else dataclasses.fields(task):  # one that came later was at its default
            if option.default is not dataclasses.MISSING:
                stored.setdefault(f"task.{option.name}", json.loads(json.dumps(option.default)))
        stored["processes"] = wanted["processes"]
        stored["data.content"] = stored.get("data.content") or wanted["data.content"]  # earlier: none
        changed = [key for key in {**stored, **wanted} if stored.get(key) != wanted.get(key)]
        if changed:
            key, more = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise ValueError(
                f"{folder} holds another run: its {key} is {stored.get(key)!r}, now {wanted.get(key)!r}{more}; "
                "delete the folder or change the recipe's name"
            )
    elif write:
        write_json(path, spec)


def has_trained(folder: Path) -> bool:
    """Whether a run's folder holds metrics of a step, a checkpoint or a model, which a run with other settings must not
    mix with. A run that failed before its first step leaves none."""
    return bool(read_metrics(folder) or checkpoints.checkpoints(folder)) or (folder / MODEL).is_dir()


def processes() -> int:
    """The number of processes that train this model together, as torchrun or accelerate launch sets it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, item in value.items():
        flat.update(_flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item})
    return flat
