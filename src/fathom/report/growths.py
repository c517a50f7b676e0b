"""The recipe of a comparison of growth methods: every method starts from one base and has equal training FLOPs.

name: growth-small
base: {model: {…}, data: {…}, training: {…}}       an ordinary recipe's sections; or {checkpoint: FOLDER}
data: {train: {physics: {…}, general: {…}}}        named sources; what all stages share
held_out: {general: {books: …}, science: {physics: …}}
training: {tokens: 8e6, …}                         of the base's model: their FLOPs are what every method may spend
methods:
  - {name: continued, stages: [{share: 1}]}
  - name: innovator
    stages:
      - {branches: [physics], trains: feed_forward, share: 0.3}
      - {grow: {name: innovator, disciplines: 1, slices: 4}}
      - {trains: router, share: 0.05, feed_forward: {discipline: 0.1}}
      - {share: 0.65}
  - name: specialist
    stages:
      - {weights: {physics: 1}, share: 0.2}
      - {task: {name: sft, template: react}, data: {train: rows.jsonl}, share: 0.8}
asked: {tools: tools.py, questions: {sums: sums.jsonl}}     what a stage that learns answers is asked in the end

The FLOPs of a stage are counted as if all parameters trained, and those of its branches are added up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.cost import parameter_counts
from fathom.data import DataConfig
from fathom.growth import methods as growth_methods
from fathom.growth.base import GrowthMethod
from fathom.growth.grow import Source, check_texts
from fathom.models.configuration import FathomConfig
from fathom.models.registry import nearest
from fathom.tasks import Task
from fathom.tasks.causal_lm import CausalLM
from fathom.tasks.sft import SFT
from fathom.train import MethodConfig, Recipe, Training, model_config
from fathom.train.loading import build, check_keys, parse_yaml
from fathom.train.recipe import LowRank, Trains

TEXT = CausalLM()
BASE = "base"
BASE_SECTIONS = ("model", "task", "methods", "data", "training", "seeds", "license")
STAGE_DATA = ("train", "train_split", "max_documents", "text_field")


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
        task: what is learnt: running text, or answers ("sft", with its options).
        data: what it reads instead: fields of the recipe's `data`, out of `STAGE_DATA`.
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
    task: Task = TEXT
    data: dict[str, Any] = field(default_factory=dict)


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
class Asked:
    """What a model is asked after every stage that learns answers, greedily: with the tools, and without any.

    Attributes:
        tools: Python file that defines them (`fathom.tools.load_tools`). **It is run.**
        questions: files of rows {"question", "answer", "calls"}, by kind.
        most: questions of each kind, the first that differ.
        rounds: calls that a question may take.
        new_tokens: of each answer and call, at most.
    """

    tools: str
    questions: dict[str, str]
    most: int = 40
    rounds: int = 2
    new_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError("asked.questions is empty: name files of questions, by kind")
        for name in ("most", "rounds", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"asked.{name}={getattr(self, name)!r}: must be at least 1")


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
    asked: Asked | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data.train, dict):
            raise ValueError(f"data.train={self.data.train!r}: growth mixes named sources; give a mapping")
        if not self.held_out or not all(self.held_out.values()):
            raise ValueError(f"held_out={self.held_out!r}: name texts, in groups")
        self._check_training()
        names = [way.name for way in self.methods]
        for way in self.methods:
            where = f"methods.{way.name}"
            if names.count(way.name) > 1:
                raise ValueError(f"{where}: two methods have this name")
            total = sum(stage.share for stage in way.stages)
            if total > 1 + 1e-9:
                raise ValueError(f"{where}: the shares of its stages sum to {total:g}; they share 1")
            for number, stage in enumerate(way.stages):
                self._check(stage, f"{where}.stages[{number}]")
            self._check_start(way, where)
        learns = any(stage.task != TEXT for way in self.methods for stage in way.stages)
        if self.asked is not None and not learns:
            raise ValueError("asked: no stage learns answers, so nothing would be asked; leave it out, or add a task")
        low_rank = any(stage.trains == "lora" for way in self.methods for stage in way.stages)
        if self.training.lora != LowRank() and not low_rank:
            raise ValueError("training.lora: no stage trains 'lora'; set trains: lora in one, or leave it out")

    def _check_training(self) -> None:
        """Refuse what growths would not read."""
        if self.training.tokens is None:
            raise ValueError(
                f"training.examples={self.training.examples!r}: methods share the FLOPs of training.tokens; give them"
            )
        if self.training.trains != "all":
            raise ValueError(f"training.trains={self.training.trains!r}: each stage says what trains; leave it out")
        if isinstance(self.training.lr, tuple):
            raise ValueError(f"training.lr={list(self.training.lr)!r}: growths sweep no rates; give one")
        if self.training.eval_every is not None:
            raise ValueError(
                f"training.eval_every={self.training.eval_every!r}: held_out is scored after a stage; leave it out"
            )
        if self.data.atoms:
            raise ValueError(f"data.atoms={self.data.atoms!r}: the tokens are the base's; give base.data.atoms")

    def _check(self, stage: Stage, where: str) -> None:
        if stage.grow is not None and dataclasses.replace(stage, grow=None, texts=()) != Stage():
            raise ValueError(f"{where}.grow: surgery trains nothing; leave all but texts out")
        check_keys(stage.data, STAGE_DATA, f"{where}.data")
        if not isinstance(stage.task, CausalLM | SFT):
            raise ValueError(f"{where}.task={stage.task.name!r}: stages learn 'causal_lm' or 'sft'")
        if stage.task != TEXT and "train" not in stage.data:
            raise ValueError(f"{where}.data.train is missing: the sources of the recipe are running text; name rows")
        data = data_of(self, stage.task, stage.data, where)
        try:
            stage.task.check(data)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        sources = data.train if isinstance(data.train, dict) else {}
        if not sources and (stage.branches or stage.weights):
            named = "branches" if stage.branches else "weights"
            raise ValueError(f"{where}.{named}: data.train={data.train!r} names one text; give it named sources")
        check_keys(stage.branches, sources, f"{where}.branches")
        check_keys(stage.texts, self.data.train, f"{where}.texts")
        check_keys(stage.weights or {}, sources, f"{where}.weights")
        if stage.grow is None and not stage.share > 0:
            raise ValueError(f"{where}.share={stage.share!r}: a stage that trains needs a share above 0")
        if stage.sequences is not None and stage.sequences < 1:
            raise ValueError(f"{where}.sequences={stage.sequences!r}: must be at least 1")
        if stage.grow is None and stage.texts:
            raise ValueError(f"{where}.texts={list(stage.texts)!r}: only surgery reads texts; leave them out")
        if stage.branches and stage.weights is not None:
            raise ValueError(f"{where}.weights={stage.weights!r}: a branch reads its own source alone; leave them out")

    def _check_start(self, way: Way, where: str) -> None:
        """What is drawn anew comes first, and only that may spend what the base cost."""
        fresh = [
            number
            for number, stage in enumerate(way.stages)
            if stage.grow is not None and _growth(stage.grow, f"{where}.stages[{number}]").fresh
        ]
        if any(fresh):
            raise ValueError(
                f"{where}.stages[{max(fresh)}].grow={way.stages[max(fresh)].grow!r}: draws all weights anew, so what "
                "earlier stages trained would be lost; put it first"
            )
        if way.spends_base and not fresh:
            raise ValueError(
                f"{where}.spends_base=True: it starts from the base, whose training is paid for; leave it out, or "
                "start with a grow that draws all weights anew (moe_scratch)"
            )
        if way.spends_base and "checkpoint" in self.base:
            raise ValueError(f"{where}.spends_base=True: base.checkpoint does not say what its training cost")


@dataclass(frozen=True)
class Unit:
    """One piece of work in a folder of its own, done after the units that it needs.

    Attributes:
        kind: "train", "grow", "score"; "given" is a checkpoint that exists already.
        start: unit whose model it starts from.
        branches: units whose models are the branches of surgery.
        texts: those that surgery runs through the base.
        config: of the model that the unit makes.
        task, data: of its stage.
        asked: whether a score also asks the recipe's questions.
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
    task: Task = TEXT
    data: dict[str, Any] = field(default_factory=dict)
    asked: Asked | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return (*([self.start] if self.start else []), *self.branches)


