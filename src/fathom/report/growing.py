"""Runs a comparison of growth methods (growths.py): every unit in a folder of its own, several at a time.

    <output>/<name>/base, <stage>-<digest>      a folder a stage; methods that begin alike share it and each pays
    <output>/<name>/growths.json

A stage is a run that resumes; a rerun of the command skips finished ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fathom.cost import parameter_counts
from fathom.data import DataConfig, PreparedData, load_tokenizer
from fathom.evaluate import load_checkpoint
from fathom.evaluate.tool_calls import evaluate_tool_calls, read_questions
from fathom.growth.grow import grow
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.device import device_of
from fathom.report.growths import (
    BASE,
    TEXT,
    Asked,
    Growths,
    Unit,
    all_ways,
    base_recipe,
    base_unit,
    data_of,
    named,
    plan,
)
from fathom.report.processes import devices_of, run_jobs, workers
from fathom.report.style import styles
from fathom.tasks.causal_lm import bits_of_loss, loss_of_blocks
from fathom.tools import load_tools
from fathom.train import Recipe, TrainResult, model_config, train_run
from fathom.train.complete_checkpoints import checkpoints
from fathom.train.result import RESULT
from fathom.writing import whole, write_json

TOKENIZER = "tokenizer"
RESULTS = "growths.json"
GROWN = "growth.json"  # in the folder of a grown checkpoint
SCORES = "scores.json"
JUDGED = "judged_by.json"  # beside it: what the scores are of
KEPT = 0.99  # of the general ability, that Innovator's paper keeps
SHARES = ("calls", "answer", "answer_without_tools")  # of what is asked


def run_growths(
    recipe: Growths,
    output: Path,
    jobs: int = 1,
    say: Callable[[str], object] = print,
    minutes: float | None = None,
) -> dict[str, Any]:
    """Train the base, then every stage of every method. Returns the content of `growths.json`.

    Args:
        jobs: number of stages and branches at a time, each in its own process.
        minutes: time after which no stage is started; rerun to resume with the remaining ones.

    Raises ValueError, before anything trains, for a recipe whose parts do not fit together.
    """
    folder = output / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    cache = output / ".data"
    base, base_data = _base(recipe, cache, folder)
    if recipe.asked is not None:
        asked_of(recipe.asked)
    held = {
        group: {name: _held_out(recipe, text, cache, folder) for name, text in texts.items()}
        for group, texts in recipe.held_out.items()
    }
    units = {unit.name: unit for unit in (base, named(Unit("score", "score", base.config, base.name)))}
    ways = all_ways(recipe)
    plans = {BASE: list(units.values())}
    for name, seed in ways:
        plans[f"{name}, seed {seed}"] = plan(recipe, ways[name, seed], seed, base)
    for planned in plans.values():
        units.update({unit.name: unit for unit in planned})
    prepared = {_reads(base): base_data}  # by what it is; methods read much of it in common
    for unit in units.values():
        if unit.kind == "train" and _reads(unit) not in prepared:
            prepared[_reads(unit)] = unit.task.prepare(_data(recipe, folder, unit), cache)
    waiting = list(units)  # every method's first seed in the order of the recipe, then further seeds, if time runs out
    ready: dict[str, tuple[Any, ...]] = {}
    running: set[str] = set()
    done: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    devices = devices_of(jobs)

    begun = time.monotonic()

    def late() -> bool:
        return minutes is not None and time.monotonic() - begun > 60 * minutes

    def offer() -> None:
        for name in list(waiting):
            if len(running) == len(devices):
                return
            if late() and not any((folder / name / file).is_file() for file in (RESULT, GROWN, SCORES)):
                continue
            if all(need in done for need in units[name].needs):
                waiting.remove(name)
                running.add(name)
                ready[name] = carry_out, units[name], recipe, folder, prepared.get(_reads(units[name])), held

    offer()
    with workers(devices) as pool:
        for name, outcome in run_jobs(ready, pool, len(devices), folder):
            running.discard(name)
            if isinstance(outcome, Exception):
                failures.append(f"{name}: {outcome}")
                say(f"{name} failed: {outcome}")
            else:
                done[name] = outcome
                say(f"{name}: {_said(units[name].kind, outcome)}")
                write_json(folder / RESULTS, _results(recipe, plans, units, done, failures))
            offer()
    if waiting and late():
        say(f"{len(waiting)} stages did not begin: {minutes:g} minutes were over. Rerun the command to resume.")
    if not done:
        raise ValueError(f"no stage finished; the first failure: {failures[0] if failures else 'none began'}")
    results = _results(recipe, plans, units, done, failures)
    write_json(folder / RESULTS, results)
    return results


def carry_out(
    unit: Unit, recipe: Growths, folder: Path, data: PreparedData | None, held: dict[str, dict[str, PreparedData]]
) -> dict[str, Any]:
    """Do the work of a unit, unless it is done already."""
    home = folder / unit.name
    if unit.kind == "given":
        return {"checkpoint": recipe.base["checkpoint"]}
    start = model_of(recipe, folder, unit.start) if unit.start else None
    if unit.kind == "grow":
        assert unit.growth is not None and start is not None
        if not (home / GROWN).is_file():
            branches = [model_of(recipe, folder, branch) for branch in unit.branches]
            grow(start, unit.growth, home, branches, unit.seed, unit.texts)
        return json.loads((home / GROWN).read_text(encoding="utf-8"))
    if unit.kind == "score":
        assert start is not None
        judged = _judged_by(held, unit.asked)
        if not _is_scored(home, recipe, judged):
            home.mkdir(exist_ok=True)
            (home / SCORES).unlink(missing_ok=True)
            found = scores(start, held, recipe.training.precision)
            if unit.asked is not None:
                found["asked"] = answered(start, unit.asked)
            write_json(home / JUDGED, judged)
            write_json(home / SCORES, found)
        return json.loads((home / SCORES).read_text(encoding="utf-8"))
    assert data is not None
    whole = base_recipe(recipe) if start is None else _stage_recipe(recipe, folder, unit, start)
    result = train_run(whole, whole.methods[0], seed=unit.seed, folder=home, data=data)
    for checkpoint in checkpoints(home):  # to resume from: several times the model's size
        shutil.rmtree(checkpoint)
    return _of_training(result)


def _judged_by(held: dict[str, dict[str, PreparedData]], asked: Asked | None) -> dict[str, Any]:
    """What scores depend on beside the model: digests of the held-out texts, and of the files that questions are in."""
    texts: dict[str, dict[str, str]] = {}
    for group, members in held.items():
        for name, data in members.items():
            assert data.validation is not None
            digest = hashlib.sha256()
            for some in data.validation.with_format("numpy").iter(1024):
                digest.update(np.concatenate(list(some["input_ids"])).tobytes())  # rows may differ in length
            texts.setdefault(group, {})[name] = digest.hexdigest()
    files = [] if asked is None else [asked.tools, *asked.questions.values()]
    return {"texts": texts, "asked": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]}


def _is_scored(home: Path, recipe: Growths, judged: dict[str, Any]) -> bool:
    """Whether a unit has these scores. Scores of versions that noted no digests are those of the texts of these
    names."""
    if not (home / SCORES).is_file():
        return False
    if (home / JUDGED).is_file():
        return bool(json.loads((home / JUDGED).read_text(encoding="utf-8")) == judged)
    texts = json.loads((home / SCORES).read_text(encoding="utf-8"))["texts"]
    return {group: set(names) for group, names in texts.items()} == {
        group: set(names) for group, names in recipe.held_out.items()
    }


def model_of(recipe: Growths, folder: Path, unit: str) -> Path:
    """The folder of a finished unit's model."""
    if unit == BASE and "checkpoint" in recipe.base:
        return Path(recipe.base["checkpoint"])
    home = folder / unit
    return home if (home / GROWN).is_file() else (home / "model").resolve()


