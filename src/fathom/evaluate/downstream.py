"""Downstream accuracies of a comparison's models, by lm_eval, and the tasks on which they differ from guessing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathom.evaluate.tasks import evaluate_tasks, find_tasks

# of a task's metrics, the first of these is its accuracy: a share of documents, each right or wrong
ACCURACIES = ("acc", "exact_match", "acc_norm")
ERRORS = 2.0  # so many standard errors from guessing are a signal


@dataclass(frozen=True)
class Accuracy:
    """A model's accuracy on one task. Attributes:
    metric: lm_eval's name of it.
    value, error: the share of documents that it has right, and the standard error over documents.
    chance: accuracy of guessing: the mean of 1/choices; 0 where a text must be written.
    documents: number of documents.
    """

    metric: str
    value: float
    error: float
    chance: float
    documents: int


@dataclass(frozen=True)
class Downstream:
    """The section `downstream` of a recipe: tasks on which every trained model is scored.

    Attributes:
        tasks: names of lm_eval tasks, groups or tags.
        task_dir: folder of task YAML files of your own; they go before lm_eval's.
        limit: the most documents of each task.
        num_fewshot: examples before each question; None: as each task says.
        batch_size: questions at a time.
    """

    tasks: tuple[str, ...]
    task_dir: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("downstream.tasks=[]: must name a task")
        for name, least in (("limit", 1), ("num_fewshot", 0), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"downstream.{name}={value}: must be at least {least}")

    def load(self) -> dict[str, Any]:
        """lm_eval's tasks by name, with groups replaced by their tasks. Raises ImportError without lm_eval,
        FileNotFoundError for a missing folder, ValueError for a task that is unknown or has no accuracy."""
        found = find_tasks(list(self.tasks), self.task_dir).load(list(self.tasks))["tasks"]
        for name, task in found.items():
            _metric(name, [entry["metric"] for entry in task.config.metric_list or ()])
        return found

    def digest(self) -> str:
        """A digest of everything that decides a model's scores: the options but `batch_size`, and files of
        `task_dir`.
        """
        said = hashlib.sha256(repr({**asdict(self), "batch_size": None}).encode())
        files = Path(self.task_dir).rglob("*") if self.task_dir is not None else ()
        for path in sorted(path for path in files if path.is_file()):
            said.update(path.name.encode())
            with path.open("rb") as file:  # data may be larger than memory
                while block := file.read(1 << 20):
                    said.update(block)
        return said.hexdigest()

    def measure(self, model: Any, tokenizer: Any) -> dict[str, Accuracy]:
        """The accuracy on each task. Raises what `load` does."""
        loaded = self.load()
        scores = evaluate_tasks(
            model, tokenizer, list(self.tasks), self.task_dir, self.limit, self.batch_size, self.num_fewshot
        )
        found = {}
        for name, task in loaded.items():
            metric = _metric(name, scores[name])
            chance, documents = _guessing(task, self.limit)
            value = scores[name][metric]
            error = scores[name].get(f"{metric}_stderr", math.sqrt(value * (1 - value) / documents))
            found[name] = Accuracy(metric, value, error, chance, documents)
        return found


def signal(scores: Sequence[Accuracy]) -> bool:
    """Whether the mean of a contestant's runs on a task is more than two standard errors from guessing.

    The runs answer the same documents, so the error of their mean is taken to be that of one run. The error of guessing
    is known exactly; the larger of the two is used, as a model with all answers wrong has no spread.
    """
    value, error, chance = (
        sum(getattr(s, name) for s in scores) / len(scores) for name in ("value", "error", "chance")
    )
    guessing = math.sqrt(chance * (1 - chance) / scores[0].documents)
    return abs(value - chance) > ERRORS * max(error, guessing)


def without_signal(contestants: Mapping[str, Sequence[Mapping[str, Accuracy]]]) -> list[str]:
    """Tasks on which every contestant is within two standard errors of chance.

    contestants: by name, the accuracies of each of its runs by task.
    """
    tasks = dict.fromkeys(task for runs in contestants.values() for run in runs for task in run)
    return [
        task
        for task in tasks
        if not any(signal([run[task] for run in runs if task in run]) for runs in contestants.values() if runs)
    ]


def mean(runs: Sequence[Mapping[str, Accuracy]], tasks: Sequence[str]) -> tuple[float, float]:
    """The mean accuracy over `tasks` and its standard error, of one contestant's runs (see `signal`)."""
    rows = [[run[task] for run in runs] for task in tasks]
    values = [sum(s.value for s in row) / len(row) for row in rows]
    errors = [sum(s.error for s in row) / len(row) for row in rows]
    return sum(values) / len(values), math.hypot(*errors) / len(errors)


def _metric(task: str, known: Any) -> str:
    names = {str(name).split(",")[0]: str(name) for name in reversed(list(known))}  # "exact_match,strict-match"
    for name in ACCURACIES:
        if name in names:
            return names[name]
    raise ValueError(
        f"downstream.tasks: {task!r} has no accuracy ({', '.join(ACCURACIES)}), but {', '.join(names) or 'no metric'}; "
        "leave it out, or score it by `fathom evaluate --tasks`"
    )


def _guessing(task: Any, limit: int | None) -> tuple[float, int]:
    """The accuracy of guessing on the scored documents, and the number of these."""
    documents = list(task.eval_docs)[:limit]
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0, len(documents)
    return sum(1 / len(task.doc_to_choice(document)) for document in documents) / len(documents), len(documents)
