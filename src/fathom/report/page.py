"""`report.html`: one self-contained page that opens from disk, without a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fathom.inspect import PICTURES
from fathom.models.registry import ENCODER_PLAIN, SECTIONS, resolve_section
from fathom.report.downstream import has_downstream, summary
from fathom.report.pictures import save_picture, shown
from fathom.report.plots import draw, embed
from fathom.report.results import UNCALLABLE_PERCENT, Results, Row, Run, Table, tables
from fathom.report.style import styles
from fathom.report.wording import (
    MEANINGS,
    TITLES,
    at_edge,
    disturbances,
    duration,
    in_sentence,
    overall,
    ratio,
    ratio_within,
    si,
    verdict,
)
from fathom.tables.text.base import from_dict as table_method
from fathom.tasks import Score
from fathom.writing import whole

PLOTS = {
    "loss_tokens": "Training loss against tokens",
    "loss_flops": "Training loss against training FLOPs",
    "pareto": "Quality against inference cost",
}


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, the value it is sorted by, and further lines in small type."""

    text: str
    value: float | str
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the results table: its heading, what the heading means, and its cell for a row."""

    name: str
    heading: str
    title: str
    cell: Callable[[Row, Table], Cell]


def _quantity(name: str, heading: str, title: str, unit: str = "", compared: bool = True) -> Column:
    def cell(row: Row, table: Table) -> Cell:
        value = row.mean(name)
        note = ratio(value, table.baseline.mean(name)) if compared else ""
        return Cell(si(value, unit) if value else "not measured", value, note if value else "")

    return Column(name, heading, title, cell)


def _speed(row: Row, table: Table) -> Cell:
    """A row's speed. The ratio to the baseline is shown only if both had the same device, alone and without a break."""
    value, base, own = row.mean("tokens_per_second"), table.baseline, row.speed_interval
    notes = ["spread unknown" if own is None else f"{si(own[0])} to {si(own[1])}"]
    obstacles = row.marks or [f"{mark}: {base.method}" for mark in base.marks]
    if obstacles:
        notes += obstacles
    elif len({run.device for run in (*row.runs, *base.runs)}) > 1:
        notes.append("device differs")
    elif row is not base:
        notes.append(ratio_within(value, base.mean("tokens_per_second"), own, base.speed_interval))
    return Cell(si(value), value, "\n".join(filter(None, notes)))


def _memory(row: Row, table: Table) -> Cell:
    value, base, own = row.memory, table.baseline, row.memory_interval
    if value is None:
        return Cell("not measured", 0)
    notes = ["" if own is None else f"{si(own[0], 'B')} to {si(own[1], 'B')}"]
    if row is not base:
        notes.append(ratio_within(value, base.memory or 0.0, own, base.memory_interval))
    return Cell(si(value, "B"), value, "\n".join(filter(None, notes)))


def _score(score: Score, held_out: str) -> Column:
    def cell(row: Row, table: Table) -> Cell:
        mean, spread = row.mean(score.name), row.spread(score.name)
        notes = [f"± {spread:.3f}" if spread is not None else ""]
        if score == row.score and row.first.exact is not None:
            notes.append("exact" if row.first.exact else "upper bound")
        if score == row.score and row.first.error is not None:
            notes[-1] += f", standard error {row.first.error:.4f}"
        return Cell(f"{mean:.3f}", mean, "\n".join(filter(None, notes)))

    title = f"On {held_out}, {score.better} is better; ± is the deviation over seeds"
    return Column(score.name, score.heading, title, cell)


def _against(row: Row, table: Table) -> Cell:
    gap = row.minus(table.baseline)
    if row is table.baseline:
        return Cell("baseline", 0.0)
    note = "" if gap.clear else "a bound above an exact value" if gap.undecided else "too little to call"
    if math.isnan(gap.percent):
        return Cell(f"{gap.value:+.3f}".replace("-", "−"), gap.value, note)
    return Cell(f"{gap.percent:+.1f} %".replace("-", "−"), gap.percent, note)


COLUMNS = (
    _quantity("train_flops", "training FLOPs", "Forward and backward over all training tokens"),
    _quantity("kv_bytes_per_token", "KV cache per token", "Bytes of keys and values kept for one token", "B"),
    _quantity("train_tokens", "training tokens", "Tokens read in training"),
    Column(
        "tokens_per_second",
        "tokens/s",
        "Median in training, and the range from the slowest tenth of its stretches to the fastest",
        _speed,
    ),
    Column(
        "peak_memory_bytes", "peak memory", "Most that training had allocated on the GPU; range over seeds", _memory
    ),
    _quantity("params", "parameters", "All of them, a tied head once; as `fathom cost` counts them"),
    _quantity("non_embedding_params", "non-embed.", "Without the embedding table and the head"),
)
_EXAMPLES = _quantity("train_examples", "training examples", "Read in training, on average of the data")
_RESIDUAL = Column(
    "residual_percent",
    "FLOPs residual",
    "How far the inference FLOPs are from the dearest method's",
    lambda row, table: Cell(
        f"{row.first.residual_percent:+.1f} %".replace("-", "−"),
        row.first.residual_percent,
        f"{row.first.layers} layers",
    ),
)


