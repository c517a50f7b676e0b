"""The seam of a task: what it tells training, the sweep, budgets, results and the report.

A task is one file in this folder: a frozen dataclass whose fields are the options of a recipe's section `task`,
registered by name. Everything around it, from the learning-rate sweep to the page, is one code path for all tasks.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fathom.cost import forward_flops_per_token, kv_bytes_per_token, parameter_counts, training_flops_per_token
from fathom.data import EMBEDDED, DataConfig, PreparedData, Source, collate
from fathom.data.packing import IGNORED
from fathom.data.prepared import require_disjoint
from fathom.models.registry import SECTIONS, check_type, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fathom.models.configuration import FathomConfig
    from fathom.train.recipe import Recipe

DEFAULT = "causal_lm"  # the task of a recipe that names none, and of files written before there were tasks


@dataclasses.dataclass(frozen=True)
class Score:
    """One number that a trained model is judged by.

    Attributes:
        name: key in result.json and results.json; with spaces it is the heading on the page.
        unit: the unit as it follows the number in a sentence, such as "bits per byte".
        better: which direction is better.
        meaning: how it is computed, one sentence for the page; `{block_size}` is the recipe's.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"]
    meaning: str

    @property
    def heading(self) -> str:
        return self.name.replace("_", " ")

    def unit_of(self, exact: bool | None) -> str:
        """The unit after a value that is exact or an upper bound; None where a task has one kind only."""
        return self.unit if exact is None else f"{self.unit} ({'exact' if exact else 'upper bound'})"

    def loss(self, value: float) -> float:
        """The value, negated if higher is better: something to minimise."""
        return value if self.better == "lower" else -value


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer of a trained model, for the page. `expected` is the right answer where there is one."""

    prompt: str
    text: str
    expected: str | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model's sizes for the report. Attributes:
    parameters, non_embedding: number of parameters, with and without tables and head.
    flops_per_token: matrix products of one forward, over the tokens of a sequence.
    cache_bytes_per_token: bytes that decoding keeps for a token.
    """

    parameters: int
    non_embedding: int
    flops_per_token: float
    cache_bytes_per_token: float


