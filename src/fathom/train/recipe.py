"""A recipe: one YAML file with an experiment's models, data and training, for `fathom train` and `fathom compare`.

name: demo
model: {backbone: llama, hidden_size: 192, num_hidden_layers: 4, num_attention_heads: 4}
task: causal_lm
methods:
  - vanilla
  - {name: loop-3, depth: {name: loop, passes: 3}}
  - {name: pondering, lr: 2e-3}
data: {train: embedded, tokenizer: {bpe: 2048}, block_size: 256}
training: {tokens: 2e6, sequences: 16, lr: [1e-3, 2e-3]}
seeds: [0, 1, 2]
budgets: [tokens, {train_flops: 1e15}]
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedTokenizerBase

from fathom.data import DataConfig, PreparedData, add_atoms, check_vocabulary, load_tokenizer
from fathom.evaluate.downstream import Downstream
from fathom.models.checkpoints.stock import config_from_stock
from fathom.models.configuration import FathomConfig
from fathom.models.local_paths import refuse_absent
from fathom.models.registry import ENCODER_PLAIN, REGISTRIES, SECTIONS, methods_of, nearest
from fathom.tasks import DEFAULT, Task, lookup, tasks
from fathom.train.loading import build, check_keys, convert, parse_yaml

MODEL_FIELDS = [name for name in FathomConfig.__annotations__ if name != "keys_to_ignore_at_inference"]
METHOD_SECTIONS = tuple(SECTIONS)
# What may change on given weights; the last two extend a rotary model to longer texts.
CHECKPOINT_FIELDS = (*METHOD_SECTIONS, "embed_scale", "rope_parameters", "max_position_embeddings")
BUDGETS = ("tokens", "examples", "train_flops", "inference_flops")
_FOLDER_NAME = re.compile(r"[\w][\w.+-]*")


Trains = Literal["all", "feed_forward", "router", "lora"]


@dataclass(frozen=True)
class LowRank:
    """LoRA (arXiv 2106.09685): W x + α/r · B A x, where only A and B train. They are merged into the trained model.

    The defaults are those of K2, a model by GeoGalactica's authors.

    Attributes:
        rank: r.
        alpha: α.
        dropout: of x, before A.
        targets: linear layers by the ends of their names.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "training.lora.rank", self.rank, "be at least 1")
        _require(self.alpha > 0, "training.lora.alpha", self.alpha, "be above 0")
        _require(0 <= self.dropout < 1, "training.lora.dropout", self.dropout, "be in [0, 1)")
        _require(bool(self.targets), "training.lora.targets", [], "not be empty")


@dataclass(frozen=True)
class MethodConfig:
    """One model of a recipe.

    Attributes:
        name: label of the method and of its run folders. Without any section of the config it is also the name
            of the registered method.
        fields: fields of FathomConfig that this method sets, over those of the recipe's `model`.
        lr: learning rate or candidates of this method, instead of `training.lr`.
        seeds: of this method, instead of the recipe's: more of them where a difference must be told from noise.
        trains: which parameters of this method's model train, instead of `training.trains`.
        weights: of the sources of `data.train` for this method, instead of theirs; a source left out is not read.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    lr: float | tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    trains: Trains | None = None
    weights: dict[str, float] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "methods.name")
        for name, weight in (self.weights or {}).items():
            _require(0 < weight < math.inf, f"methods.{self.name}.weights.{name}", weight, "be above 0")
        if self.lr is not None:
            _check_lr(self.lr, f"methods.{self.name}.lr")
        if self.seeds is not None:
            _check_seeds(self.seeds, f"methods.{self.name}.seeds")

    @classmethod
    def from_yaml(cls, raw: Any, where: str) -> MethodConfig:
        """A method's name, or a mapping with `name`, `lr`, `seeds` and fields of FathomConfig."""
        entry = {"name": raw} if isinstance(raw, str) else raw
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{where}={raw!r}: give a method's name, or a mapping with `name`")
        others = {field for task in tasks().values() for field in task.model_fields()}.difference(MODEL_FIELDS)
        own = ["name", "lr", "seeds", "trains", "weights"]
        check_keys([key for key in entry if key not in others], [*own, *MODEL_FIELDS], where)
        fields = {key: value for key, value in entry.items() if key not in own}
        trained_otherwise = "trains" in entry or "weights" in entry  # which is all that such a method need say
        if not trained_otherwise and not any(section in fields for section in (*METHOD_SECTIONS, *others)):
            fields[_registry_of(entry["name"], where)] = {"name": entry["name"]}
        lr = convert(entry.get("lr"), float | tuple[float, ...] | None, f"{where}.lr")
        seeds = convert(entry.get("seeds"), tuple[int, ...] | None, f"{where}.seeds")
        trains = convert(entry.get("trains"), Trains | None, f"{where}.trains")
        weights = convert(entry.get("weights"), dict[str, float] | None, f"{where}.weights")
        return cls(entry["name"], fields, lr, seeds, trains, weights)


