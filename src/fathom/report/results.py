"""`results.json`: what a comparison measured, run by run, and its summary by budget and method."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from fathom.writing import whole

BASELINE = "vanilla"
UNDISTURBED = 0.9  # share of the time on a core; below it something else had the cores, or data came too slowly
UNCALLABLE_PERCENT = 1.0  # one seed: smaller differences are not called (seeds alone can move the loss that much)


@dataclass(frozen=True)
class Run:
    """One trained model: a method with its options, under one budget, with one seed, at its best learning rate."""

    method: str  # the name the recipe gives it
    options: dict[str, dict[str, Any]]  # the sections depth, mixer and residual of its config
    budget: str  # "tokens", "train_flops" or "inference_flops"
    seed: int
    lr: float
    layers: int
    bits_per_byte: float  # on held-out text
    validation_loss: float  # nats per token, the same text
    train_loss: float  # nats per token, mean of the last tenth of training
    params: int
    non_embedding_params: int
    train_tokens: int
    train_flops: float
    inference_flops_per_token: float
    kv_bytes_per_token: float
    tokens_per_second: float  # in training, median
    peak_memory_bytes: int | None  # see `own_memory_bytes`
    seconds: float  # of training
    history: list[dict[str, float]]  # {"tokens", "train_flops", "loss"}: training loss along the way
    samples: list[dict[str, str]]  # {"prompt", "text"}
    device: str
    versions: dict[str, str]
    commit: str
    folder: str  # of the run; two budgets may ask for the same run
    pictures: dict[str, dict[str, Any]] = field(default_factory=dict)  # fathom.inspect's, of the held-out text
    residual_percent: float = 0.0  # inference_flops: by how much its cost misses the dearest method's
    # fathom.train.TrainResult says what these are; None in files of earlier versions
    tokens_per_second_interval: list[float] | None = None
    interruptions: int | None = None
    busy: float | None = None

    @property
    def own_memory_bytes(self) -> int | None:
        """Peak memory of this training alone. On a CPU there is none: earlier versions noted the whole process's."""
        return None if "CPU" in self.device else self.peak_memory_bytes

    @property
    def marks(self) -> list[str]:
        """What keeps the run's speed from being its method's: "interrupted", "disturbed", "shared device"."""
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


@dataclass(frozen=True)
class Results:
    """Everything that `report.html` is made from."""

    name: str
    recipe: str  # the YAML text, as it was run
    command: str
    block_size: int
    validation: str  # the held-out text: its name and size
    unigram_bits_per_byte: float
    failures: list[str] = field(default_factory=list)  # runs that did not finish, and why
    trials: list[Trial] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

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
        with whole(path) as partial:
            text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises ValueError naming the file where it is not a results file of this version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            runs, trials = [Run(**run) for run in content["runs"]], [Trial(**trial) for trial in content["trials"]]
            return cls(**{**content, "runs": runs, "trials": trials})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: not a results.json of this version ({error}); run `fathom compare` again"
            ) from None


@dataclass(frozen=True)
class Difference:
    """How far one method's bits per byte are from another's, and whether that can be told from seed noise."""

    bits: float  # negative: better (fewer bits)
    percent: float
    margin: float | None  # half width of the 95 % interval over paired seeds; None with one seed

    @property
    def clear(self) -> bool:
        """Beyond the interval; with one seed, where the noise is unknown, beyond 1 %."""
        return abs(self.percent) >= UNCALLABLE_PERCENT if self.margin is None else abs(self.bits) > self.margin


@dataclass(frozen=True)
class Row:
    """One method under one budget: the mean over its seeds."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def method(self) -> str:
        return self.first.method

    def mean(self, quantity: str) -> float:
        return statistics.fmean(getattr(run, quantity) for run in self.runs)

    def spread(self, quantity: str) -> float | None:
        """Standard deviation over seeds; None with one seed."""
        return statistics.stdev(getattr(run, quantity) for run in self.runs) if len(self.runs) > 1 else None

    @property
    def marks(self) -> list[str]:
        """Of any of its runs."""
        return list(dict.fromkeys(mark for run in self.runs for mark in run.marks))

    @property
    def speed_interval(self) -> tuple[float, float] | None:
        """Tokens/s of its runs, from the slowest to the fastest; None where one of them has no interval."""
        intervals = [run.tokens_per_second_interval for run in self.runs]
        known = [interval for interval in intervals if interval is not None]
        return (min(i[0] for i in known), max(i[1] for i in known)) if len(known) == len(intervals) else None

    @property
    def memory(self) -> float | None:
        """The mean of its runs' own peak memory; None where it is not known of all."""
        known = self._memories()
        return statistics.fmean(known) if known else None

    @property
    def memory_interval(self) -> tuple[float, float] | None:
        """Over seeds; None with one seed."""
        known = self._memories()
        return (min(known), max(known)) if len(known) > 1 else None

    def _memories(self) -> list[int]:
        known = [run.own_memory_bytes for run in self.runs if run.own_memory_bytes is not None]
        return known if len(known) == len(self.runs) else []

    def minus(self, other: Row) -> Difference:
        """This row's bits per byte less the other's. Seeds are paired: the same seed means the same data order."""
        mine = {run.seed: run.bits_per_byte for run in self.runs}
        theirs = {run.seed: run.bits_per_byte for run in other.runs}
        gaps = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
        margin = None
        if len(gaps) > 1:
            margin = float(stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        bits = statistics.fmean(gaps) if gaps else self.mean("bits_per_byte") - other.mean("bits_per_byte")
        return Difference(bits, 100 * bits / other.mean("bits_per_byte"), margin)


@dataclass(frozen=True)
class Table:
    """The methods under one budget, in the recipe's order."""

    budget: str
    rows: tuple[Row, ...]

    @property
    def baseline(self) -> Row:
        """Vanilla; where the recipe has none, the method that is cheapest at inference."""
        named = [row for row in self.rows if row.method == BASELINE]
        return named[0] if named else min(self.rows, key=lambda row: row.first.inference_flops_per_token)

    @property
    def best(self) -> Row:
        return min(self.rows, key=lambda row: row.mean("bits_per_byte"))

    @property
    def best_is_clear(self) -> bool:
        """Whether the best can be told from every other method."""
        return all(row is self.best or row.minus(self.best).clear for row in self.rows)

    @property
    def seeds(self) -> list[int]:
        """How many seeds rows have, from the fewest; `[1, 3]` where only some have three."""
        return sorted({len(row.runs) for row in self.rows})


def tables(results: Results) -> list[Table]:
    """One table a budget, in the order in which they were run."""
    found = []
    for budget in dict.fromkeys(run.budget for run in results.runs):
        runs = [run for run in results.runs if run.budget == budget]
        methods = dict.fromkeys(run.method for run in runs)
        found.append(Table(budget, tuple(Row(tuple(r for r in runs if r.method == m)) for m in methods)))
    return found
