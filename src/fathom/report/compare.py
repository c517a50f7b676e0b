"""`fathom compare`: sweep, train and measure every model of a recipe, with one process for each device.

    runs/<name>/results.json, report.html, plots/
    runs/<name>/<method>/sweep/lr-…               candidates of the learning-rate sweep
    runs/<name>/<method>/tokens-…-seed-…          one run; train/trainer.py says what is in it

Every run can be killed at any moment. Rerun the command to resume: it skips finished runs and continues broken ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from fathom.data import PreparedData
from fathom.data.prepared import named_held_out
from fathom.report.downstream import has_downstream, summary
from fathom.report.measure import measure
from fathom.report.page import write_report
from fathom.report.plan import Planned, plan
from fathom.report.processes import devices_of, run_jobs, workers
from fathom.report.results import Results, Run, Trial, tables
from fathom.train import (
    LearningRateSweep,
    MethodConfig,
    Recipe,
    TrainResult,
    best_of,
    candidates,
    check_extras,
    load_recipe,
    model_config,
    try_lr,
)


def compare(path: Path, output: Path, jobs: int = 1, say: Callable[[str], None] = print) -> Results:
    """Run the comparison that the recipe at `path` describes and write `output/<name>/`.

    Args:
        jobs: number of runs at a time, each in its own process. If there are more of them than GPUs they share GPUs:
            small models finish sooner, but their tokens/s are then those of a shared device, as the results note.
        say: receives one line of progress at a time.

    A run that fails is recorded in the results and does not stop the others.

    Raises:
        OSError, ValueError: the recipe or its text cannot be used, or no run finished.
    """
    recipe = load_recipe(path)
    if recipe.data.validation is None:
        raise ValueError(f"{path}: data.validation is null; a comparison needs {recipe.task.held_out}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fathom compare starts its own processes: run it without torchrun and give --jobs")
    devices = devices_of(jobs)
    side_by_side = max(Counter(devices).values())
    disable_progress_bar()  # of transformers: a bar for every model read back
    check_extras(recipe.training)
    for method in recipe.methods:  # a wrong option is found before the text is tokenised
        model_config(recipe, method)
    if recipe.downstream is not None:
        recipe.downstream.load()
    task = recipe.task
    data = task.prepare(recipe.data, output / ".data")
    for note in data.notes:
        say(note)
    planned = plan(recipe, data)
    folder = output / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    assert data.validation is not None
    results = Results(
        name=recipe.name,
        recipe=path.read_text(encoding="utf-8"),
        command=f"fathom compare {path}",
        block_size=recipe.data.block_size,
        validation=f"{', '.join(text for _, text, _ in named_held_out(recipe.data))}, {task.held_out_size(data)}",
        reference=task.reference(data, recipe.training_tokens(data) // recipe.data.block_size),
        task=task.section,
        scores=task.scores,
        notes=list(data.notes),
    )
    say(f"{task.reference_name.capitalize()} baseline: {results.reference:.3f} {task.headline.unit}")

    models = {model.model_folder: model for model in planned}
    jobs_left: dict[str, tuple[Any, ...]] = {}
    tried: dict[str, tuple[str, float]] = {}  # by trial: the model whose learning rate it tries, and the rate
    sweeps: dict[str, dict[float, TrainResult | None]] = {}  # by model: its candidates and what came of them
    trials_of: dict[str, list[Trial]] = {}
    failures: list[str] = []
    finished: dict[str, Run] = {}

    def runs_of(name: str, lr: float) -> dict[str, tuple[Any, ...]]:
        runs = [run for run in planned if run.model_folder == name]  # by folder: budgets that ask for the same share it
        return {run.folder: (measure, run, lr, recipe, data, folder, side_by_side) for run in runs}

    for name, model in models.items():
        rates = candidates(recipe, model.method)
        if len(rates) == 1:
            jobs_left.update(runs_of(name, rates[0]))
            continue
        sweeps[name] = dict.fromkeys(rates)
        for lr in rates:
            where = f"{name}/sweep/lr-{lr:g}"
            tried[where] = name, lr
            jobs_left[where] = (_try, model.method, lr, recipe, data, folder / name / "sweep")

    with workers(devices) as pool:
        for job, outcome in run_jobs(jobs_left, pool, len(devices), folder):
            if job in tried and not isinstance(outcome, Exception):
                name, lr = tried[job]
                sweeps[name][lr] = outcome
                done = [trial for trial in sweeps[name].values() if trial is not None]
                if len(done) < len(sweeps[name]):
                    continue
                try:
                    sweep = best_of(models[name].method, done, task.headline)
                except ValueError as error:
                    failures.append(f"{name}: {error}")
                    continue
                trials_of[name] = _trials(models[name], sweep)
                results = replace(results, trials=[t for m in models for t in trials_of.get(m, ())])
                later = dict(jobs_left)  # row after row is finished, so that a comparison cut short has the first ones
                jobs_left.clear()
                jobs_left.update(runs_of(name, sweep.best) | later)
            elif isinstance(outcome, Exception):
                failures.append(f"{job}: {outcome}")
                say(f"{job} failed: {outcome}")
            else:
                finished[job] = outcome
                runs = [
                    replace(finished[p.folder], budget=p.budget, residual_percent=p.residual_percent)
                    for p in planned
                    if p.folder in finished
                ]
                results = replace(results, failures=failures, runs=runs)
                results.save(folder / "results.json")
                said = ", ".join(
                    f"{outcome.scores[score.name]:.3f} {score.unit_of(outcome.exact)}" for score in task.scores
                )
                say(f"{job}: {said} ({len(finished)} done)")
    if not finished:
        raise ValueError(f"no run of {path} finished; the first failure: {failures[0]}")
    remarks = [f"{run.folder}: {remark}" for run in results.runs for remark in task.remarks(run.scores)]
    results = replace(results, failures=failures, notes=[*results.notes, *dict.fromkeys(remarks)])
    results = replace(results, downstream={t.budget: summary(t) for t in tables(results) if has_downstream(t)})
    results.save(folder / "results.json")
    write_report(results, folder)
    return results


def _try(method: MethodConfig, lr: float, recipe: Recipe, data: PreparedData, folder: Path) -> TrainResult:
    return try_lr(recipe, method, lr, seed=recipe.seeds[0], folder=folder, data=data)


def _trials(model: Planned, sweep: LearningRateSweep) -> list[Trial]:
    return [
        Trial(
            model.method.name,
            model.layers,
            trial.lr,
            trial.tokens,
            trial.validation_loss,
            trial.lr == sweep.best,
            trial.scores,
        )
        for trial in sweep.trials
    ]