@dataclass(frozen=True)
class Budget:
    """The quantity that is equal for all methods of a comparison.

    Attributes:
        kind: "tokens" or "examples" seen in training; "train_flops" spent in training; "inference_flops" of one of the
            task's answers, matched by adding layers to the cheaper methods (trained for the length of `training`).
        amount: tokens, examples or FLOPs; None: the length of `training`, or for train_flops what the first method
            spends on it.
    """

    kind: Literal["tokens", "examples", "train_flops", "inference_flops"]
    amount: float | None = None

    def __post_init__(self) -> None:
        if self.amount is not None:
            _require(self.amount > 0 and math.isfinite(self.amount), f"budgets.{self.kind}", self.amount, "be positive")

    @classmethod
    def from_yaml(cls, raw: Any, where: str) -> Budget:
        """A budget given as one of `BUDGETS`, or as a mapping from one of them (except inference_flops) to
        an amount.
        """
        kind, amount = next(iter(raw.items())) if isinstance(raw, dict) and len(raw) == 1 else (raw, None)
        if kind not in BUDGETS:
            known = ", ".join(BUDGETS)
            raise ValueError(
                f"{where}={raw!r}: give one of {known}{nearest(str(kind), list(BUDGETS))}, or {{kind: amount}}"
            )
        if kind == "inference_flops" and amount is not None:
            raise ValueError(f"{where}={raw!r}: inference_flops takes no amount, the dearest method sets it")
        return cls(kind, None if amount is None else convert(amount, float, f"{where}.{kind}"))


