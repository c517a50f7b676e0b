"""A comparison of growth methods: every method starts from one dense base and has equal training FLOPs.

name: growth-small
base: {model: {…}, data: {…}, training: {…}}       an ordinary recipe's sections; or {checkpoint: FOLDER}
data: {train: {physics: {…}, general: {…}}}        named sources; what all stages share
held_out: {general: {books: …}, science: {physics: …}}
training: {tokens: 8e6, …}                         of the dense model: their FLOPs are what every method may spend
methods:
  - {name: continued, stages: [{share: 1}]}
  - name: innovator
    stages:
      - {branches: [physics], trains: feed_forward, share: 0.3}
      - {grow: {name: innovator, disciplines: 1, slices: 4}}
      - {trains: router, share: 0.05, feed_forward: {discipline: 0.1}}
      - {share: 0.65}

    <output>/<name>/base, <stage>-<digest>      a folder a stage; methods that begin alike share it and each pays
    <output>/<name>/growths.json

A stage is a run that resumes; a rerun of the command skips finished ones. The FLOPs of a stage are counted as if all
parameters trained, and those of its branches are added up.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fathom.cost import parameter_counts
from fathom.data import DataConfig, PreparedData, load_tokenizer
from fathom.growth import methods as growth_methods
from fathom.growth.base import GrowthMethod
from fathom.growth.grow import Source, check_texts, grow
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.models.registry import nearest
from fathom.report.processes import devices_of, run_jobs, workers
from fathom.report.style import styles
from fathom.tasks.causal_lm import CausalLM, bits_of_loss, loss_of_blocks
from fathom.train import MethodConfig, Recipe, Training, TrainResult, model_config, train_run
from fathom.train.complete_checkpoints import checkpoints
from fathom.train.loading import build, check_keys, parse_yaml
from fathom.train.recipe import Trains
from fathom.train.trainer import RESULT
from fathom.writing import whole, write_json

TASK = CausalLM()
BASE = "base"
TOKENIZER = "tokenizer"
RESULTS = "growths.json"
GROWN = "growth.json"  # in the folder of a grown checkpoint
SCORES = "scores.json"
KEPT = 0.99  # of the general ability, that Innovator's paper keeps


@dataclass(frozen=True)
class Stage:
    """One step of a method: a training, a training for each branch, or surgery.

    Attributes:
        share: of the method's FLOPs; of all branches together. 0 only with `grow`.
        branches: sources, each of which trains a model of its own from what the stage starts from.
        grow: surgery: the growth method's `name` and its options.
        texts: sources that surgery runs through the base, if an option needs them.
        trains, lr, sequences: as in a recipe's training; None: the recipe's own.
        weights: of the sources; None: theirs.
        feed_forward: options of the model's network that change from here on.
    """

    share: float = 0.0
    branches: tuple[str, ...] = ()
    grow: dict[str, Any] | None = None
    texts: tuple[str, ...] = ()
    trains: Trains = "all"
    lr: float | None = None
    sequences: int | None = None
    weights: dict[str, float] | None = None
    feed_forward: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """A method of the comparison: its stages, in order.

    Attributes:
        seeds: instead of the recipe's.
        spends_base: whether it may also spend the FLOPs of the base's training, for methods that start from scratch.
    """

    name: str
    stages: tuple[Stage, ...]
    seeds: tuple[int, ...] | None = None
    spends_base: bool = False


@dataclass(frozen=True)
class Growths:
    """The recipe of a comparison of growths.

    held_out: groups by name, each with texts by name; a group's score is the mean over its texts.
    """

    name: str
    base: dict[str, Any]
    held_out: dict[str, dict[str, str]]
    training: Training
    methods: tuple[Way, ...]
    data: DataConfig = field(default_factory=DataConfig)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not isinstance(self.data.train, dict):
            raise ValueError(f"data.train={self.data.train!r}: growth mixes named sources; give a mapping")
        if not self.held_out or not all(self.held_out.values()):
            raise ValueError(f"held_out={self.held_out!r}: name texts, in groups")
        names = [way.name for way in self.methods]
        for way in self.methods:
            where = f"methods.{way.name}"
            if names.count(way.name) > 1:
                raise ValueError(f"{where}: two methods have this name")
            if way.spends_base and "checkpoint" in self.base:
                raise ValueError(f"{where}.spends_base=True: base.checkpoint does not say what its training cost")
            total = sum(stage.share for stage in way.stages)
            if total > 1 + 1e-9:
                raise ValueError(f"{where}: the shares of its stages sum to {total:g}; they share 1")
            for number, stage in enumerate(way.stages):
                self._check(stage, f"{where}.stages[{number}]")

    def _check(self, stage: Stage, where: str) -> None:
        check_keys(stage.branches, self.data.train, f"{where}.branches")
        check_keys(stage.texts, self.data.train, f"{where}.texts")
        check_keys(stage.weights or {}, self.data.train, f"{where}.weights")
        if stage.grow is None and not stage.share > 0:
            raise ValueError(f"{where}.share={stage.share!r}: a stage that trains needs a share above 0")
        if stage.sequences is not None and stage.sequences < 1:
            raise ValueError(f"{where}.sequences={stage.sequences!r}: must be at least 1")
        if stage.grow is not None and dataclasses.replace(stage, grow=None, texts=()) != Stage():
            raise ValueError(f"{where}.grow: surgery trains nothing; leave all but texts out")
        if stage.grow is None and stage.texts:
            raise ValueError(f"{where}.texts={list(stage.texts)!r}: only surgery reads texts; leave them out")
        if stage.branches and stage.weights is not None:
            raise ValueError(f"{where}.weights={stage.weights!r}: a branch reads its own source alone; leave them out")


@dataclass(frozen=True)
class Unit:
    """One piece of work in a folder of its own, done after the units that it needs.

    Attributes:
        kind: "train", "grow", "score"; "given" is a checkpoint that exists already.
        start: unit whose model it starts from.
        branches: units whose models are the branches of surgery.
        texts: those that surgery runs through the base.
        config: of the model that the unit makes.
    """

    name: str
    kind: str
    config: FathomConfig
    start: str | None = None
    branches: tuple[str, ...] = ()
    method: MethodConfig | None = None
    growth: GrowthMethod | None = None
    texts: tuple[str, ...] = ()
    tokens: int = 0
    sequences: int | None = None
    flops: float = 0.0
    seed: int = 0

    @property
    def needs(self) -> tuple[str, ...]:
        return (*([self.start] if self.start else []), *self.branches)


def load_growths(path: str | Path) -> Growths:
    """The recipe in a YAML file. Raises OSError; ValueError that names the key, the value and the remedy."""
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "base" not in raw and "model" in raw:
            raise ValueError("has a model and no base to grow; `fathom train` and `fathom compare` read such a recipe")
        return build(Growths, raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
    data = TASK.prepare(_data(recipe, folder), cache)
    held = {
        group: {name: _held_out(recipe, text, cache, folder) for name, text in texts.items()}
        for group, texts in recipe.held_out.items()
    }
    units = {unit.name: unit for unit in (base, _named(Unit("score", "score", base.config, base.name)))}
    ways = {(way.name, seed): way for way in recipe.methods for seed in way.seeds or recipe.seeds}
    ways = dict(sorted(ways.items(), key=lambda item: _turn(recipe, *item)))
    plans = {BASE: list(units.values())}
    for name, seed in ways:
        plans[f"{name}, seed {seed}"] = plan(recipe, ways[name, seed], seed, base)
    for planned in plans.values():
        units.update({unit.name: unit for unit in planned})
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
                ready[name] = carry_out, units[name], recipe, folder, base_data if name == BASE else data, held

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


def plan(recipe: Growths, way: Way, seed: int, base: Unit) -> list[Unit]:
    """The units of a method and a seed. A unit's name follows from all that it does, so that equal ones are one."""
    budget = recipe.training.tokens * _flops(recipe, base.config)  # type: ignore[operator]
    budget += base.flops if way.spends_base else 0.0
    units: list[Unit] = []
    branches: list[str] = []
    before, config = base.name, base.config

    def score() -> None:
        units.append(_named(Unit("score", "score", config, before)))

    for number, stage in enumerate(way.stages):
        where = f"methods.{way.name}.stages[{number}]"
        if stage.grow is not None:
            growth = _growth(stage.grow, where)
            section = growth.section(config, len(branches))
            grown = FathomConfig.from_dict({**config.to_dict(), "feed_forward": section})
            texts = tuple(recipe.data.train[name].text for name in stage.texts)  # type: ignore[index,union-attr]
            check_texts(texts, growth)
            unit = _named(Unit("grow", "grow", grown, before, tuple(branches), None, growth, texts, seed=seed))
            units.append(unit)
            before, config, branches = unit.name, grown, []
            score()
            continue
        section = {**config.feed_forward, **stage.feed_forward}  # type: ignore[dict-item]
        config = FathomConfig.from_dict({**config.to_dict(), "feed_forward": section})
        flops = _flops(recipe, config)
        sequences = stage.sequences or recipe.training.sequences
        step = sequences * recipe.training.gradient_accumulation * recipe.data.block_size
        parts = stage.branches or (None,)
        tokens = int(stage.share * budget / len(parts) / flops / step) * step
        if not tokens:
            raise ValueError(f"{where}.share={stage.share:g}: less than one step of {step} tokens; give it more")
        made = []
        for source in parts:
            weights = stage.weights if source is None else {source: 1.0}
            fields = {"feed_forward": section} if stage.feed_forward else {}
            method = MethodConfig("stage", fields, stage.lr, None, stage.trains, weights)
            name = f"{stage.trains}-{source}" if source else stage.trains
            unit = Unit(name, "train", config, before, method=method, tokens=tokens, flops=tokens * flops, seed=seed)
            made.append(_named(dataclasses.replace(unit, sequences=stage.sequences)))
        units += made
        if stage.branches:
            branches = [unit.name for unit in made]
        else:
            before = made[0].name
            score()
    if branches:
        raise ValueError(f"methods.{way.name}: branches that no surgery takes; add a stage with grow")
    return units


