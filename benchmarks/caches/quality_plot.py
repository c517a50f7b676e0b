"""Tables and curves of `quality.py`'s numbers.

    python benchmarks/caches/quality_plot.py OUT.json FOLDER [--positions 8192 32768]

Prints Markdown tables; writes FOLDER/<stem of OUT>_bytes.png (loss, or recall, against real bytes) and, for each of
`--positions`, _position_<tokens>.png (loss against position at each fraction; default: the longest window within the
trained context). The reference is the full cache, or TreeKV where the full cache is beyond the trained context: there
the pictures leave the full cache out, and cells whose slots are themselves beyond it, which have a † in the table.
Axes of the second picture end at 1.7 times the median of the methods' largest values: what loses most may leave it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fathom.caches import METHODS

OURS = [name for name, cls in METHODS.items() if cls.role == "method"]
Key = tuple[str, int, str, float]  # task, length, method, fraction
Cell = dict[str, Any]


def read(path: Path) -> dict[Key, Cell]:
    cells = {}
    for key, cell in json.loads(path.read_text())["cells"].items():
        task, length, name, fraction = key.split("/")
        cells[task, int(length), name, float(fraction)] = cell
    return cells


def outside(cell: Cell) -> bool:
    """Whether a cell's slots are beyond the trained context themselves."""
    return cell.get("method", {}).get("budget", 0) > cell.get("beyond_trained_context", math.inf)


def reference(cells: dict[Key, Cell], length: int, fraction: float) -> Cell:
    """The cell that a perplexity is compared with."""
    full = cells["perplexity", length, "full", 1.0]
    return cells.get(("perplexity", length, "treekv", fraction), full) if "beyond_trained_context" in full else full


def show(cell: Cell | None, compared: Cell) -> str:
    """A perplexity with the difference from the reference in nats (paired by book, ± standard error)."""
    if cell is None:
        return "not run"
    if "not_reachable" in cell:
        return f"not reachable (min. {cell['not_reachable']:.2f})"
    if "skipped" in cell or "failed" in cell:
        return "skipped" if "skipped" in cell else "failed"
    if "recall" in cell:
        return f"{cell['recall']:.1f}"
    value = f"{cell['perplexity']:.2f}{' †' if outside(cell) else ''}"
    if cell is compared:
        return value
    differences = [a - b for a, b in zip(cell["nll_by_row"], compared["nll_by_row"])]
    mean = sum(differences) / len(differences)
    if len(differences) == 1:
        return f"{value} ({signed(mean)})"
    spread = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return f"{value} ({signed(mean)} ± {(spread / len(differences)) ** 0.5:.3f})"


def signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def as_fraction(fraction: float) -> str:
    return f"1/{round(1 / fraction)}"


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |")


