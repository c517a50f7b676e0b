"""`results.json`: the measurements of a comparison, run by run, and its summary by budget and method."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fathom.evaluate.held_out import FEWEST, bootstrap
from fathom.tasks import DEFAULT, Score, Task, lookup
from fathom.tasks.base import scores_read, with_scores
from fathom.writing import whole

BASELINE = "vanilla"
UNDISTURBED = 0.9  # share of the time on a core; below it something else had the cores, or data came too slowly
UNCALLABLE_PERCENT = 1.0  # one seed: smaller differences are not called (seeds alone can move the loss that much)


@dataclass(frozen=True)
class Run:
    """One trained model: a method with its options, under one budget, with one seed, at its best learning rate."""

    method: str  # the name the recipe gives it
    options: dict[str, dict[str, Any]]  # the sections depth, mixer and residual of its config
    budget: str  # its kind: "tokens", "examples", "train_flops" or "inference_flops"
    seed: int
    lr: float
    layers: int
    scores: dict[str, float]  # the task's, on held-out examples
    validation_loss: float  # on the same examples, the mean over targets
    train_loss: float  # the mean over targets and the last tenth of training
    params: int
    non_embedding_params: int
    train_tokens: int
    train_flops: float
    inference_flops_per_token: float  # the mean over a context of `block_size`
    kv_bytes_per_token: float
    tokens_per_second: float  # in training, median
    peak_memory_bytes: int | None  # see `own_memory_bytes`
    seconds: float  # of training
    history: list[dict[str, float]]  # {"tokens", "train_flops", "loss"}: training loss along the way
    samples: list[dict[str, str]]  # {"prompt", "text"}, and "expected" where the task knows the right answer
    device: str
    versions: dict[str, str]
    commit: str
    folder: str  # of the run; two budgets may ask for the same run
    pictures: dict[str, dict[str, Any]] = field(default_factory=dict)  # fathom.inspect's, of the held-out text
    residual_percent: float = 0.0  # inference_flops: by how much its cost misses the dearest method's
    answer_flops: float = 0.0  # of one of the task's answers
    train_examples: float = 0.0  # on average of the training data, where sequences hold several
    # of the headline score: whether it is exact or an upper bound, where the task has both, and its standard error
    exact: bool | None = None
    error: float | None = None
    # fathom.train.TrainResult says what these are; None in files of earlier versions
    tokens_per_second_interval: list[float] | None = None
    interruptions: int | None = None
    busy: float | None = None
    again: int = 0  # above 0: the same run trained again, for the spread of retraining
    date: str | None = None  # when the run began, UTC; None in files of earlier versions
    held_out: dict[str, Any] = field(default_factory=dict)  # fathom.evaluate.held_out.Pieces of the headline score
    downstream: dict[str, dict[str, Any]] = field(default_factory=dict)  # fathom.evaluate.downstream.Accuracy, by task

    @classmethod
    def read(cls, values: dict[str, Any]) -> Run:
        """A run read from a file. Files older than tasks are of language models on blocks of text."""
        return cls(**{"answer_flops": values["inference_flops_per_token"], **scores_read(values)})

    def value(self, quantity: str) -> float:
        """A score or another number of the run, by name."""
        return self.scores[quantity] if quantity in self.scores else getattr(self, quantity)

    @property
    def own_memory_bytes(self) -> int | None:
        """Peak memory of this training alone; None on a CPU, for which old files have the whole process's."""
        return None if "CPU" in self.device else self.peak_memory_bytes

    @property
    def marks(self) -> list[str]:
        """Reasons why the run's speed may not be its method's: "interrupted", "disturbed", "shared device"."""
        found = {
            "interrupted": bool(self.interruptions),
            "disturbed": self.busy is not None and self.busy < UNDISTURBED,
            "shared device": "shared by" in self.device,
        }
        return [mark for mark, holds in found.items() if holds]