def write_report(results: Results, folder: Path) -> Path:
    """Draw the plots into `folder/plots` and write `folder/report.html`. Returns the page's path.

    Raises ValueError if no run has finished.
    """
    if not results.runs:
        raise ValueError(f"results of {results.name!r} hold no finished run: nothing to report")
    found = tables(results)
    looks = styles(list(dict.fromkeys(run.method for run in results.runs)))
    sections = [
        {
            "budget": table.budget,
            "title": TITLES[table.budget],
            "meaning": MEANINGS[table.budget].format(answer=table.task.answer),
            "verdict": verdict(table),
            "table": table,
            "columns": (columns := _columns(table, results.scores)),
            "rows": [(row, [column.cell(row, table) for column in columns]) for row in table.rows],
            "downstream": summary(table) if has_downstream(table) else None,
            "plots": _embed(draw(table, looks, results.reference, folder / "plots")),
        }
        for table in found
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fathom.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(si=si, duration=duration, in_sentence=in_sentence)
    page = environment.get_template("page.html").render(
        results=results,
        task=results.task_class,
        scores=results.scores,
        overall=overall(found, results.reference),
        sections=sections,
        captions=PLOTS,
        least=f"{UNCALLABLE_PERCENT:g} %",
        looks=looks,
        number={method: i for i, method in enumerate(looks, start=1)},  # CSS classes
        methods=_methods(results.runs),
        samples=_samples(found[0]),
        disturbances=disturbances(results.runs),
        at_edge=at_edge(results.edges),
        pictures=_pictures(found[0], folder / "plots"),
        bars=_bars(found[0], results.reference),
        seeds=len({run.seed for run in results.runs}),
        total_seconds=sum({run.folder: run.seconds for run in results.runs}.values()),
        devices=sorted({run.device for run in results.runs}),
        commits=sorted({run.commit for run in results.runs}),
        versions=results.runs[0].versions,
    )
    path = folder / "report.html"
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def describe_options(options: dict[str, dict[str, Any]]) -> str:
    """'pondering (steps=1)': every active method with its first option and all that differ from their defaults."""
    said = []
    for registry, section in options.items():
        if registry == "table":  # how sources are read, which has no plain form
            plain = table_method(section["name"]).to_dict()
            changed = [f"{key}={value}" for key, value in section.items() if value != plain[key]]
            said.append(f"{section['name']} ({', '.join(changed)})" if changed else section["name"])
            continue
        known = (
            registry in ENCODER_PLAIN or registry in SECTIONS
        )  # a task's own section says only what is not its default
        if known and section["name"] in (
            (ENCODER_PLAIN[registry],) if registry in ENCODER_PLAIN else SECTIONS[registry].plain
        ):
            continue
        defaults = resolve_section(registry, section["name"]) if known else {}
        given = {key: value for key, value in section.items() if key != "name"}
        shown = [
            f"{key}={value}" for i, (key, value) in enumerate(given.items()) if i == 0 or value != defaults.get(key)
        ]
        said.append(f"{section['name']} ({', '.join(shown)})" if shown else str(section["name"]))
    return " + ".join(said) or f"ordinary {'encoder' if any(name in options for name in ENCODER_PLAIN) else 'decoder'}"


def _columns(table: Table, scores: tuple[Score, ...]) -> tuple[Column, ...]:
    """The columns: the task's scores, the models' costs, and the quantities of the budget."""
    task = table.task
    first, *more = (_score(score, task.held_out) for score in scores)
    against = Column("against", "against baseline", f"Difference of {first.heading} from the baseline", _against)
    answer = _quantity("answer_flops", task.cost_heading, f"Of one {task.answer}")
    loss = Column(
        "validation_loss",
        "held-out loss",
        f"{task.loss_unit.capitalize()}, on {task.held_out}",
        lambda row, table: Cell(f"{row.mean('validation_loss'):.3f}", row.mean("validation_loss")),
    )
    budget = {"inference_flops": (_RESIDUAL,), "examples": (_EXAMPLES,)}.get(table.budget, ())
    return (first, against, *more, COLUMNS[0], answer, *COLUMNS[1:], loss, *budget)


def _methods(runs: list[Run]) -> dict[str, str]:
    return {run.method: describe_options(run.options) for run in runs}


def _samples(table: Table) -> list[tuple[str, str | None, list[tuple[str, str]]]]:
    """For every prompt the right answer, if there is one, and each method's answer."""
    expected = {s["prompt"]: s.get("expected") for row in table.rows for s in row.first.samples}
    return [
        (
            prompt,
            right,
            [(row.method, s["text"]) for row in table.rows for s in row.first.samples if s["prompt"] == prompt],
        )
        for prompt, right in expected.items()
    ]


def _bars(table: Table, reference: float) -> list[dict[str, Any]]:
    """Bars of the headline score for each method and the reference: score / largest score, in percent."""
    values: list[tuple[str | None, float]] = [(row.method, row.result) for row in table.rows]
    values.append((None, reference))
    longest = max(value for _, value in values) or 1.0
    return [{"method": method, "value": value, "width": 100 * value / longest} for method, value in values]


def _embed(plots: dict[str, dict[str, Path]]) -> dict[str, dict[str, str]]:
    return {name: {theme: embed(path) for theme, path in themes.items()} for name, themes in plots.items()}


def _pictures(table: Table, folder: Path) -> list[dict[str, Any]]:
    """Every picture of every method, of its first run."""
    found = []
    for row in table.rows:
        for name, values in row.first.pictures.items():
            picture = PICTURES[name](**values)
            found.append(
                {"method": row.method, **shown(picture, save_picture(picture, folder, f"{row.method}_{name}"))}
            )
    return found