@dataclass(frozen=True)
class Training:
    """How every model of a recipe is trained. Steps are optimiser steps.

    A step reads sequences × gradient_accumulation blocks of `data.block_size` tokens. Several processes (`torchrun`)
    share every batch.
    """

    tokens: int | None = None  # training tokens, rounded down to whole steps; or else:
    examples: int | None = None  # training examples of the task, in as many whole steps as hold them on average
    sequences: int = 8  # blocks in a batch, of all processes together
    gradient_accumulation: int = 1  # batches a step
    lr: float | tuple[float, ...] = 1e-3  # peak learning rate; of several the one with the best score is taken
    sweep_fraction: float = 0.25  # share of the training that each candidate of a learning-rate sweep is trained on
    # transformers' own, "linear" down to 0; wsd warms up from min_lr_ratio
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_ratio: float = 0.05  # share of the steps with linear warm-up
    decay_ratio: float = 0.2  # wsd: share of the steps with decay, at the end
    min_lr_ratio: float = 0.1  # cosine, wsd: final learning rate over the peak
    # What trains: "all", the "feed_forward" networks of the layers, their "router", or "lora": new matrices beside
    # layers (`lora`), merged in the end. All else stays bit for bit; train_flops counts as if it trained, too.
    trains: Trains = "all"
    lora: LowRank = field(default_factory=LowRank)
    weight_decay: float = 0.1  # of matrices other than embedding tables
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast, weights and optimiser stay in fp32
    # "layers" compiles one layer at a time: minutes less where a step runs the layers many times (ponderlm2, ponderlm3,
    # the adaptive methods). So are products with the vocabulary; what else lies between layers stays uncompiled.
    # "graphs": and where tokens are gathered in training (adaptive_latent_cot), layers replay as CUDA graphs, as steps
    # of few tokens are over before the CPU has launched them. For long runs: every new size of a step takes seconds.
    compile: bool | Literal["layers", "graphs"] = False
    gradient_checkpointing: bool = False
    # adafactor (arXiv 1804.04235): second moments by rows and columns, no first moment, updates clipped at an RMS of 1;
    # the step is the learning rate; with adafactor_scaled, as T5 was trained, times the RMS of the tensor, at least
    # 1e-3. They read no betas and no eps. muon (arXiv 2502.16982): the matrices of blocks by torch.optim.Muon, all else
    # by AdamW, at one learning rate; not with lora. Under FSDP only adamw runs.
    optimizer: Literal["adamw", "adafactor", "adafactor_scaled", "muon"] = "adamw"
    fused: bool = True  # AdamW as one kernel
    log_every: int = 10  # steps
    eval_every: int | None = None  # steps; None: at the end only
    save_every: int | None = 500  # steps; None: at the end only
    keep: int = 1  # complete checkpoints kept
    num_workers: int = 0  # data-loader processes
    tensorboard: bool = False  # the same as report_to: [tensorboard]
    report_to: tuple[
        Literal["tensorboard", "wandb", "trackio"], ...
    ] = ()  # trackers, through the Trainer's integrations

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers, each once."""
        return tuple(dict.fromkeys((*self.report_to, *(["tensorboard"] if self.tensorboard else []))))

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.examples is None):
            both = f"={self.tokens!r} and training.examples={self.examples!r}: both say how long to train"
            raise ValueError(f"training.tokens{' is missing' if self.tokens is None else both}; give it or examples")
        _check_lr(self.lr, "training.lr")
        counts = ("tokens", "examples", "sequences", "gradient_accumulation", "log_every", "eval_every", "save_every")
        for name in (*counts, "keep"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"training.{name}", value, "be at least 1")
        for name in ("weight_decay", "eps", "grad_clip", "num_workers"):
            _require(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "not be negative")
        for name in ("warmup_ratio", "decay_ratio", "min_lr_ratio"):
            _require(0 <= getattr(self, name) <= 1, f"training.{name}", getattr(self, name), "be between 0 and 1")
        _require(0 < self.sweep_fraction <= 1, "training.sweep_fraction", self.sweep_fraction, "be in (0, 1]")
        _require(all(0 <= beta < 1 for beta in self.betas), "training.betas", self.betas, "be in [0, 1)")
        if self.compile == "graphs":  # a batch's gradients lie where the next one's are written
            rule = "be 1 with training.compile='graphs': give a batch more sequences, or use 'layers'"
            _require(
                self.gradient_accumulation == 1, "training.gradient_accumulation", self.gradient_accumulation, rule
            )
            rule = "be false with training.compile='graphs': use 'layers'"
            _require(not self.gradient_checkpointing, "training.gradient_checkpointing", True, rule)
        unread = {
            "decay_ratio": (self.schedule != "wsd", f"schedule={self.schedule!r} has no decay of its own; use 'wsd'"),
            "min_lr_ratio": (self.schedule == "constant", "schedule='constant' ends at the peak; use 'cosine'"),
            **dict.fromkeys(
                ("betas", "eps", "fused"),
                ("adafactor" in self.optimizer, f"optimizer={self.optimizer!r} reads none; use 'adamw'"),
            ),
        }
        for name, (without, why) in unread.items():
            value = getattr(self, name)
            if without and value != getattr(type(self), name):
                raise ValueError(f"training.{name}={value!r}: {why}, or leave it out")
        if self.schedule == "wsd":
            total = self.warmup_ratio + self.decay_ratio
            _require(total <= 1, "training.warmup_ratio + decay_ratio", total, "be at most 1 for schedule 'wsd'")


@dataclass(frozen=True)
class Recipe:
    """One experiment.

    Attributes:
        name: of the experiment and its folder.
        model: fields of FathomConfig that all methods share; or `checkpoint`, a folder or hub name to start from, with
            at most `CHECKPOINT_FIELDS` beside it. From scratch, `vocab_size` and the special tokens
            default to the tokenizer's and `max_position_embeddings` to `data.block_size`.
        task: what the models are trained and judged on; its options are fields of its class.
        seeds: of initialisation and data order.
        retrain: number of times that `fathom compare` repeats the first method's first seed, the very same run. The
            page calls no difference that is smaller than the spread of these scores. On a CPU there is no spread.
        downstream: lm_eval tasks that every trained model is scored on.
        license: of the trained models, by the hub's name ("apache-2.0"), for their cards; None: cards state none.
    """

    name: str
    training: Training
    model: dict[str, Any] = field(default_factory=dict)
    methods: tuple[MethodConfig, ...] = field(default_factory=lambda: (MethodConfig("vanilla"),))
    task: Task = field(default_factory=lambda: lookup(DEFAULT)())
    data: DataConfig = field(default_factory=DataConfig)
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[Budget, ...] = field(default_factory=lambda: (Budget("tokens"),))
    retrain: int = 0
    downstream: Downstream | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        _require(self.retrain >= 0, "retrain", self.retrain, "not be negative")
        if self.downstream is not None and not self.task.asked_by_lm_eval:
            named = ", ".join(sorted(name for name, task in tasks().items() if task.asked_by_lm_eval))
            raise ValueError(
                f"downstream: lm_eval cannot ask models of task {self.task.name!r}, but of {named}; leave it out"
            )
        if self.license is not None:
            rule = "be one of the hub's names, such as 'apache-2.0', or 'other'"
            _require(bool(re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license)), "license", self.license, rule)
        check_keys(self.model, ["checkpoint", *self.task.model_fields()], "model")
        for method in self.methods:
            check_keys(method.fields, self.task.model_fields(), f"methods.{method.name}")
        for name in ("methods", "budgets"):
            _require(bool(getattr(self, name)), name, [], "not be empty")
        _check_seeds(self.seeds, "seeds")
        self.task.check(self.data)
        for method in self.methods:
            self._check_sources(method)
            if self.training.optimizer == "muon" and self.trains(method) == "lora":
                raise ValueError(
                    "training.optimizer='muon' with trains='lora': it would make each of two factors orthogonal, "
                    "not the matrix that they stand for; use 'adamw'"
                )
        distinct: dict[str, list[Any]] = {
            "methods": [method.name for method in self.methods],
            "budgets": [budget.kind for budget in self.budgets],  # one table each
        }
        if self.training.eval_every is not None and self.data.validation is None:
            raise ValueError(
                f"training.eval_every={self.training.eval_every}: data.validation is null; name {self.task.held_out}, "
                "or leave it out"
            )
        for argument, values in distinct.items():
            twice = [value for value in values if values.count(value) > 1]
            _require(not twice, argument, twice[:1], "not be given twice")
        if "checkpoint" in self.model:
            changeable = self.task.checkpoint_fields or CHECKPOINT_FIELDS
            for fields, where in ((self.model, "model"), *((m.fields, f"methods.{m.name}") for m in self.methods)):
                for key in fields:
                    if key not in ("checkpoint", *changeable):
                        raise ValueError(
                            f"{where}.{key} cannot be given: model.checkpoint fixes it "
                            f"(only {', '.join(changeable)} may change)"
                        )
        if self.training.tokens is not None:  # how many tokens examples have, the data say
            self.check_trials(self.training.tokens)

    @property
    def step_tokens(self) -> int:
        """Tokens that one optimiser step reads."""
        return self.training.sequences * self.training.gradient_accumulation * self.data.block_size

    def training_tokens(self, data: PreparedData) -> int:
        """The length of a training, in tokens."""
        if self.training.tokens is not None:
            return self.training.tokens
        assert self.training.examples is not None  # one of them is given
        return self.tokens_of_examples(self.training.examples, data)

    def tokens_of_examples(self, examples: float, data: PreparedData) -> int:
        """Tokens of the sequences that hold `examples` examples on average, cut to whole steps if there is one."""
        tokens = math.floor(examples / data.examples_per_sequence + 1e-9) * self.data.block_size
        return tokens - tokens % self.step_tokens or tokens

    def trial_tokens(self, data: PreparedData) -> int:
        """Tokens that each candidate of a learning-rate sweep is trained on."""
        tokens = self.training_tokens(data)
        self.check_trials(tokens)
        return self._trial(tokens)

    def check_trials(self, tokens: int) -> None:
        """Raise ValueError if a sweep's trial, in a training of `tokens` tokens, is shorter than one step."""
        trial = self._trial(tokens)
        if trial < self.step_tokens and any(len(candidates(self, method)) > 1 for method in self.methods):
            least = math.ceil(1000 * self.step_tokens / tokens) / 1000
            longer = "training.tokens" if self.training.examples is None else "training.examples"
            remedy = f"use at least {least:g}" if least <= 1 else f"use more {longer}"
            raise ValueError(
                f"training.sweep_fraction={self.training.sweep_fraction!r}: a trial of the learning-rate sweep would "
                f"have {trial} tokens, less than one step of {self.step_tokens} (sequences × "
                f"gradient_accumulation × block_size); {remedy}, or give one learning rate"
            )

    def _trial(self, tokens: int) -> int:
        return int(tokens * self.training.sweep_fraction)

    def _check_sources(self, method: MethodConfig) -> None:
        if method.weights is None:
            return
        where = f"methods.{method.name}.weights"
        if not isinstance(self.data.train, dict):
            raise ValueError(f"{where}: data.train names one text; give it named sources")
        check_keys(method.weights, self.data.train, where)
        _require(bool(method.weights), where, {}, "name a source")

    def trains(self, method: MethodConfig) -> str:
        """Which parameters of a method's model train: "all", "feed_forward", "router" or "lora"."""
        return method.trains or self.training.trains

    def method(self, name: str) -> MethodConfig:
        """The method with this name. Raises ValueError that lists the recipe's methods."""
        for method in self.methods:
            if method.name == name:
                return method
        names = [method.name for method in self.methods]
        raise ValueError(f"method {name!r} is not in the recipe{nearest(name, names)}; it has {', '.join(names)}")