def scores(model: Path, held: dict[str, dict[str, PreparedData]], precision: str) -> dict[str, Any]:
    """Bits per byte of every held-out text, in blocks as in training, and the mean of each group."""
    network = FathomForCausalLM.from_pretrained(model, dtype=torch.float32).to(device_of()).eval()  # type: ignore[arg-type]
    texts: dict[str, dict[str, float]] = {}
    for group, members in held.items():
        for name, data in members.items():
            assert data.validation is not None
            bits = bits_of_loss(data, loss_of_blocks(network, data.validation, autocast=precision == "bf16"))
            assert bits is not None
            texts.setdefault(group, {})[name] = bits
    return {**{group: sum(bits.values()) / len(bits) for group, bits in texts.items()}, "texts": texts}


def asked_of(asked: Asked) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The tools, and the questions of each kind. Raises OSError, or ValueError that names what is wrong."""
    questions = {}
    for kind, path in asked.questions.items():
        differ = {question.question: question for question in read_questions(path)}
        questions[kind] = list(differ.values())[: asked.most]
    return load_tools(asked.tools), questions


def answered(model: Path, asked: Asked) -> dict[str, Any]:
    """What `evaluate_tool_calls` says of every kind of question."""
    tools, questions = asked_of(asked)
    network, tokenizer = load_checkpoint(str(model))
    return {
        kind: evaluate_tool_calls(network, tokenizer, some, tools.values(), asked.rounds, asked.new_tokens)
        for kind, some in questions.items()
    }


def _base(recipe: Growths, cache: Path, folder: Path) -> tuple[Unit, PreparedData | None]:
    """The base as a unit, and its text if it must be trained. Its tokenizer, which all models share, goes
    to `folder`.
    """
    if "checkpoint" in recipe.base:
        unit = base_unit(recipe)
        load_tokenizer(recipe.base["checkpoint"]).save_pretrained(folder / TOKENIZER)
        return unit, None
    whole = base_recipe(recipe)
    data = whole.task.prepare(whole.data, cache)
    data.tokenizer.save_pretrained(folder / TOKENIZER)
    config = model_config(whole, whole.methods[0], data.tokenizer)
    return base_unit(recipe, config, whole.training_tokens(data)), data


def _reads(unit: Unit) -> str | None:
    """What tells apart the data that units read."""
    if unit.kind != "train":
        return None
    if unit.start is None:
        return BASE
    return json.dumps([unit.task.name, dataclasses.asdict(unit.task), unit.data], sort_keys=True)


def _data(recipe: Growths, folder: Path, unit: Unit) -> DataConfig:
    """What a stage reads, as tokens of the base's tokenizer."""
    return dataclasses.replace(data_of(recipe, unit.task, unit.data), tokenizer=str(folder / TOKENIZER))