def load_growths(path: str | Path) -> Growths:
    """The recipe in a YAML file. Raises OSError; ValueError that names the key, the value and the remedy."""
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "base" not in raw and "model" in raw:
            raise ValueError("has a model and no base to grow; `fathom train` and `fathom compare` read such a recipe")
        recipe: Growths = build(Growths, raw)
        for key in ("tokenizer", "validation", "validation_split"):  # which are the base's, and `held_out`
            if key in (raw.get("data") or {}):
                instead = "base.data.tokenizer" if key == "tokenizer" else "held_out"
                raise ValueError(f"data.{key}={raw['data'][key]!r}: growths do not read it, but {instead}")
        if "checkpoint" in recipe.base:
            check_keys(recipe.base, ["checkpoint"], BASE)
        else:
            base_recipe(recipe)
        return recipe
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def base_recipe(recipe: Growths) -> Recipe:
    """How the base is trained. Raises ValueError for what would not be read."""
    check_keys(recipe.base, BASE_SECTIONS, BASE)
    whole: Recipe = build(Recipe, {"name": BASE, **recipe.base}, BASE)
    if len(whole.methods) != 1:
        raise ValueError(f"base.methods: the base is one model, not {len(whole.methods)}")
    if whole.task != TEXT:
        raise ValueError(f"base.task={whole.task.name!r}: a base learns running text; a stage may learn answers")
    (method,), training = whole.methods, whole.training
    if len(whole.seeds) != 1 or method.seeds is not None:
        raise ValueError(f"base.seeds={list(method.seeds or whole.seeds)!r}: the base is one model; give one in base")
    if isinstance(training.lr if method.lr is None else method.lr, tuple):
        raise ValueError("base.training.lr: the base is trained once; give one learning rate")
    data = recipe.base.get("data") or {}
    for where, value in (("data.validation", data.get("validation")), ("training.eval_every", training.eval_every)):
        if value is not None:
            raise ValueError(f"base.{where}={value!r}: the base is scored on held_out; leave it out")
    return dataclasses.replace(whole, data=dataclasses.replace(whole.data, validation=None))


