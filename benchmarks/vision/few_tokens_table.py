"""Accuracy with few vision tokens by kind and size, and paired differences, of what few_tokens.py has written.

    python benchmarks/vision/few_tokens_table.py OUT docs/results/vision_few_tokens_h200.json

A picture of the table goes beside it, with .png for .json. An interval of one accuracy or of untrained models is 1.96
standard errors over questions. A difference of trained models is given twice: over questions, after the mean over
seeds, which says nothing of other seeds; and as `over_seeds`, mean and t interval of the seeds' own differences.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fathom.vision.scenes import scene
from fathom.writing import write_text

T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % of Student's t, by the number of seeds


def rivals(counts: list[int]) -> list[tuple[str, tuple[str, int | None], tuple[str, int | None]]]:
    """A stage, what is asked about, and over what."""
    found: list[Any] = []
    for stage in ("adapted", "parts"):
        for n in counts:
            found += [(stage, ("fourier_vlm", n), ("average_pooling", n))]
            found += [(stage, (name, n), ("fourier_vlm", n)) for name in ("dct_coefficients", "bicubic", "mqt")]
            found += [(stage, (name, n), ("all_tokens", None)) for name in ("fourier_vlm", "average_pooling")]
    return found


def over_seeds(single: dict[int, float]) -> list[float] | None:
    """Mean and t interval, of two seeds or more."""
    values = list(single.values())
    if len(values) < 2:
        return None
    half = T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), 4), round(half, 4)]


def groups(count: int) -> dict[str, list[int]]:
    """Numbers of the held-out questions by kind, by size, and of new scenes."""
    found: dict[str, list[int]] = defaultdict(list)
    for number in range(count):
        drawn = scene(0, number, True)
        found["all"].append(number)
        found[drawn.kind].append(number)
        found[f"{'words' if drawn.kind == 'read' else 'objects'}_{drawn.size}"].append(number)
        found["new_scenes" if drawn.new else "known_scenes"].append(number)
    return found


def share(right: list[float], numbers: list[int]) -> list[float]:
    """Accuracy on these questions and its interval."""
    values = [right[number] for number in numbers if number < len(right)]
    mean = statistics.fmean(values)
    return [round(mean, 4), round(1.96 * math.sqrt(mean * (1 - mean) / len(values)), 4)]


def majority(work: int, count: int) -> dict[str, float]:
    """What the most frequent answer to each kind gives."""
    asked = [scene(0, number, False) for number in range(work)]
    common = {}
    for kind in {drawn.kind for drawn in asked}:
        answers = [drawn.answer for drawn in asked if drawn.kind == kind]
        common[kind] = statistics.mode(answers)
    right = [float(common[drawn.kind] == drawn.answer) for drawn in (scene(0, n, True) for n in range(count))]
    return {name: share(right, numbers)[0] for name, numbers in groups(count).items()}


def difference(a: list[list[float]], b: list[list[float]], numbers: list[int]) -> list[float]:
    """Mean over questions of a − b, each the mean over its seeds, and the interval."""
    gaps = [statistics.fmean(run[n] for run in a) - statistics.fmean(run[n] for run in b) for n in numbers]
    return [round(statistics.fmean(gaps), 4), round(1.96 * statistics.stdev(gaps) / math.sqrt(len(gaps)), 4)]


def plot(out: dict[str, Any], path: Path) -> None:
    """Accuracy by vision tokens: adapted and untrained models, and Fourier-VLM's by the size of the object."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    adapted = {(row["method"], row["tokens"]): row["accuracy"] for row in out["trained"] if row["stage"] == "adapted"}
    counts = sorted({tokens for _, tokens in adapted if tokens})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")

    def line(place: Any, of: Any, xs: list[int], label: str, **style: Any) -> None:
        if not xs:  # not trained
            return
        shares, margins = zip(*(of(tokens) for tokens in xs), strict=True)
        place.errorbar(xs, shares, yerr=margins, label=label, marker="o", markersize=4, capsize=2, **style)

    names = {"fourier_vlm": "Fourier-VLM", "average_pooling": "average pooling", "dct_coefficients": "raw coefficients"}
    for name, label in names.items():
        xs = [tokens for tokens in counts if (name, tokens) in adapted]
        line(left, lambda tokens, name=name: adapted[name, tokens]["all"], xs, f"{label}, adapted")
    free = out["free"]["methods"]
    shown = sorted({int(name.split("-")[1]) for name in free if name.startswith("divprune-")})
    for name, label in {"sparsevlm": "SparseVLM", "divprune": "DivPrune", "fourier_vlm": "Fourier-VLM"}.items():
        ends = "-amplitude" if name == "fourier_vlm" else ""
        line(left, lambda n, name=name, ends=ends: free[f"{name}-{n}{ends}"]["accuracy"]["all"],
             [n for n in shown if "accuracy" in free.get(f"{name}-{n}{ends}", {})],
             f"{label}, untrained", linestyle=":")  # fmt: skip
    left.axhline(adapted["all_tokens", None]["all"][0], color="gray", label=f"all {out['tokens']} tokens")
    left.axhline(out["majority"]["all"], color="gray", linestyle="--", label="most frequent answers")
    for size in ("large", "medium", "small"):
        line(
            right,
            lambda tokens, size=size: adapted["fourier_vlm", tokens][f"objects_{size}"],
            counts,
            f"{size} objects",
        )
        right.axhline(adapted["all_tokens", None][f"objects_{size}"][0], color=right.lines[-1].get_color(), alpha=0.4)
    right.set_title(f"Fourier-VLM, adapted; pale: all {out['tokens']} tokens", fontsize=10)
    for place in (left, right):
        place.set(
            xscale="log", xticks=counts, xticklabels=counts, ylim=(0, 1), xlabel=f"vision tokens of {out['tokens']}"
        )
        place.minorticks_off()
        place.legend(fontsize=7, ncol=2 if place is left else 1, loc="upper left" if place is left else "lower right")
        place.grid(alpha=0.3)
    left.set_ylabel("questions answered right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def lines(out: dict[str, Any]) -> str:
    """JSON with a row of a table on each line."""

    def part(value: Any) -> str:
        if isinstance(value, list):
            return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
            return "{\n" + ",\n".join(f"{json.dumps(name)}: {part(one)}" for name, one in value.items()) + "\n}"
        return json.dumps(value)

    return part(out) + "\n"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER OUT.json")
    runs: dict[tuple[str, str, int | None], dict[int, Any]] = defaultdict(dict)
    free: dict[str, Any] = {}
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        job = json.loads(path.read_text(encoding="utf-8"))
        if job.get("stage") in ("parts", "adapted"):
            runs[job["stage"], job["method"]["name"], job["method"].get("tokens")][job["seed"]] = job
        elif "asked" in job:
            free = job
    any_run = next(iter(next(iter(runs.values())).values()))
    count = len(any_run["right"])
    by = groups(count)
    setting = json.loads(Path(sys.argv[1], "setting.json").read_text(encoding="utf-8"))
    out: dict[str, Any] = {
        "setting": setting,
        "questions": count,
        "tokens": (setting.get("side", 224) // 14) ** 2,
        "majority": majority(12_000, count),
        "trained": [],
        "differences": [],
    }
    right = {
        key: {seed: [float(c) for c in job["right"]] for seed, job in found.items()} for key, found in runs.items()
    }
    for (stage, name, tokens), found in runs.items():
        mine = list(right[stage, name, tokens].values())
        mean = [statistics.fmean(run[n] for run in mine) for n in range(count)]
        out["trained"].append(
            {
                "stage": stage,
                "method": name,
                "tokens": tokens,
                "seeds": {seed: job["accuracy"] for seed, job in found.items()},
                "pictures": [job["pictures"] for job in found.values()],
                "train_seconds": [job["train_seconds"] for job in found.values()],
                "curve": {seed: job["curve"] for seed, job in found.items()},
                "nats": {seed: job["nats"] for seed, job in found.items()},
                "right": {seed: job["right"] for seed, job in found.items() if seed == min(found)},
                "accuracy": {group: share(mean, numbers) for group, numbers in by.items()},
            }
        )
    counts = sorted({tokens for _, _, tokens in runs if tokens}, reverse=True)
    for stage, mine, theirs in rivals(counts):
        a, b = right.get((stage, *mine)), right.get((stage, *theirs))
        if a and b:
            gaps = {group: difference(list(a.values()), list(b.values()), numbers) for group, numbers in by.items()}
            both = sorted(a.keys() & b.keys())
            single = {seed: round(statistics.fmean(a[seed]) - statistics.fmean(b[seed]), 4) for seed in both}
            out["differences"].append({
                "stage": stage, "of": list(mine), "over": list(theirs), "seeds": single,
                "over_seeds": over_seeds(single), "gaps": gaps,
            })  # fmt: skip
    if free:
        few = groups(free["questions"])
        out["free"] = {"questions": free["questions"], "methods": {}}
        for name, said in free["asked"].items():
            answers = [float(c) for c in said.get("right", "")]
            groups_here = (
                {g: share(answers, [n for n in numbers if n < len(answers)]) for g, numbers in few.items()}
                if answers
                else {}
            )
            out["free"]["methods"][name] = (
                {"refused": said["refused"]}
                if "refused" in said
                else {"questions": len(answers), "nats": said["nats"], "right": said["right"], "accuracy": groups_here}
            )
        plain = [float(c) for c in free["asked"]["all_tokens"]["right"]]
        for name, said in free["asked"].items():
            if "right" not in said or name == "all_tokens":
                continue
            answers = [float(c) for c in said["right"]]
            rival = next((k for k in free["asked"] if k == f"fourier_vlm-{name.rsplit('-', 1)[1]}-amplitude"), None)
            numbers = list(range(len(answers)))
            row = out["free"]["methods"][name]
            row["less_than_all"] = difference([answers], [plain], numbers)
            if rival and "right" in free["asked"][rival] and rival != name:
                row["over_fourier_amplitude"] = difference(
                    [answers], [[float(c) for c in free["asked"][rival]["right"]]], numbers
                )
    write_text(Path(sys.argv[2]), lines(out))
    plot(out, Path(sys.argv[2]).with_suffix(".png"))
    for row in sorted(out["trained"], key=lambda row: (row["stage"], -(row["tokens"] or 999), row["method"])):
        print(row["stage"], row["method"], row["tokens"], row["seeds"], row["accuracy"]["all"])


if __name__ == "__main__":
    main()
