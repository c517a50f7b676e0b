"""A recipe to `results.json` and `report.html`: sweep, train and measure every model of it, one process a device.

    runs/<name>/results.json, report.html, plots/
    runs/<name>/<method>/sweep/lr-…               candidates of the learning-rate sweep
    runs/<name>/<method>/tokens-…-seed-…          one run; train/trainer.py says what is in it

Every run can be killed at any moment: the same command skips what is finished and resumes what is broken.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from fathom.data import PreparedData
from fathom.data.prepared import named_held_out
from fathom.report.measure import measure
from fathom.report.page import write_report
from fathom.report.plan import Planned, plan
from fathom.report.results import Results, Run, Trial
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
from fathom.writing import naming


def compare(path: Path, output: Path, jobs: int = 1, say: Callable[[str], None] = print) -> Results:
    """Run the comparison that the recipe at `path` describes and write `output/<name>/`.

    Args:
        jobs: runs side by side, each in a process of its own. More than there are GPUs share them: small models are
            done sooner so, but their tokens/s are then those of a shared device, which the results say.
        say: receives one line of progress at a time.

    A run that fails is noted in the results and does not stop the others.

    Raises:
        OSError, ValueError: a recipe or text that cannot be used, or not one run that finished.
    """
    recipe = load_recipe(path)
    if recipe.data.validation is None:
        raise ValueError(f"{path}: data.validation is null; a comparison needs {recipe.task.held_out}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fathom compare starts its own processes: run it without torchrun and give --jobs")
    devices = _devices(jobs)
    side_by_side = max(Counter(devices).values())
    disable_progress_bar()  # of transformers: a bar for every model read back
    check_extras(recipe.training)
    for method in recipe.methods:  # a wrong option is found before the text is tokenised
        model_config(recipe, method)
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

    with _workers(devices) as pool:
        for job, outcome in _run(jobs_left, pool, len(devices), folder):
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
                said = ", ".join(f"{outcome.scores[score.name]:.3f} {score.unit}" for score in task.scores)
                say(f"{job}: {said} ({len(finished)} done)")
    if not finished:
        raise ValueError(f"no run of {path} finished; the first failure: {failures[0]}")
    remarks = [f"{run.folder}: {remark}" for run in results.runs for remark in task.remarks(run.scores)]
    results = replace(results, failures=failures, notes=[*results.notes, *dict.fromkeys(remarks)])
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


def _devices(jobs: int) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each process: the GPUs in turn; None on a machine without GPUs."""
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be at least 1")
    count = torch.cuda.device_count()
    if not count:
        return [None] * jobs
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    return [visible[job % count] for job in range(jobs)]


@contextlib.contextmanager
def _workers(devices: list[str | None]) -> Iterator[ProcessPoolExecutor | None]:
    """A process a device; None where there is one device and this process may use it whole."""
    if len(devices) == 1 and torch.cuda.device_count() <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    free = context.Queue()
    for device in devices:
        free.put(device)
    pool = ProcessPoolExecutor(len(devices), context, _start_worker, (free, len(devices)))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _run(
    tasks: dict[str, tuple[Any, ...]], pool: ProcessPoolExecutor | None, workers: int, folder: Path
) -> Iterator[tuple[str, Any]]:
    """(name, result or Exception) of every task (function, *arguments), as they finish. Without a pool: here.

    Takes the tasks out of `tasks` from the front, one when a worker is free; it may be given more while this runs.
    """
    if pool is None:
        while tasks:
            name = next(iter(tasks))
            function, *arguments = tasks.pop(name)
            try:
                yield name, function(*arguments)
            except Exception as error:
                yield name, _described(error)
        return
    futures: dict[Future, str] = {}
    while tasks or futures:
        while tasks and len(futures) < workers:
            name = next(iter(tasks))
            try:
                futures[pool.submit(_logged, folder, name, *tasks.pop(name))] = name
            except BrokenExecutor as error:  # a process was killed, and took the pool with it
                yield name, _described(error)
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            failed = future.exception()
            yield futures.pop(future), future.result() if failed is None else _described(failed)


def _described(error: BaseException) -> Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _start_worker(free: Any, jobs: int) -> None:
    """Take a device before CUDA starts, share the cores, and end with the parent, however that ends."""
    device = free.get()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    disable_progress_bar()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _logged(folder: Path, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The task with its output in a file: the displays of several processes cannot share a terminal."""
    log = folder / "logs" / f"{name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with naming(log), log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        return function(*arguments)