def base_unit(recipe: Growths, config: FathomConfig | None = None, tokens: int | None = None) -> Unit:
    """The base. `config` and `tokens` are those that its text gave; without it, those that the recipe says."""
    if "checkpoint" in recipe.base:
        return Unit(BASE, "given", Source(recipe.base["checkpoint"]).config)
    whole = base_recipe(recipe)
    tokens = whole.training.tokens if tokens is None else tokens
    if tokens is None:
        raise ValueError(
            f"base.training.examples={whole.training.examples!r}: how many tokens they are, the text says; give tokens"
        )
    config = model_config(whole, whole.methods[0]) if config is None else config
    tokens = tokens // whole.step_tokens * whole.step_tokens
    flops = tokens * TEXT.training_flops(config, whole.data.block_size, whole.training.gradient_checkpointing)
    return Unit(BASE, "train", config, method=whole.methods[0], tokens=tokens, flops=flops, seed=whole.seeds[0])


def data_of(recipe: Growths, task: Task, given: dict[str, Any], where: str = "stages") -> DataConfig:
    """What a stage reads: the recipe's `data` under the stage's own, without what its task has no use for."""
    own = build(DataConfig, given, f"{where}.data")
    defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(DataConfig)}
    changed = {name: defaults[name] for name in task.unused} | {name: getattr(own, name) for name in given}
    return dataclasses.replace(recipe.data, **{"validation": None, **changed})


def all_ways(recipe: Growths) -> dict[tuple[str, int], Way]:
    """Methods by name and seed: every method's first seed in the order of the recipe, then further seeds."""
    ways = {(way.name, seed): way for way in recipe.methods for seed in way.seeds or recipe.seeds}
    turn = {(name, seed): (way.seeds or recipe.seeds).index(seed) for (name, seed), way in ways.items()}
    return dict(sorted(ways.items(), key=lambda item: turn[item[0]]))


def plan(recipe: Growths, way: Way, seed: int, base: Unit) -> list[Unit]:
    """The units of a method and a seed. A unit's name follows from all that it does, so that equal ones are one.

    Raises ValueError for stages that do not fit together.
    """
    budget = recipe.training.tokens * _flops(recipe, base.config)  # type: ignore[operator]
    budget += base.flops if way.spends_base else 0.0
    units: list[Unit] = []
    branches: list[str] = []
    trained = ""  # what of the branches
    before, config = base.name, base.config

    def score(asked: Asked | None = None) -> None:
        units.append(named(Unit("score", "score", config, before, asked=asked)))

    for number, stage in enumerate(way.stages):
        where = f"methods.{way.name}.stages[{number}]"
        if stage.grow is not None:
            growth = _growth(stage.grow, where)
            _check_surgery(growth, config, len(branches), trained, f"{where}.grow")
            section = growth.section(config, len(branches))
            grown = FathomConfig.from_dict({**config.to_dict(), "feed_forward": section})
            texts = tuple(recipe.data.train[name].text for name in stage.texts)  # type: ignore[index,union-attr]
            check_texts(texts, growth)
            unit = named(Unit("grow", "grow", grown, before, tuple(branches), None, growth, texts, seed=seed))
            units.append(unit)
            before, config, branches = unit.name, grown, []
            score()
            continue
        if branches:
            break
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
            unit = dataclasses.replace(unit, sequences=stage.sequences, task=stage.task, data=stage.data)
            made.append(named(unit))
        units += made
        if stage.branches:
            branches, trained = [unit.name for unit in made], stage.trains
        else:
            before = made[0].name
            score(None if stage.task == TEXT else recipe.asked)
    if branches:
        raise ValueError(f"methods.{way.name}: branches that no surgery takes; add a stage with grow")
    return units


