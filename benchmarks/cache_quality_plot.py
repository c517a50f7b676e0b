"""Table and curves of `cache_quality.py`'s numbers.

    python benchmarks/cache_quality_plot.py OUT.json FOLDER

Prints Markdown tables; writes FOLDER/<stem of OUT>_bytes.png (perplexity and recall against real bytes) and
_position.png (extra loss against position at each fraction, for the longest window that has them all; the loss itself
where the full cache is beyond the trained context and nothing to be compared with).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = ("treekv", "weightedkv", "freqkv", "vqkv", "fourier_attention")


def read(path: Path) -> dict[tuple[str, int, str, float], dict[str, Any]]:
    """(task, length, method, fraction) → cell."""
    cells = {}
    for key, cell in json.loads(path.read_text())["cells"].items():
        task, length, name, fraction = key.split("/")
        cells[task, int(length), name, float(fraction)] = cell
    return cells


def show(task: str, cell: dict[str, Any] | None, full: dict[str, Any]) -> str:
    """A perplexity with the paired difference from full in nats (± standard error over books), or a recall."""
    if cell is None:
        return "not run"
    if "not_reachable" in cell:
        return f"not reachable (min. {cell['not_reachable']:.2f})"
    if "skipped" in cell or "failed" in cell:
        return "skipped" if "skipped" in cell else "failed"
    if task != "perplexity":
        return f"{cell['recall']:.1f}"
    differences = [a - b for a, b in zip(cell["nll_by_row"], full["nll_by_row"])]
    mean = sum(differences) / len(differences)
    if len(differences) == 1:
        return f"{cell['perplexity']:.2f} ({mean:+.3f})"
    spread = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return f"{cell['perplexity']:.2f} ({mean:+.3f} ± {(spread / len(differences)) ** 0.5:.3f})"


def save(figure: Any, path: Path) -> None:
    """With one legend for all axes, below them, where it hides nothing."""
    drawn = {text: line for axis in figure.axes for line, text in zip(*axis.get_legend_handles_labels())}
    columns = max(2, int(figure.get_figwidth() / 1.5))
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    cells = read(args.results)
    args.folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for _, _, name, _ in cells if name != "full"))
    names.sort(key=lambda name: (name not in OURS, name))
    fractions = sorted({fraction for *_, fraction in cells} - {1.0}, reverse=True)
    # a length whose full cache was not measured has nothing to be compared with
    measured_full = [key[:2] for key, cell in cells.items() if key[2] == "full" and "failed" not in cell]
    tables = sorted(measured_full, key=lambda t: (t[0] != "perplexity", t))

    for task, length in tables:
        full = cells[task, length, "full", 1.0]
        value = f"perplexity {full['perplexity']:.2f}" if task == "perplexity" else f"recall {full['recall']:.1f}"
        note = ", beyond its trained context" if "beyond_trained_context" in full else ""
        print(f"\n{task}, {length:,} tokens; full cache: {value}{note}\n")
        print("| method | " + " | ".join(f"1/{round(1 / f)}" for f in fractions) + " |")
        print("| --- |" + " --- |" * len(fractions))
        for name in names:
            row = [show(task, cells.get((task, length, name, f)), full) for f in fractions]
            print(f"| {name} | " + " | ".join(row) + " |")

    colors = [*(f"C{i}" for i in range(10)), "navy", "gold", "lime"]  # one for every method

    def style(name: str) -> dict[str, Any]:
        return {"color": colors[names.index(name)], "linestyle": "-" if name in OURS else "--", "linewidth": 1.5}

    figure, axes = plt.subplots(1, len(tables), figsize=(4.2 * len(tables), 4), squeeze=False, layout="constrained")
    for axis, (task, length) in zip(axes[0], tables):
        kind = "perplexity" if task == "perplexity" else "recall"
        axis.axhline(cells[task, length, "full", 1.0][kind], color="black", linewidth=1, label="full")
        for name in names:
            found = [(f, cells.get((task, length, name, f), {}).get(kind)) for f in fractions]
            points = [(f, value) for f, value in found if value is not None]
            if kind == "recall":  # few values are possible: beside one another, none hides another
                points = [(f * 2 ** (0.05 * (names.index(name) - len(names) / 2)), value) for f, value in points]
                axis.set_ylim(-0.05, 1.05)
            if points:
                axis.plot(*zip(*points), marker="o", markersize=3, label=name, **style(name))
        axis.set_xscale("log", base=2)
        axis.set_xticks(fractions, [f"1/{round(1 / f)}" for f in fractions])
        axis.set(title=f"{task}, {length:,} tokens", xlabel="fraction of the full cache's real bytes", ylabel=kind)
    save(figure, args.folder / f"{args.results.stem}_bytes.png")

    windows = [length for task, length in tables if task == "perplexity"]
    if not windows:
        return
    measured = {length: {key[3] for key in cells if key[:2] == ("perplexity", length)} for length in windows}
    longest = max(length for length in windows if len(measured[length]) == max(map(len, measured.values())))
    full = cells["perplexity", longest, "full", 1.0]
    full_curve, beyond = full["nll_by_position"], "beyond_trained_context" in full
    figure, axes = plt.subplots(
        1, len(fractions), figsize=(4.2 * len(fractions), 4), squeeze=False, sharey=True, layout="constrained"
    )
    middle = [(i + 0.5) * longest / len(full_curve) for i in range(len(full_curve))]
    for axis, fraction in zip(axes[0], fractions):
        axis.plot(middle, full_curve if beyond else [0] * len(middle), color="black", linewidth=1, label="full")
        for name in names:
            curve = cells.get(("perplexity", longest, name, fraction), {}).get("nll_by_position")
            if curve:
                shown = curve if beyond else [a - b for a, b in zip(curve, full_curve)]
                axis.plot(middle, shown, label=name, **style(name))
        axis.set(title=f"1/{round(1 / fraction)} of the bytes", xlabel="position")
        axis.locator_params(axis="x", nbins=5)
    axes[0][0].set_ylabel(f"{'loss' if beyond else 'extra loss against full'}, nats ({longest:,} tokens)")
    save(figure, args.folder / f"{args.results.stem}_position.png")


if __name__ == "__main__":
    main()