def save(figure: Any, path: Path) -> None:
    """With one legend for all axes, below them, where it hides nothing."""
    drawn = {text: line for axis in figure.axes for line, text in zip(*axis.get_legend_handles_labels())}
    columns = max(2, int(figure.get_figwidth() / 2.2))
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=columns, fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, nargs="+", help="windows whose loss against position is drawn")
    args = parser.parse_args()
    cells = read(args.results)
    args.folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for _, _, name, _ in cells if name != "full"))
    names.sort(key=lambda name: (name not in OURS, OURS.index(name) if name in OURS else 0, name))
    fractions = sorted({fraction for *_, fraction in cells} - {1.0}, reverse=True)
    # a length whose full cache was not measured has nothing to be compared with
    done = {key[:2]: cell for key, cell in cells.items() if key[2] == "full" and "failed" not in cell}
    windows = sorted(length for task, length in done if task == "perplexity")
    grids = sorted(key for key in done if key[0] != "perplexity")

    for length in windows:
        full = done["perplexity", length]
        note = "; compared with treekv: full is beyond its trained context" if "beyond_trained_context" in full else ""
        print(f"\nperplexity, {length:,} tokens; full cache: {full['perplexity']:.2f}{note}\n")
        print_row(["method", *map(as_fraction, fractions)])
        print_row(["---"] * (1 + len(fractions)))
        for name in names:
            row = [show(cells.get(("perplexity", length, name, f)), reference(cells, length, f)) for f in fractions]
            if set(row) != {"not run"}:
                print_row([name, *row])

    for fraction in fractions:
        asked = [grid for grid in grids if any((*grid, name, fraction) in cells for name in names)]
        if not asked:
            continue
        heads = [f"{task}, {length:,} (full: {done[task, length]['recall']:.1f})" for task, length in asked]
        print()
        print_row([f"method at {as_fraction(fraction)}", *heads])
        print_row(["---"] * (1 + len(asked)))
        for name in names:
            row = [show(cells.get((*grid, name, fraction)), {}) for grid in asked]
            if set(row) != {"not run"}:
                print_row([name, *row])

    colors = [*(f"C{i}" for i in range(10)), "navy", "gold", "lime"]  # one for every method

    def style(name: str) -> dict[str, Any]:
        return {"color": colors[names.index(name)], "linestyle": "-" if name in OURS else "--", "linewidth": 1.5}

    def logarithmic(axis: Any, lowest: float) -> None:
        """Use a logarithmic axis, linear below 0.003, as losses above the reference's span from 0.001 to 0.4."""
        axis.set_yscale("symlog", linthresh=0.003, linscale=0.5)
        axis.set_ylim(lowest, 0.5)
        ticks = [tick for tick in (-0.003, 0, 0.003, 0.01, 0.03, 0.1, 0.3) if tick >= lowest]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.grid(axis="y", color="0.9")

    # a grid at one fraction is a table, no curve
    curves = [("perplexity", length) for length in windows]
    curves += [grid for grid in grids if len({k[3] for k in cells if k[:2] == grid and k[2] != "full"}) > 1]
    columns = min(3, len(curves))
    lines = math.ceil(len(curves) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.8 * columns, 4.6 * lines + 0.8), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (task, length) in zip(axes.flat, curves):
        beyond = task == "perplexity" and "beyond_trained_context" in done[task, length]
        if task != "perplexity":
            axis.axhline(done[task, length]["recall"], color="black", linewidth=1, label="full")
            axis.set_ylim(-0.05, 1.05)
        else:
            logarithmic(axis, -0.004 if beyond else -0.0005)
            if not beyond:
                axis.axhline(0, color="black", linewidth=1, label="full")
        for name in names:
            points = []
            for f in fractions:
                cell = cells.get((task, length, name, f), {})
                if "recall" in cell:  # few values are possible: beside one another, none hides another
                    points.append((f * 2 ** (0.05 * (names.index(name) - len(names) / 2)), cell["recall"]))
                elif "nll" in cell and not outside(cell):
                    points.append((f, cell["nll"] - reference(cells, length, f)["nll"]))
            if points:
                axis.plot(*zip(*points), marker="o", markersize=3, label=name, **style(name))
        axis.set_xscale("log", base=2)
        axis.set_xticks(fractions, list(map(as_fraction, fractions)))
        kind = "recall" if task != "perplexity" else f"loss above {'TreeKV' if beyond else 'full'}'s, nats"
        title = f"{length:,} tokens" if task == "perplexity" else f"{task}, {length:,} tokens"
        axis.set(title=title, xlabel="asked for: fraction of the full cache's real bytes", ylabel=kind)
    save(figure, args.folder / f"{args.results.stem}_bytes.png")

    within = [length for length in windows if "beyond_trained_context" not in done["perplexity", length]]
    for length in args.positions or within[-1:] or windows[-1:]:
        full = done["perplexity", length]
        beyond, full_curve = "beyond_trained_context" in full, full["nll_by_position"]
        middle = [(i + 0.5) * length / len(full_curve) for i in range(len(full_curve))]
        drawn: dict[float, dict[str, list[float]]] = {}
        for f in fractions:
            found = {name: cells.get(("perplexity", length, name, f), {}) for name in names}
            losses = {n: c["nll_by_position"] for n, c in found.items() if "nll_by_position" in c and not outside(c)}
            if losses:
                drawn[f] = losses
        columns = len(drawn) if len(drawn) < 4 else 2
        lines = math.ceil(len(drawn) / columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(12, 4.2 * lines + 0.8), squeeze=False, sharex=True, layout="constrained"
        )
        for axis, (fraction, losses) in zip(axes.flat, drawn.items()):
            shown = losses
            if not beyond:
                shown = {name: [a - b for a, b in zip(curve, full_curve)] for name, curve in losses.items()}
                axis.axhline(0, color="black", linewidth=1, label="full")
                axis.set_ylim(top=1.7 * statistics.median(map(max, shown.values())))
                axis.set_ylim(bottom=-0.08 * axis.get_ylim()[1])
            for name, curve in shown.items():
                axis.plot(middle, curve, label=name, **style(name))
            axis.set(title=f"{as_fraction(fraction)} of the bytes, {length:,} tokens", xlabel="position")
            axis.locator_params(axis="x", nbins=5)
            axis.set_ylabel("loss, nats" if beyond else "loss above full's, nats")
        save(figure, args.folder / f"{args.results.stem}_position_{length}.png")


if __name__ == "__main__":
    main()
