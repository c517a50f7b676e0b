"""One run of a comparison: train it unless it is trained already, and record all that the report shows about it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from fathom.data import PreparedData
from fathom.evaluate.downstream import Accuracy
from fathom.inspect import StepMap, offered
from fathom.models.device import device_of
from fathom.report.plan import Planned, inference_flops
from fathom.report.provenance import provenance
from fathom.report.results import Run
from fathom.tasks.base import with_scores
from fathom.train import MethodConfig, Recipe, TrainResult, model_config, train_run
from fathom.train.complete_checkpoints import checkpoints
from fathom.train.result import MODEL
from fathom.writing import whole

MEASURED = "measured.json"
DOWNSTREAM = "downstream.json"
PROVENANCE = "provenance.json"  # versions, commit and device that the run began with
PICTURE_TOKENS = 16_384


def measure(
    planned: Planned, lr: float, recipe: Recipe, data: PreparedData, folder: Path, side_by_side: int = 1
) -> Run:
    """The run of `planned` in `folder` (the comparison's): finished ones are read, broken ones resumed.

    side_by_side: number of runs that share the device, which is recorded with its name.

    Raises ValueError if the loss diverged, and whatever `train_run` raises.
    """
    where = folder / planned.folder
    where.mkdir(parents=True, exist_ok=True)
    goes_on = checkpoints(where) or (where / MODEL).is_dir()  # else it trains from the first step on, whatever it wrote
    if not ((where / PROVENANCE).exists() and goes_on):  # a later resume or report must not sign for it
        _write(where / PROVENANCE, provenance(side_by_side))
    result = train_run(recipe, planned.method, seed=planned.seed, folder=where, data=data, lr=lr, tokens=planned.tokens)
    try:
        measured = json.loads((where / MEASURED).read_text(encoding="utf-8"))
        measured["pictures"]  # or it is of an earlier version
        run = Run.read(measured)
    except (FileNotFoundError, KeyError, TypeError):  # not yet measured, or by another version of this file
        began_with = json.loads((where / PROVENANCE).read_text(encoding="utf-8"))
        run = _describe(planned, result, recipe, data, began_with)
        _write(where / MEASURED, with_scores(dataclasses.asdict(run)))
    if recipe.downstream is not None:
        scores = downstream_scores(recipe, planned.method, result, data)
        run = dataclasses.replace(run, downstream={name: dataclasses.asdict(score) for name, score in scores.items()})
    return dataclasses.replace(run, budget=planned.budget, residual_percent=planned.residual_percent)


def downstream_scores(
    recipe: Recipe, method: MethodConfig, result: TrainResult, data: PreparedData
) -> dict[str, Accuracy]:
    """A run's accuracy on each task of the recipe's `downstream`, kept in a file of their own: a finished run may be
    asked other tasks later."""
    assert recipe.downstream is not None
    path, digest = result.folder / DOWNSTREAM, recipe.downstream.digest()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        kept = {"digest": None}
    if kept["digest"] != digest:
        made: Any = recipe.task.class_of(model_config(recipe, method, data.tokenizer))
        model = made.from_pretrained(result.model).eval().to(device_of())
        found = recipe.downstream.measure(model, data.tokenizer)
        kept = {"digest": digest, "scores": {name: dataclasses.asdict(score) for name, score in found.items()}}
        _write(path, kept)
    return {name: Accuracy(**score) for name, score in kept["scores"].items()}


def _describe(
    planned: Planned, result: TrainResult, recipe: Recipe, data: PreparedData, began_with: dict[str, Any]
) -> Run:
    task, scores = recipe.task, {name: value for name, value in result.scores.items() if value is not None}
    if len(scores) < len(result.scores) or result.validation_loss is None:
        raise ValueError(f"the held-out loss is not finite at lr {result.lr:g}; try a smaller training.lr")
    config = model_config(recipe, planned.method, data.tokenizer)
    history = [
        {key: line[key] for key in ("tokens", "train_flops", "loss")}
        for line in result.history
        if line.get("loss") is not None
    ]
    model: Any = task.class_of(config).from_pretrained(result.model)
    model.eval().to(device_of())
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    tail = history[-max(1, len(history) // 10) :]
    pictures = {
        kind.name: kind.measure(
            model, data.tokenizer, task.picture_tokens(data, PICTURE_TOKENS), recipe.data.block_size
        )
        for kind in offered(config)
    }
    ran = getattr(pictures.get(StepMap.name), "ran", None)  # what tokens that stop on their own really cost
    pieces = task.pieces(model, data)
    sizes = task.sizes(config, recipe.data.block_size, dtype, ran)
    return Run(
        method=planned.method.name,
        options=task.sections(config),
        budget=planned.budget,
        seed=planned.seed,
        lr=result.lr,
        layers=planned.layers,
        scores=scores,
        validation_loss=result.validation_loss,
        train_loss=statistics.fmean(point["loss"] for point in tail),
        params=sizes.parameters,
        non_embedding_params=sizes.non_embedding,
        train_tokens=result.tokens,
        train_flops=result.train_flops,
        inference_flops_per_token=sizes.flops_per_token,
        answer_flops=inference_flops(config, recipe, data, ran),
        train_examples=result.tokens / recipe.data.block_size * data.examples_per_sequence,
        kv_bytes_per_token=sizes.cache_bytes_per_token,
        tokens_per_second=result.tokens_per_second,
        peak_memory_bytes=result.peak_memory_bytes,
        tokens_per_second_interval=result.tokens_per_second_interval,
        interruptions=result.interruptions,
        busy=result.busy,
        seconds=result.seconds,
        history=history,
        pictures={name: dataclasses.asdict(picture) for name, picture in pictures.items()},
        samples=[
            {key: text for key, text in dataclasses.asdict(sample).items() if text is not None}
            for sample in task.samples(model, data, recipe.data.block_size)
        ],
        folder=planned.folder,
        again=planned.again,
        held_out={} if pieces is None else dataclasses.asdict(pieces),
        exact=task.exact(config),
        error=task.error(model, data),
        **began_with,
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