def of_comparison(recipe: Recipe) -> list[str]:
    """The sections of the recipe that say more than a training of the length of `training`: `fathom compare` reads
    them."""
    longer = [budget for budget in recipe.budgets if budget.kind not in ("tokens", "examples") or budget.amount]
    said = {"budgets": longer, "retrain": recipe.retrain, "downstream": recipe.downstream}
    return [section for section, given in said.items() if given]


def one_training(recipe: Recipe, where: str, seeds: str) -> MethodConfig:
    """The method of a recipe inside another file, which is trained once at one learning rate.

    Raises ValueError for what only a comparison reads, and for seeds, which `seeds` of that file says.
    """
    if len(recipe.methods) != 1:
        raise ValueError(f"{where}.methods: must be one method, not {len(recipe.methods)}")
    (method,) = recipe.methods
    for section in of_comparison(recipe):
        raise ValueError(f"{where}.{section}: only `fathom compare` reads it; leave it out")
    rates = candidates(recipe, method)
    if len(rates) > 1:
        raise ValueError(f"{where}: lr={list(rates)!r}: nothing is swept here; give one learning rate")
    for given, place in ((recipe.seeds != (0,), "seeds"), (method.seeds is not None, f"methods.{method.name}.seeds")):
        if given:
            raise ValueError(f"{where}.{place}: {seeds} says which; leave it out")
    return method