@dataclass(frozen=True)
class Trial:
    """One candidate of a learning-rate sweep."""

    method: str
    layers: int
    lr: float
    tokens: int
    validation_loss: float | None  # None: diverged
    chosen: bool
    scores: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """All results of a comparison; `report.html` is made from them."""

    name: str
    recipe: str  # the YAML text, as it was run
    command: str
    block_size: int
    validation: str  # the held-out text: its name and size
    reference: float  # headline score of a model that knows frequencies alone
    task: dict[str, Any] = field(default_factory=lambda: lookup(DEFAULT)().section)
    scores: tuple[Score, ...] = lookup(DEFAULT).scores  # the first is the headline
    notes: list[str] = field(default_factory=list)  # what was done to the data that a reader should know
    failures: list[str] = field(default_factory=list)  # runs that did not finish, and why
    trials: list[Trial] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    downstream: dict[str, dict[str, Any]] = field(default_factory=dict)  # by budget: fathom.report.downstream.summary

    @property
    def task_class(self) -> type[Task]:
        return lookup(self.task["name"])

    @property
    def edges(self) -> list[str]:
        """Methods whose best learning rate is the smallest or largest candidate: a better one may lie outside."""
        found = []
        for chosen in (trial for trial in self.trials if trial.chosen):
            rates = [t.lr for t in self.trials if (t.method, t.layers) == (chosen.method, chosen.layers)]
            if chosen.lr in (min(rates), max(rates)):
                found.append(chosen.method)
        return list(dict.fromkeys(found))

    def save(self, path: Path) -> None:
        """Write by rename, so that a reader never sees half a file."""
        values = dataclasses.asdict(self)
        values["runs"] = [with_scores(run) for run in values["runs"]]
        values[self._reference_key] = values.pop("reference")
        with whole(path) as partial:
            partial.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @property
    def _reference_key(self) -> str:
        """The key of the reference in the file, such as "unigram_bits_per_byte"."""
        return f"{self.task_class.reference_name}_{self.scores[0].name}"

    @classmethod
    def load(cls, path: Path) -> Results:
        """The results in a file. Raises ValueError, naming the file, if it is no results file of this version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["runs"] = [Run.read(run) for run in content["runs"]]
            content["trials"] = [Trial(**trial) for trial in content["trials"]]
            if "scores" in content:
                content["scores"] = tuple(Score(**score) for score in content["scores"])
            known = {field.name for field in dataclasses.fields(cls)}
            results = cls(**{"reference": math.nan} | {name: content[name] for name in content if name in known})
            return dataclasses.replace(results, reference=content[results._reference_key])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: not a results.json of this version ({error}); run `fathom compare` again"
            ) from None


@dataclass(frozen=True)
class Difference:
    """The difference of two methods' scores, with its noise: of seeds, of the choice of held-out texts, and of training
    the same run again."""

    value: float  # this one's less the other's
    percent: float  # of the other's; nan where that is zero
    margin: float | None  # half width of the 95 % interval over paired seeds; None with one seed
    over_texts: tuple[float, float] | None = None  # 95 % interval over paired pieces of the held-out text
    unit: str = "documents"  # the pieces
    retraining: float | None = None  # how far the same run, trained again, was from itself
    undecided: bool = False  # the higher of the two is an upper bound and the other exact

    @property
    def interval(self) -> tuple[float, float] | None:
        """The lowest and the highest end of all known intervals; None if none is known."""
        halves = [half for half in (self.margin, self.retraining) if half is not None]
        ends = [self.over_texts] if self.over_texts is not None else []
        ends += [(self.value - half, self.value + half) for half in halves]
        return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None

    @property
    def clear(self) -> bool:
        """Whether zero lies outside every known interval. With one seed, whose noise is unknown, also whether it is
        above 1 %.
        """
        if self.undecided or not math.isfinite(self.value):
            return False
        if self.over_texts is not None and self.over_texts[0] <= 0 <= self.over_texts[1]:
            return False
        if self.retraining is not None and abs(self.value) <= self.retraining:
            return False
        if self.margin is None:
            return self.value != 0 and not abs(self.percent) < UNCALLABLE_PERCENT
        return abs(self.value) > self.margin


@dataclass(frozen=True)
class Row:
    """One method under one budget: the mean over its seeds."""

    runs: tuple[Run, ...]
    score: Score  # the task's headline
    retraining: float | None = None  # of the comparison: see `retraining_spread`

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def method(self) -> str:
        return self.first.method

    def mean(self, quantity: str) -> float:
        return statistics.fmean(run.value(quantity) for run in self.runs)

    def spread(self, quantity: str) -> float | None:
        """Standard deviation over seeds; None with one seed."""
        return statistics.stdev(run.value(quantity) for run in self.runs) if len(self.runs) > 1 else None

    @property
    def result(self) -> float:
        """The headline score."""
        return self.mean(self.score.name)

    @property
    def loss(self) -> float:
        """The headline score, negated if higher is better: something to minimise."""
        return self.score.loss(self.result)

    @property
    def marks(self) -> list[str]:
        """The marks of all its runs."""
        return list(dict.fromkeys(mark for run in self.runs for mark in run.marks))

    @property
    def speed_interval(self) -> tuple[float, float] | None:
        """Tokens/s of its runs, from the slowest to the fastest; None if one of them has no interval."""
        intervals = [run.tokens_per_second_interval for run in self.runs]
        known = [interval for interval in intervals if interval is not None]
        return (min(i[0] for i in known), max(i[1] for i in known)) if len(known) == len(intervals) else None

    @property
    def memory(self) -> float | None:
        """The mean peak memory of its runs; None unless it is known for all."""
        known = self._memories()
        return statistics.fmean(known) if known else None

    @property
    def memory_interval(self) -> tuple[float, float] | None:
        """The range of peak memory over seeds; None with one seed."""
        known = self._memories()
        return (min(known), max(known)) if len(known) > 1 else None

    def _memories(self) -> list[int]:
        known = [run.own_memory_bytes for run in self.runs if run.own_memory_bytes is not None]
        return known if len(known) == len(self.runs) else []

    def minus(self, other: Row) -> Difference:
        """The difference of this row's headline score from the other's (this − other), paired by seed, as one seed
        means one data order.
        """
        mine = {run.seed: run.scores[self.score.name] for run in self.runs}
        theirs = {run.seed: run.scores[self.score.name] for run in other.runs}
        gaps = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
        margin = None
        if len(gaps) > 1:
            margin = float(stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        value = statistics.fmean(gaps) if gaps else self.result - other.result
        unit, over_texts = self._over_texts(other, sorted(mine.keys() & theirs.keys()))
        percent = 100 * value / other.result if other.result else math.nan
        higher, lower = (self, other) if value > 0 else (other, self)
        undecided = higher.first.exact is False and lower.first.exact is True
        return Difference(value, percent, margin, over_texts, unit, self.retraining, undecided)

    def _over_texts(self, other: Row, seeds: list[int]) -> tuple[str, tuple[float, float] | None]:
        """The difference's interval over pieces of the held-out text: each piece has the mean over the common seeds."""
        pieces = [[run.held_out for run in row.runs if run.seed in seeds and run.held_out] for row in (self, other)]
        known = pieces[0] + pieces[1]
        if not seeds or len(known) < 2 * len(seeds) or len({tuple(piece["weights"]) for piece in known}) > 1:
            return "documents", None
        mine, theirs = (np.mean([piece["values"] for piece in side], axis=0) for side in pieces)
        if len(known[0]["weights"]) < FEWEST:  # drawn anew, so few say less than they seem to: one has no width at all
            return known[0]["unit"], None
        return known[0]["unit"], bootstrap((mine - theirs).tolist(), known[0]["weights"])