def _held_out(recipe: Growths, text: str, cache: Path, folder: Path) -> PreparedData:
    data = dataclasses.replace(recipe.data, tokenizer=str(folder / TOKENIZER), validation=text)
    held = TEXT.prepare(data, cache)
    return dataclasses.replace(held, train=held.validation)  # type: ignore[arg-type]  # not read; small to send


def _stage_recipe(recipe: Growths, folder: Path, unit: Unit, start: Path) -> Recipe:
    assert unit.method is not None
    sequences = unit.sequences or recipe.training.sequences
    training = dataclasses.replace(recipe.training, tokens=unit.tokens, sequences=sequences)
    model = {"checkpoint": str(start)}
    data = _data(recipe, folder, unit)
    return Recipe("stage", training, model, methods=(unit.method,), task=unit.task, data=data)


def _of_training(result: TrainResult) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "train_flops": result.train_flops,
        "train_loss": result.train_loss,
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "notes": result.notes,
        "history": [
            {key: value for key, value in line.items() if key not in ("expert_load", "domain_load")}
            for line in result.history[:: -max(1, len(result.history) // 8)][::-1]  # the last among them
        ],
    }


def _said(kind: str, outcome: dict[str, Any]) -> str:
    if kind == "given":
        return f"given, {outcome['checkpoint']}"
    if kind == "score":
        said = [f"{name} {bits:.4f} bits per byte" for name, bits in outcome.items() if name not in ("texts", "asked")]
        return ", ".join(
            [*said, *(f"{kind} {one['answer']['share']:.0%}" for kind, one in outcome.get("asked", {}).items())]
        )
    if kind == "grow":
        return f"grown; before training it is {outcome['start']}"
    loss = outcome["train_loss"]
    return f"{outcome['tokens']:,} tokens, loss {math.nan if loss is None else loss:.3f}"


def _results(
    recipe: Growths,
    plans: dict[str, list[Unit]],
    units: dict[str, Unit],
    done: dict[str, dict[str, Any]],
    failures: list[str],
) -> dict[str, Any]:
    runs = []
    for name, planned in plans.items():
        last = planned[-1]
        if last.name in done:
            counts = parameter_counts(last.config)
            run = {
                "method": name.partition(",")[0],
                "seed": max(unit.seed for unit in planned),
                "train_flops": sum(unit.flops for unit in planned),
                "tokens": sum(unit.tokens for unit in planned),
                "parameters": counts.total,
                "active_parameters": counts.active,
                "path": [  # what it was after each stage but branches
                    {"stage": unit.start, **done[unit.name]}
                    for unit in planned
                    if unit.kind == "score" and unit.name in done
                ],
                **done[last.name],
            }
            runs.append(run)
    methods = summary(runs, list(recipe.held_out))
    stages = {
        name: {"kind": units[name].kind, **outcome} for name, outcome in done.items() if units[name].kind != "score"
    }
    return {
        "name": recipe.name,
        "groups": list(recipe.held_out),
        "methods": methods,
        "runs": runs,
        "stages": stages,
        "failures": failures,
    }


def summary(runs: list[dict[str, Any]], groups: list[str]) -> list[dict[str, Any]]:
    """A row for each method, over its seeds: every group's mean bits per byte, their standard deviation where there are
    several seeds, and the change against the base; where questions were asked, their mean shares."""
    base = next((run for run in runs if run["method"] == BASE), None)
    rows = []
    for name in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == name]
        row: dict[str, Any] = {"method": name, "seeds": len(mine), "train_flops": mine[0]["train_flops"]}
        for group in groups:
            values = [run[group] for run in mine]
            row[group] = statistics.fmean(values)
            row[f"{group}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
            row[f"{group}_change"] = None if base is None else row[group] - base[group]
        if "asked" in mine[0]:
            row["asked"] = {
                kind: {share: statistics.fmean(run["asked"][kind][share]["share"] for run in mine) for share in SHARES}
                for kind in mine[0]["asked"]
            }
        rows.append(row)
    return rows


def show(results: dict[str, Any], path: Path) -> Path:
    """A picture: of each method the first group's bits per byte (kept or forgotten) against the last's (gained), the
    mean over its seeds, with an arrow from the base, by way of its first seed's stages. Lower and further left is
    better."""
    first, last = results["groups"][0], results["groups"][-1]
    points = {row["method"]: (row[first], row[last]) for row in results["methods"]}
    looks = styles(list(points))
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    x0, y0 = points[BASE]
    for name, (x, y) in points.items():
        look = looks[name]
        if name != BASE:
            one = next(run for run in results["runs"] if run["method"] == name)
            way = [(x0, y0), *((point[first], point[last]) for point in one["path"][:-1])]
            axes.plot(*zip(*way, strict=True), ".-", color=look.light, alpha=0.35, linewidth=1, markersize=4)
            axes.annotate("", (x, y), way[-1], arrowprops={"arrowstyle": "->", "color": look.light, "alpha": 0.35})
        for run in results["runs"]:
            if run["method"] == name and name != BASE:
                axes.plot(run[first], run[last], look.marker, color=look.light, alpha=0.3, markersize=4)
        axes.plot(x, y, look.marker, color=look.light, markersize=8, label=name, linestyle="none")
    axes.axvline(x0 / KEPT, color="#b0b8c2", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"{first}, bits per byte (dotted: the base's / {KEPT:g})")
    axes.set_ylabel(f"{last}, bits per byte")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    with whole(path) as part:
        figure.savefig(part, format="png")
    return path