def candidates(recipe: Recipe, method: MethodConfig) -> tuple[float, ...]:
    """The learning rates to choose from: the method's `lr`, else `training.lr`."""
    rates = recipe.training.lr if method.lr is None else method.lr
    return rates if isinstance(rates, tuple) else (rates,)


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a YAML file. With `model.checkpoint` the tokenizer defaults to the checkpoint's.

    Raises OSError if the file cannot be read; ValueError, naming the key, the value and the remedy, if it is no recipe.
    """
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "stages" in raw:
            raise ValueError("has stages, which `fathom latents run` trains one after the other")
        if isinstance(raw, dict) and "base" in raw:
            raise ValueError("has a base, which `fathom grow` trains and then grows")
        recipe: Recipe = build(Recipe, raw)
        if recipe.training.lora != LowRank() and not any(recipe.trains(method) == "lora" for method in recipe.methods):
            raise ValueError("training.lora: nothing trains 'lora'; set trains: lora, or leave it out")
        if "checkpoint" in recipe.model and "tokenizer" in (raw.get("data") or {}):
            bpe = isinstance(recipe.data.tokenizer, dict)
            rule = "be the checkpoint's, whose token ids its embeddings know: leave it out, or name a folder"
            _require(not bpe, "data.tokenizer", recipe.data.tokenizer, rule)
    except ValueError as error:  # UnicodeDecodeError too
        raise ValueError(f"{path}: {error}") from None
    if "checkpoint" in recipe.model and "tokenizer" not in (raw.get("data") or {}):
        recipe = replace(recipe, data=replace(recipe.data, tokenizer=recipe.model["checkpoint"]))
    return recipe


def model_config(
    recipe: Recipe, method: MethodConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> FathomConfig:
    """The complete config of one method, for training it or for its cost.

    `tokenizer` is the prepared one; without it `{bpe: n}` counts as n tokens. Raises ValueError for fields that do not
    fit together and for a tokenizer with more ids than `vocab_size`.
    """
    other = recipe.task.model_config({**recipe.model, **method.fields}, recipe.data, tokenizer)
    if other is not None:
        return other
    fields = {**_numbers(recipe.model, "model"), **_numbers(method.fields, f"methods.{method.name}")}
    if (
        tokenizer is None
        and isinstance(recipe.data.tokenizer, str)
        and (recipe.data.atoms or recipe.task.adds_tokens or "checkpoint" not in fields)
    ):
        tokenizer = load_tokenizer(recipe.data.tokenizer)
        add_atoms(tokenizer, recipe.data.atoms_named)
    if "checkpoint" in fields:
        checkpoint = fields.pop("checkpoint")
        fields = recipe.task.completed(fields, tokenizer)
        ids = tokenizer.get_vocab().values() if recipe.task.adds_tokens and tokenizer is not None else ()
        config = _checkpoint_config(checkpoint, fields, max(ids, default=-1) + 1)
        if recipe.data.atoms and tokenizer is not None:  # rows of the embeddings that `train_run` adds
            config.vocab_size = max(config.vocab_size, max(tokenizer.get_vocab().values()) + 1)
    else:
        fields.setdefault("max_position_embeddings", recipe.data.block_size)
        if tokenizer is None:
            learned = recipe.data.tokenizer["bpe"]  # type: ignore[index]
            fields.setdefault("vocab_size", int(learned) + len(recipe.data.atoms_named))
        else:
            fields.setdefault("vocab_size", max(tokenizer.get_vocab().values()) + 1)
            for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
                fields.setdefault(special, getattr(tokenizer, special))
        config = FathomConfig(**recipe.task.completed(fields, tokenizer))
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, recipe.model.get("checkpoint", "the model"))
    if config.positions["name"] == "learned" and recipe.data.block_size > config.max_position_embeddings:
        raise ValueError(
            f"data.block_size={recipe.data.block_size}: the model has max_position_embeddings="
            f"{config.max_position_embeddings} learned positions; use shorter blocks"
        )
    return config


def _numbers(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields with numbers read as in the rest of a recipe; YAML reads 1e-5 as text."""
    types = FathomConfig.types()
    numbers = {name for name, value in fields.items() if types.get(name) in (int, float) and value is not None}
    return {
        name: convert(value, types[name], f"{where}.{name}") if name in numbers else value
        for name, value in fields.items()
    }