def price(recipe: Growths) -> dict[str, Any]:
    """What a recipe trains, without its text: of the base and of every method its stages with their tokens and FLOPs;
    and the FLOPs of the whole, in which what methods share counts once.

    Raises ValueError as `plan` does, and where the base's size cannot be known.
    """
    base = base_unit(recipe)
    once = {BASE: base.flops}
    methods = []
    for way in (None, *recipe.methods):
        seeds = recipe.seeds if way is None or way.seeds is None else way.seeds
        planned = [base] if way is None else [unit for seed in seeds for unit in plan(recipe, way, seed, base)]
        once |= {unit.name: unit.flops for unit in planned}
        first = [unit for unit in planned if way is None or unit.seed == seeds[0]]
        trained = [unit for unit in first if unit.kind == "train"]
        counts = parameter_counts(([*trained, *(u for u in first if u.kind == "grow")] or first)[-1].config)
        stages = [
            {"name": unit.name.rpartition("-")[0] or unit.name, "task": unit.task.name, "tokens": unit.tokens,
             "train_flops": unit.flops} for unit in trained
        ]  # fmt: skip
        methods.append({
            "name": BASE if way is None else way.name, "seeds": 1 if way is None else len(seeds), "stages": stages,
            "parameters": counts.total, "active_parameters": counts.active,
            "tokens": sum(unit.tokens for unit in trained), "train_flops": sum(unit.flops for unit in trained),
        })  # fmt: skip
    return {"name": recipe.name, "methods": methods, "train_flops": sum(once.values())}


def _flops(recipe: Growths, config: FathomConfig) -> float:
    """FLOPs of training for one token."""
    return TEXT.training_flops(config, recipe.data.block_size, recipe.training.gradient_checkpointing)


def _growth(raw: dict[str, Any], where: str) -> GrowthMethod:
    known = growth_methods()
    name = raw.get("name")
    if name not in known:
        raise ValueError(
            f"{where}.grow.name={name!r}: no such method{nearest(str(name), list(known))}; there are {', '.join(known)}"
        )
    return build(known[name], {key: value for key, value in raw.items() if key != "name"}, f"{where}.grow")


def _check_surgery(growth: GrowthMethod, config: FathomConfig, branches: int, trained: str, where: str) -> None:
    """Refuse what `grow` would, after the branches had trained."""
    network = config.feed_forward["name"]  # type: ignore[index]
    if network != "dense":
        raise ValueError(f"{where}={growth.name!r}: it starts from feed_forward={network!r}; growth needs dense ones")
    if branches and growth.branches == "none":
        raise ValueError(f"{where}={growth.name!r}: it takes no branches; leave the stage before it out")
    if not branches and growth.branches == "needed":
        raise ValueError(f"{where}={growth.name!r}: it needs branches; put a stage with them before it")
    if branches and growth.changes != "everything" and trained != "feed_forward":
        raise ValueError(
            f"{where}={growth.name!r}: it takes branches that train: feed_forward alone, and these train {trained!r}"
        )


def named(unit: Unit) -> Unit:
    """The unit with a digest of all that it does in its name."""
    said = dataclasses.asdict(dataclasses.replace(unit, config=None))  # type: ignore[arg-type]
    del said["task"]
    for key in ("sequences", "data", "asked"):
        if not said[key]:
            del said[key]  # names of stages that are finished stay as they were
    if unit.task != TEXT:
        said["task"] = [unit.task.name, dataclasses.asdict(unit.task)]
    growth = None if unit.growth is None else [unit.growth.name, dataclasses.asdict(unit.growth)]
    text = json.dumps({**said, "growth": growth}, sort_keys=True, default=str)
    return dataclasses.replace(unit, name=f"{unit.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}")