def carry_out(
    unit: Unit, recipe: Growths, folder: Path, data: PreparedData, held: dict[str, dict[str, PreparedData]]
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
        if not (home / SCORES).is_file():
            home.mkdir(exist_ok=True)
            write_json(home / SCORES, scores(start, held, recipe.training.precision))
        return json.loads((home / SCORES).read_text(encoding="utf-8"))
    whole = _base_recipe(recipe) if start is None else _stage_recipe(recipe, folder, unit, start)
    result = train_run(whole, whole.methods[0], seed=unit.seed, folder=home, data=data)
    for checkpoint in checkpoints(home):  # to resume from: several times the model's size
        shutil.rmtree(checkpoint)
    return _of_training(result)


def model_of(recipe: Growths, folder: Path, unit: str) -> Path:
    """The folder of a finished unit's model."""
    if unit == BASE and "checkpoint" in recipe.base:
        return Path(recipe.base["checkpoint"])
    home = folder / unit
    return home if (home / GROWN).is_file() else (home / "model").resolve()


def scores(model: Path, held: dict[str, dict[str, PreparedData]], precision: str) -> dict[str, Any]:
    """Bits per byte of every held-out text, in blocks as in training, and the mean of each group."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = FathomForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()  # type: ignore[arg-type]
    texts: dict[str, dict[str, float]] = {}
    for group, members in held.items():
        for name, data in members.items():
            assert data.validation is not None
            bits = bits_of_loss(data, loss_of_blocks(network, data.validation, autocast=precision == "bf16"))
            assert bits is not None
            texts.setdefault(group, {})[name] = bits
    return {**{group: sum(bits.values()) / len(bits) for group, bits in texts.items()}, "texts": texts}


def _base_recipe(recipe: Growths) -> Recipe:
    whole: Recipe = build(Recipe, {"name": BASE, **recipe.base}, BASE)
    if len(whole.methods) != 1:
        raise ValueError(f"base.methods: the base is one model, not {len(whole.methods)}")
    return dataclasses.replace(whole, data=dataclasses.replace(whole.data, validation=None))


def _base(recipe: Growths, cache: Path, folder: Path) -> tuple[Unit, PreparedData | None]:
    """The base as a unit, and its text if it must be trained. Its tokenizer, which all models share, goes
    to `folder`.
    """
    if "checkpoint" in recipe.base:
        check_keys(recipe.base, ["checkpoint"], BASE)
        source = Source(recipe.base["checkpoint"])
        load_tokenizer(str(source.folder)).save_pretrained(folder / TOKENIZER)
        return Unit(BASE, "given", source.config), None
    whole = _base_recipe(recipe)
    data = whole.task.prepare(whole.data, cache)
    data.tokenizer.save_pretrained(folder / TOKENIZER)
    config = model_config(whole, whole.methods[0], data.tokenizer)
    tokens = whole.training_tokens(data) // whole.step_tokens * whole.step_tokens
    flops = tokens * TASK.training_flops(config, whole.data.block_size, whole.training.gradient_checkpointing)
    return Unit(BASE, "train", config, method=whole.methods[0], tokens=tokens, flops=flops, seed=whole.seeds[0]), data


def _data(recipe: Growths, folder: Path, validation: str | None = None) -> DataConfig:
    return dataclasses.replace(recipe.data, tokenizer=str(folder / TOKENIZER), validation=validation)


def _held_out(recipe: Growths, text: str, cache: Path, folder: Path) -> PreparedData:
    held = TASK.prepare(_data(recipe, folder, text), cache)
    return dataclasses.replace(held, train=held.validation)  # type: ignore[arg-type]  # not read; small to send


def _stage_recipe(recipe: Growths, folder: Path, unit: Unit, start: Path) -> Recipe:
    assert unit.method is not None
    sequences = unit.sequences or recipe.training.sequences
    training = dataclasses.replace(recipe.training, tokens=unit.tokens, sequences=sequences)
    model = {"checkpoint": str(start)}
    return Recipe("stage", training, model, methods=(unit.method,), data=_data(recipe, folder))


def _flops(recipe: Growths, config: FathomConfig) -> float:
    """FLOPs of training for one token."""
    return TASK.training_flops(config, recipe.data.block_size, recipe.training.gradient_checkpointing)


def _growth(raw: dict[str, Any], where: str) -> GrowthMethod:
    known = growth_methods()
    name = raw.get("name")
    if name not in known:
        raise ValueError(
            f"{where}.grow.name={name!r}: no such method{nearest(str(name), list(known))}; there are {', '.join(known)}"
        )
    return build(known[name], {key: value for key, value in raw.items() if key != "name"}, f"{where}.grow")


def _turn(recipe: Growths, way: tuple[str, int], method: Way) -> int:
    """The index of this seed among its method's seeds."""
    return (method.seeds or recipe.seeds).index(way[1])


def _named(unit: Unit) -> Unit:
    said = dataclasses.asdict(dataclasses.replace(unit, config=None))  # type: ignore[arg-type]
    if unit.sequences is None:
        del said["sequences"]  # names of stages that are finished stay as they were
    growth = None if unit.growth is None else [unit.growth.name, dataclasses.asdict(unit.growth)]
    text = json.dumps({**said, "growth": growth}, sort_keys=True, default=str)
    return dataclasses.replace(unit, name=f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}")


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
        return ", ".join(f"{group} {bits:.4f} bits per byte" for group, bits in outcome.items() if group != "texts")
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
    several seeds, and the change against the base."""
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
        FigureCanvasAgg(figure).print_png(part)
    return path
