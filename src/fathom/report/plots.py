"""The three plots of a comparison as PNG files, each for a light and for a dark page."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from fathom.report.results import UNCALLABLE_PERCENT, Row, Table
from fathom.report.style import Style
from fathom.writing import whole

THEMES = {"light": {"ink": "#1d2430", "muted": "#667080", "grid": "#e3e7ec", "page": "#ffffff", "accent": "#0b5cad"}}
THEMES["dark"] = {"ink": "#e8ebf0", "muted": "#97a1b0", "grid": "#303844", "page": "#1a2029", "accent": "#7db7f2"}
NOISES_SHOWN = 8  # the quality axis spans at least this many times the noise: differences within it look small
SUFFIX = {"light": "", "dark": "_dark"}


def draw(table: Table, styles: dict[str, Style], reference: float, folder: Path) -> dict[str, dict[str, Path]]:
    """Write the plots of one budget. Returns their paths by plot and theme."""
    task, score = table.task, table.score

    def loss(axes: Axes, theme: str, quantity: str) -> None:
        for row in table.rows:
            x, y = curve(row, quantity)
            style = styles[row.method]
            axes.plot(x, y, style.line, color=getattr(style, theme), linewidth=1.8, label=row.method)
        axes.set_ylim(*_loss_limits(table))
        axes.set_ylabel(f"training loss, {task.loss_unit}")

    def loss_tokens(axes: Axes, theme: str) -> None:
        loss(axes, theme, "tokens")
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))

    def loss_flops(axes: Axes, theme: str) -> None:
        loss(axes, theme, "train_flops")
        axes.set_xlabel("training FLOPs")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))

    def pareto(axes: Axes, theme: str) -> None:
        points = [(row.first.answer_flops, row.result, row) for row in table.rows]
        steps = [(row.first.answer_flops, row.result) for row in front(table)]
        if len(steps) > 1:
            axes.step(*zip(*steps), where="post", color=THEMES[theme]["muted"], linewidth=1, linestyle=(0, (2, 2)))
        for x, y, row in points:
            style = styles[row.method]
            axes.errorbar(
                x,
                y,
                yerr=error_bar(row, table.baseline),
                color=getattr(style, theme),
                marker=style.marker,
                markersize=9,
                linestyle="none",
                capsize=4,
                label=row.method,
            )
        axes.margins(0.15, 0.2)
        axes.set_ylim(*_at_least(axes.get_ylim(), NOISES_SHOWN * noise(table)))
        axes.set_xlim(*_at_least(axes.get_xlim(), 0.2 * max(x for x, _, _ in points)))
        axes.set_xlabel(f"inference {task.cost_heading}")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.set_ylabel(f"held-out {score.heading}")
        axes.set_title(
            f"{task.reference_name.capitalize()} baseline: {reference:.3f}",
            fontsize=9,
            color=THEMES[theme]["muted"],
            loc="right",
        )

    plots: dict[str, Callable[[Axes, str], None]] = {
        "loss_tokens": loss_tokens,
        "loss_flops": loss_flops,
        "pareto": pareto,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return {
        name: {theme: _write(plot, theme, folder / f"{table.budget}_{name}{SUFFIX[theme]}.png") for theme in THEMES}
        for name, plot in plots.items()
    }


def embed(path: Path) -> str:
    """A PNG file as a data URL."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def curve(row: Row, quantity: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Training loss against `quantity`, averaged over seeds, then over a running window of a fiftieth of training."""
    shortest = min(len(run.history) for run in row.runs)
    losses = np.mean([[point["loss"] for point in run.history[:shortest]] for run in row.runs], axis=0)
    x = np.array([point[quantity] for point in row.first.history[:shortest]])
    window = max(1, shortest // 50)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    keep = np.unique(np.linspace(0, len(smooth) - 1, points).astype(int))
    return x[window - 1 :][keep], smooth[keep]


def loss_at(row: Row, flops: float) -> float | None:
    """Training loss of the smoothed curve where that many training FLOPs had been spent; None outside the curve."""
    x, y = curve(row, "train_flops")
    return float(np.interp(flops, x, y)) if len(x) and x[0] <= flops <= x[-1] else None


def _loss_limits(table: Table) -> tuple[float, float]:
    """Limits of the loss axis, from below the lowest loss to the loss after a tenth of training."""
    curves = [curve(row, "tokens")[1] for row in table.rows]
    low = min(float(y.min()) for y in curves)
    high = max(float(y[len(y) // 10 :].max()) for y in curves)
    return low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3


def noise(table: Table) -> float:
    """The noise of the headline score: the largest, over rows, difference from the baseline that is not called."""
    gaps = [row.minus(table.baseline) for row in table.rows if row is not table.baseline]
    unknown = UNCALLABLE_PERCENT / 100 * abs(table.baseline.result)
    return max((unknown if gap.margin is None else gap.margin for gap in gaps), default=unknown)


def _at_least(limits: tuple[float, float], span: float) -> tuple[float, float]:
    """The limits, widened evenly to `span` if they are closer."""
    low, high = limits
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def error_bar(row: Row, baseline: Row) -> list[list[float]] | None:
    """Lengths of a row's error bar below and above its score: the uncertainty of its difference from the baseline.

    A bar that reaches the baseline's score marks a difference that is not called. The baseline's own bar shows the
    spread of retraining.
    """
    if row is baseline:
        return None if row.retraining is None else [[row.retraining], [row.retraining]]
    gap = row.minus(baseline)
    low, high = gap.interval or (gap.value, gap.value)
    if gap.margin is None:  # the noise of seeds is not known
        least = UNCALLABLE_PERCENT / 100 * abs(baseline.result)
        low, high = min(low, gap.value - least), max(high, gap.value + least)
    return [[gap.value - low], [high - gap.value]]


def front(table: Table) -> list[Row]:
    """The Pareto front: rows by rising cost of an answer, each better than all cheaper ones by more than noise."""
    found: list[Row] = []
    for row in sorted(table.rows, key=lambda row: (row.first.answer_flops, row.loss)):
        if not found or (row.loss < found[-1].loss and row.minus(found[-1]).clear):
            found.append(row)
    return found


def _write(plot: Callable[[Axes, str], None], theme: str, path: Path) -> Path:
    colours = THEMES[theme]
    figure = Figure(figsize=(4.8, 3.4), dpi=200, facecolor=colours["page"], layout="constrained")
    axes = figure.add_subplot(facecolor=colours["page"])
    plot(axes, theme)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours["muted"])
    axes.grid(color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colours["muted"], labelsize=10)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=colours["ink"], fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) <= 26 else 1  # below the axes, where names cover no curve
    figure.set_figheight(3.4 + 0.22 * math.ceil(len(labels) / columns))
    look = {"frameon": False, "labelcolor": colours["ink"], "fontsize": 9.5, "handlelength": 1.7, "columnspacing": 1.2}
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)
    with whole(path) as partial:
        figure.savefig(partial, format="png")
    return path