def _checkpoint_config(checkpoint: str, changes: dict[str, Any], rows: int = 0) -> FathomConfig:
    """The checkpoint's config with `changes`, and at least `rows` rows of embeddings."""
    refuse_absent(checkpoint, f"model.checkpoint={checkpoint!r}")
    try:
        stored = AutoConfig.from_pretrained(checkpoint)
    except OSError as error:  # the hub's message need not name it
        raise ValueError(f"model.checkpoint={checkpoint!r}: no config.json could be read ({error})") from error
    if rows > stored.vocab_size:
        changes = {**changes, "vocab_size": rows}
    if stored.model_type != FathomConfig.model_type:
        return config_from_stock(stored, **changes)
    return FathomConfig.from_dict(FathomConfig.get_config_dict(checkpoint)[0], **changes)


def _registry_of(name: str, where: str) -> str:
    for registry, methods in (*REGISTRIES.items(), *((section, methods_of(section)) for section in ENCODER_PLAIN)):
        if name in methods and name not in ("none", "standard"):
            return registry
    known = sorted(name for methods in REGISTRIES.values() for name in methods if name not in ("none", "standard"))
    raise ValueError(
        f"{where}={name!r}: no method has this name{nearest(name, known)}; methods: {', '.join(known)}. "
        f"A label of your own needs one of {', '.join(SECTIONS)} beside it"
    )


def _check_name(name: str, argument: str) -> None:
    _require(
        bool(_FOLDER_NAME.fullmatch(name)), argument, name, "be letters, digits, '.', '_', '+', '-' (a folder name)"
    )


def _check_lr(lr: float | tuple[float, ...], argument: str) -> None:
    candidates = lr if isinstance(lr, tuple) else (lr,)
    fine = bool(candidates) and all(0 < value < math.inf for value in candidates)
    _require(fine and len(set(candidates)) == len(candidates), argument, lr, "be positive, candidates distinct")


def _check_seeds(seeds: tuple[int, ...], argument: str) -> None:
    fine = bool(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    _require(fine and len(set(seeds)) == len(seeds), argument, list(seeds), "be between 0 and 2**32 - 1, all distinct")


def _require(condition: bool, argument: str, value: Any, rule: str) -> None:
    if not condition:
        raise ValueError(f"{argument}={value!r}: must {rule}")