@dataclasses.dataclass(frozen=True)
class Task:
    """Base of the tasks. The fields of a subclass are its options, checked in `__post_init__`.

    Attributes:
        name: in a recipe.
        summary: one line.
        scores: the first is the headline, by which learning rates and methods are chosen.
        held_out: what the scores are measured on, such as "held-out text".
        loss_unit: of training and held-out losses, such as "nats per token".
        answer: what inference cost is counted for, such as "generated token".
        cost_heading: the same as a heading, such as "FLOPs per token".
        reference_name: the baseline that knows only frequencies, such as "unigram".
        reference_note: what that baseline knows, one sentence for the page.
        samples_note: how the samples on the page were made.
        checkpoint_fields: config fields that a recipe with a checkpoint may change; None: a decoder's sections.
        invariants: further tests of tests/tasks that apply: "padding" (a row has the same loss in a batch and alone),
            "packing" (option `packing` does not change a row's loss).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    scores: ClassVar[tuple[Score, ...]]
    held_out: ClassVar[str]
    loss_unit: ClassVar[str]
    answer: ClassVar[str]
    cost_heading: ClassVar[str]
    reference_name: ClassVar[str]
    reference_note: ClassVar[str]
    mixes: ClassVar[bool] = False  # whether data.train, data.validation may name several data sets
    unused: ClassVar[tuple[str, ...]] = ()  # fields of the recipe's `data` that a task of whole rows cannot honour
    samples_note: ClassVar[str]
    checkpoint_fields: ClassVar[tuple[str, ...] | None] = None
    invariants: ClassVar[tuple[str, ...]] = ()
    alternates: ClassVar[bool] = False  # whether parts of a model take no part in some training steps
    shards: ClassVar[tuple[str, ...] | None] = None  # classes whose weights FSDP gathers together; None: the layers'
    adds_tokens: ClassVar[bool] = False  # whether its models have tokens that a tokenizer need not have
    asked_by_lm_eval: ClassVar[bool] = False  # whether its models answer lm_eval's questions
    pads: ClassVar[bool] = True  # whether rows of a training batch may be filled up with padding
    numbered: ClassVar[bool] = False  # training examples say under "draw" (seed, number of the example in the run)

    @classmethod
    def from_yaml(cls, raw: Any, where: str) -> Task:
        """The task in a recipe: given by its name, or by a mapping with `name` and options."""
        entry = {"name": raw} if isinstance(raw, str) else raw
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            known = ", ".join(sorted(tasks()))
            raise ValueError(f"{where}={raw!r}: give a task's name, or a mapping with `name`; tasks: {known}")
        kind = lookup(entry["name"], where)
        options = {key: value for key, value in entry.items() if key != "name"}
        hints = typing.get_type_hints(kind)
        known_options = [field.name for field in dataclasses.fields(kind)]
        for key, value in options.items():
            if key not in known_options:
                raise ValueError(
                    f"unknown key {where}.{key}{nearest(str(key), known_options)}; task {kind.name!r} has the options: "
                    f"{', '.join(known_options) or 'none'}"
                )
            check_type(f"{where}.{key}", value, hints[key])
        return kind(**options)

    @property
    def headline(self) -> Score:
        return self.scores[0]

    @property
    def section(self) -> dict[str, Any]:
        """The task as a recipe writes it: its name and every option, lists as lists."""
        options = dataclasses.asdict(self)
        return {"name": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The model class that a method of the recipe builds."""
        from fathom.models.causal_lm import FathomForCausalLM

        return FathomForCausalLM

    def class_of(self, config: Any) -> type[PreTrainedModel]:
        """The model class that a method with this config builds."""
        return self.model_class

    def exact(self, config: Any) -> bool | None:
        """Whether a model's headline score is exact (else an upper bound); None: the task has one kind only."""
        return None

    def error(self, model: Any, data: PreparedData) -> float | None:
        """Standard error of a model's headline score; None unless that is a Monte Carlo estimate."""
        return None

    @classmethod
    def model_fields(cls) -> list[str]:
        """Fields that a recipe's `model` and `methods` may set, beside `checkpoint`."""
        from fathom.models.configuration import FathomConfig

        return list(FathomConfig.types())

    def model_config(self, fields: dict[str, Any], data: DataConfig, tokenizer: Any) -> Any:
        """The config made from a recipe's fields, for a model other than our decoder; None: it is our decoder."""
        return None

    def new_model(self, config: Any, fields: dict[str, Any], data: PreparedData) -> Any:
        """The model to train; None if the config, or `fields["checkpoint"]`, is enough to make it."""
        return None

    def callbacks(self) -> Sequence[Any]:
        """Further Trainer callbacks."""
        return ()

    def remarks(self, scores: Mapping[str, float | None]) -> list[str]:
        """Sentences that the page must show beside a run's scores."""
        return []

    def before(self, recipe: Recipe) -> Recipe | None:
        """The training that a run of `recipe` begins with, and whose model it then trains; None: there is none."""
        return None

    def processor(self, data: PreparedData, config: Any) -> Any:
        """The object saved beside a trained model: the tokenizer, or a processor that holds it."""
        return data.tokenizer

    def sections(self, config: Any) -> dict[str, dict[str, Any]]:
        """The methods of a model, section by section."""
        return {section: getattr(config, section) for section in SECTIONS}

    def training_flops(
        self, config: Any, block_size: int, checkpointing: bool, ran: Sequence[float] | None = None
    ) -> float:
        """Matrix-product FLOPs of training for one token of a sequence."""
        return training_flops_per_token(config, block_size, checkpointing, ran=ran)

    def sizes(self, config: Any, block_size: int, dtype: torch.dtype, ran: Sequence[float] | None = None) -> Sizes:
        """Sizes of a model. ran: measured shares of tokens that run each step; None: all tokens run all steps."""
        counts = parameter_counts(config)
        flops = forward_flops_per_token(config, block_size, ran=ran).matmul
        return Sizes(counts.total, counts.non_embedding, flops, kv_bytes_per_token(config, dtype, ran))

    def completed(self, fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Fields of FathomConfig for a method's model, given those of the recipe and the tokenizer, if it is known."""
        return fields

    def check(self, data: DataConfig) -> None:
        """Raise ValueError for a field of the recipe's `data` that this task does not support, and ImportError with the
        pip command for an extra that is not installed.

        All tasks are imported to list them, so packages of an extra are imported only inside functions.
        """
        if not self.mixes and not isinstance(data.train, str):
            raise ValueError(
                f"data.train={sorted(data.train)!r}: task {self.name!r} reads one data set; name it, or use task "
                "'causal_lm'"
            )
        if not self.mixes and isinstance(data.validation, dict):
            raise ValueError(
                f"data.validation={sorted(data.validation)!r}: task {self.name!r} is scored on one data set; name it, "
                "or use task 'causal_lm'"
            )
        for name in self.unused:
            if getattr(data, name) != getattr(DataConfig, name):
                limit = "" if "max_documents" in self.unused else " (max_documents limits rows)"
                raise ValueError(
                    f"data.{name}={getattr(data, name)!r}: task {self.name!r} reads whole rows and does not use it; "
                    f"leave it out{limit}"
                )

    def refuse_text(self, data: DataConfig) -> None:
        """Raise ValueError if the recipe names the embedded text although the task needs rows."""
        for name, more in (("train", ""), ("validation", ", or give null")):
            if getattr(data, name) == EMBEDDED:
                raise ValueError(
                    f"data.{name}={EMBEDDED!r} is running text; task {self.name!r} needs rows: name a JSONL or Parquet "
                    f"file{more}"
                )

    def sources(self, data: DataConfig, field: str = "text") -> tuple[Source, Source | None]:
        """Training rows and held-out rows of the data set, which `check` has accepted."""
        assert isinstance(data.train, str)
        train = Source(data.train, data.train_split, field, "data.train", data.max_documents)
        if data.validation is None:
            return train, None
        assert isinstance(data.validation, str)
        held_out = Source(data.validation, data.validation_split, field, "data.validation")
        require_disjoint(train, held_out)
        return train, held_out

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        """Examples for the Trainer, and the data for scoring. Raises OSError or ValueError that names the field."""
        raise NotImplementedError  # abstract

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch for the model."""
        return collate(examples)

    def forward(self, model: Any, **batch: Any) -> Any:
        """The model's output for a batch in training and on held-out examples, with `loss`: the model's own; 0 for a
        batch without targets, which then weighs nothing."""
        return model(**batch)

    def tokens(self, batch: Mapping[str, Tensor], config: Any) -> int:
        """The number of tokens in a batch of a model with that config."""
        return batch["input_ids"].numel()

    def counted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The labels of a batch; a step's training loss is divided by the number of those other than −100."""
        return batch["labels"]

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of predictions over which the loss of a batch is a mean."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def complete(self, folder: Path, config: Any, data: PreparedData) -> None:
        """Add files that a user needs to the folder of a saved model. By default there are none."""

    def config_of(self, folder: Path) -> Any:
        """The config of a saved model, for its card."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        """Every score of a trained model by name; None for a score that is not finite or has nothing to score.

        Args:
            loss: mean over `targets` of all held-out examples; None if not finite or without held-out examples.
            checkpoint: folder of the trained model.
        """
        raise NotImplementedError  # abstract

    def pieces(self, model: Any, data: PreparedData) -> Any:
        """The headline score of a trained model on each piece of the held-out data (evaluate/held_out.py).

        From these the page tells whether a difference depends on the choice of texts. None: the task has no pieces.
        """
        return None

    def reference(self, data: PreparedData, sequences: int) -> float:
        """The headline score of a baseline that knows only frequencies in the first `sequences` training sequences."""
        raise NotImplementedError  # abstract

    def held_out_size(self, data: PreparedData) -> str:
        """The size of the held-out data, in words for the page."""
        return f"{data.validation_bytes:,} bytes"

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        """A few answers of a trained model, each at most `room` tokens long with its prompt."""
        raise NotImplementedError  # abstract

    def picture_tokens(self, data: PreparedData, count: int) -> Tensor:
        """About `count` tokens of the held-out examples [n], for the pictures of fathom.inspect."""
        blocks = data.validation
        assert blocks is not None  # compare() has refused recipes without held-out text
        wanted = max(1, count // len(blocks[0]["input_ids"]))
        return torch.cat([blocks[i]["input_ids"] for i in range(min(wanted, len(blocks)))]).long()

    def answer_flops(
        self, config: FathomConfig, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        """Matrix-product FLOPs of one answer. ran: measured shares of tokens that run each step; None: all do."""
        raise NotImplementedError  # abstract


_TASKS: dict[str, type[Task]] = {}


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator: make a task available as `task: {name: <name>, …}` in recipes."""

    def add(cls: type[Task]) -> type[Task]:
        if name in _TASKS and _TASKS[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"task {name!r} is registered already, by {_TASKS[name]}")
        cls.name = name
        _TASKS[name] = cls
        return cls

    return add


def tasks() -> dict[str, type[Task]]:
    """All tasks by name. Their files are imported on the first call."""
    package = importlib.import_module("fathom.tasks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fathom.tasks.{module.name}")
    return _TASKS


def lookup(name: str, where: str = "task") -> type[Task]:
    """The task of that name. Raises ValueError that lists what exists and names the nearest."""
    known = tasks()
    if name not in known:
        raise ValueError(
            f"{where}: task {name!r} does not exist{nearest(name, list(known))}; available: {', '.join(sorted(known))}"
        )
    return known[name]


def with_scores(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they are written to a file: each of `scores` is also a key of its own."""
    return {**values, **values["scores"]}


def scores_read(values: dict[str, Any]) -> dict[str, Any]:
    """The values read from a file, the inverse of `with_scores`. Old files have only `bits_per_byte`."""
    scores = values.get("scores", {"bits_per_byte": values.get("bits_per_byte")})
    return {**{key: value for key, value in values.items() if key not in scores}, "scores": scores}