@dataclass(frozen=True)
class Table:
    """The methods under one budget, in the recipe's order."""

    budget: str
    rows: tuple[Row, ...]
    task: type[Task]
    score: Score  # the task's headline

    @property
    def baseline(self) -> Row:
        """The row of vanilla; without it, that of the method that is cheapest at inference."""
        named = [row for row in self.rows if row.method == BASELINE]
        return named[0] if named else min(self.rows, key=lambda row: row.first.answer_flops)

    @property
    def best(self) -> Row:
        return min(self.rows, key=lambda row: row.loss)

    @property
    def best_is_clear(self) -> bool:
        """Whether the best can be told from every other method."""
        return all(row is self.best or row.minus(self.best).clear for row in self.rows)

    @property
    def seeds(self) -> list[int]:
        """The numbers of seeds that rows have, ascending; `[1, 3]` if some have one and some three."""
        return sorted({len(row.runs) for row in self.rows})


def retraining_spread(results: Results) -> float | None:
    """The largest difference between the headline scores of a run and of the same run trained again; None
    if none was.
    """
    name, spread = results.scores[0].name, None
    for again in (run for run in results.runs if run.again):
        same = [
            r
            for r in results.runs
            if not r.again and (r.method, r.budget, r.seed) == (again.method, again.budget, again.seed)
        ]
        for first in same:
            spread = max(spread or 0.0, abs(again.scores[name] - first.scores[name]))
    return spread


def tables(results: Results) -> list[Table]:
    """The tables, one for each budget, in the order in which they were run."""
    found, retraining = [], retraining_spread(results)
    for budget in dict.fromkeys(run.budget for run in results.runs):
        runs = [run for run in results.runs if run.budget == budget and not run.again]
        methods = dict.fromkeys(run.method for run in runs)
        score = results.scores[0]
        rows = tuple(Row(tuple(r for r in runs if r.method == m), score, retraining) for m in methods)
        found.append(Table(budget, rows, results.task_class, score))
    return found
