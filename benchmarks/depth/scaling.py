"""The largest model of every method, predicted from its smaller ones by power laws with one floor, beside what it has.

    python benchmarks/depth/scaling.py runs/depth-scaling/results.json --out scaling.json

    score_m(C) = E + a_m · C^(−b_m)        C: training FLOPs;  E: the floor that all methods share

Fitted by least squares to all sizes but each method's largest, which no number of the fit has seen. Intervals are 95 %:
of the fit's parameters (delta method) and of one more point's scatter, by the scatter of the points about the fit, with
as many degrees of freedom as points are left over. Rows of one method are told by their options, sizes by parameters;
seeds are averaged. Writes the JSON, and a plot beside it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from scipy.optimize import least_squares
from scipy.stats import t

from fathom.report.page import describe_options
from fathom.report.results import Results, Run
from fathom.report.style import styles
from fathom.writing import whole, write_json

UNIT = 1e15  # FLOPs: a_m is the part of the score that falls, at this compute


@dataclass(frozen=True)
class Point:
    """One size of one method: non-embedding parameters, training FLOPs, headline score as the mean over seeds."""

    parameters: int
    tokens: int
    flops: float
    score: float
    seeds: int


def points(runs: list[Run], score: str) -> dict[str, list[Point]]:
    """Sizes of every method under the budget of equal tokens, from the smallest. Of a run that is there twice the one
    that began later is taken; where neither says when, the last one."""
    runs = sorted(runs, key=lambda run: run.date or "")
    found: dict[str, dict[int, dict[int, Run]]] = {}
    for run in runs:
        if run.budget == "tokens" and not run.again:
            size = found.setdefault(describe_options(run.options), {}).setdefault(run.non_embedding_params, {})
            size[run.seed] = run
    made = {}
    for method, sizes in found.items():
        made[method] = [
            Point(
                parameters,
                statistics.mode(run.train_tokens for run in seeds.values()),
                statistics.fmean(run.train_flops for run in seeds.values()),
                statistics.fmean(run.scores[score] for run in seeds.values()),
                len(seeds),
            )
            for parameters, seeds in sorted(sizes.items())
        ]
    return made


@dataclass(frozen=True)
class Fit:
    """`score` and its 95 % interval at any compute, for each method.

    Attributes:
        parameters: E, then log a_m and log b_m of every method in turn.
        freedom: points less parameters.
    """

    methods: tuple[str, ...]
    parameters: np.ndarray
    covariance: np.ndarray
    scatter: float
    freedom: int

    def score(self, method: str, flops: float) -> float:
        return float(_score(self.parameters, self.methods.index(method), flops))

    def interval(self, method: str, flops: float) -> tuple[float, float]:
        """Where a new point is to be expected."""
        number, step = self.methods.index(method), 1e-6
        at = _score(self.parameters, number, flops)
        slope = np.array(
            [
                (_score(self.parameters + step * unit, number, flops) - at) / step
                for unit in np.eye(len(self.parameters))
            ]
        )
        half = t.ppf(0.975, self.freedom) * np.sqrt(slope @ self.covariance @ slope + self.scatter**2)
        return float(at - half), float(at + half)


def _score(parameters: np.ndarray, method: int, flops: float | np.ndarray) -> Any:
    a, b = np.exp(parameters[1 + 2 * method]), np.exp(parameters[2 + 2 * method])
    return parameters[0] + a * (np.asarray(flops) / UNIT) ** -b


def fit(known: dict[str, list[Point]]) -> Fit:
    """Raises ValueError where there are not more points than parameters."""
    methods, count = tuple(known), sum(map(len, known.values()))
    freedom = count - 1 - 2 * len(methods)
    if freedom < 1:
        raise ValueError(
            f"{count} points of {len(methods)} methods: a floor and two numbers a method need at least "
            f"{2 + 2 * len(methods)}; give four sizes of each method"
        )
    flops = [np.array([point.flops for point in known[m]]) for m in methods]
    scores = [np.array([point.score for point in known[m]]) for m in methods]

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return np.concatenate([_score(parameters, n, flops[n]) - scores[n] for n in range(len(methods))])

    lowest = min(map(np.min, scores))
    best = None
    for share in (0.3, 0.6, 0.9):  # of the lowest score, as a first floor: the problem is not convex
        start = [share * lowest]
        for x, y in zip(flops, scores, strict=True):
            slope, height = np.polyfit(np.log(x / UNIT), np.log(y - share * lowest), 1)
            start += [height, np.log(max(-slope, 1e-2))]
        low = np.full(len(start), -np.inf)
        low[0] = 0.0
        found = least_squares(residuals, start, bounds=(low, np.inf), x_scale="jac", max_nfev=20_000, xtol=1e-14)
        best = found if best is None or found.cost < best.cost else best
    assert best is not None
    scatter = float(np.sqrt(2 * best.cost / freedom))
    return Fit(methods, best.x, scatter**2 * np.linalg.pinv(best.jac.T @ best.jac), scatter, freedom)


def predict(found: dict[str, list[Point]]) -> dict[str, Any]:
    """The fit without each method's largest size, and what it says of that size."""
    smaller, largest = {m: sizes[:-1] for m, sizes in found.items()}, {m: sizes[-1] for m, sizes in found.items()}
    law = fit(smaller)
    rows = []
    for number, method in enumerate(law.methods):
        held, (low, high) = largest[method], law.interval(method, largest[method].flops)
        rows.append(
            {
                "method": method,
                "a": float(np.exp(law.parameters[1 + 2 * number])),
                "b": float(np.exp(law.parameters[2 + 2 * number])),
                "smaller": [vars(point) for point in smaller[method]],
                "largest": vars(held),
                "predicted": law.score(method, held.flops),
                "low": low,
                "high": high,
                "measured_less_predicted": held.score - law.score(method, held.flops),
            }
        )
    return {"floor": float(law.parameters[0]), "scatter": law.scatter, "freedom": law.freedom, "methods": rows}


def draw(predicted: dict[str, Any], heading: str, path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    looks = styles([row["method"] for row in predicted["methods"]])
    for row in predicted["methods"]:
        look, held = looks[row["method"]], row["largest"]
        x = np.geomspace(row["smaller"][0]["flops"], held["flops"])
        y = predicted["floor"] + row["a"] * (x / UNIT) ** -row["b"]
        axes.plot(x, y, look.line, color=look.light, linewidth=1.2)
        known = [(point["flops"], point["score"]) for point in row["smaller"]]
        axes.plot(*zip(*known, strict=True), look.marker, color=look.light, label=row["method"])
        bars = [[row["predicted"] - row["low"]], [row["high"] - row["predicted"]]]
        axes.errorbar(held["flops"], row["predicted"], yerr=bars, color=look.light, capsize=4, linewidth=1)
        axes.plot(held["flops"], held["score"], look.marker, color=look.light, markerfacecolor="none", markersize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(f"held-out {heading}")
    axes.set_title("filled: fitted; bars: predicted; hollow: measured, not fitted", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    with whole(path) as partial:
        figure.savefig(partial, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of comparisons on one text")
    parser.add_argument("--methods", nargs="+", help="only these, as a report describes them; else all with four sizes")
    parser.add_argument("--leave-out", nargs="+", default=[], help="names of rows that are no size of the series")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = [Results.load(path) for path in args.results]
    texts = {file.validation for file in files}
    if len(texts) > 1:
        raise SystemExit(f"the files are judged on different texts: {', '.join(sorted(texts))}")
    runs = [run for file in files for run in file.runs if run.method not in args.leave_out]
    score = files[0].scores[0]
    kept: dict[Any, Path] = {}
    given = [(run, path) for path, file in zip(args.results, files, strict=True) for run in file.runs]
    for run, path in sorted(given, key=lambda one: one[0].date or ""):
        if run.method in args.leave_out:
            continue
        row = describe_options(run.options), run.non_embedding_params, run.seed, run.budget, run.again
        if kept.setdefault(row, path) != path:
            print(f"{run.method}, seed {run.seed}, is in {kept[row]} and {path}: taken from {path}, the newer")
        kept[row] = path
    found = points(runs, score.name)
    wanted = args.methods or [method for method, sizes in found.items() if len(sizes) >= 4]
    missing = [method for method in wanted if method not in found]
    if missing:
        raise SystemExit(f"--methods {missing[0]!r}: the files have {', '.join(found)}")
    try:
        predicted = predict({method: found[method] for method in wanted})
    except ValueError as error:
        raise SystemExit(str(error)) from None
    used = {"commits": {run.commit for run in runs}, "devices": {run.device for run in runs}}
    origin = {name: sorted(values) for name, values in used.items()}
    write_json(args.out, {"score": score.name, "text": texts.pop(), **origin, **predicted})
    draw(predicted, score.heading, args.out.with_suffix(".png"))
    print(f"floor {predicted['floor']:.3f}, scatter {predicted['scatter']:.4f} {score.unit}")
    for row in predicted["methods"]:
        print(
            f"{row['method']:28} predicted {row['predicted']:.3f} ({row['low']:.3f} to {row['high']:.3f}), "
            f"measured {row['largest']['score']:.3f}"
        )


if __name__ == "__main__":
    main()
