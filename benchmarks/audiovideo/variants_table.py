"""What variants.py has written as one file: every run, differences from the whole bridge, and guidance.

    python benchmarks/audiovideo/variants_table.py OUT docs/results/mova_variants_h200.json

Intervals of a run are over its clips. A difference is taken clip by clip within a seed, as all models make the same
clips of the same noise: with several seeds its interval is Student's over the seeds' means, with one over clips.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fathom.writing import write_text

WHOLE = "both"
KEPT = ("together", "chance", "offset_ms", "within_frame", "missed", "extra", "av_align", "spectrum")
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % of Student's t, by the number of seeds


def rounded(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: entry[name] for name in ("order", "text", "bridge")}
    for name in KEPT:
        said = entry[name]
        digits = 2 if name in ("offset_ms", "spectrum") else 4
        numbers = [said["mean"], *(said["interval"] or [])]
        found[name] = [None if number is None else round(number, digits) for number in numbers]
    return found


def means(seeds: dict[int, Any]) -> dict[str, Any]:
    """Over seeds, of each figure's mean over clips."""
    found = {name: [seeds[seed][name]["mean"] for seed in sorted(seeds)] for name in KEPT}
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {"seeds": len(seeds), **{n: round(statistics.fmean(v), 4) if v else None for n, v in known.items()}}


def gap(mine: dict[int, Any], theirs: dict[int, Any], name: str) -> dict[str, Any] | None:
    """Mean difference in `name` over the seeds that both have, of the clips for which both have a number."""
    single: dict[int, float] = {}
    clips: list[float] = []
    for seed in sorted(mine.keys() & theirs.keys()):
        pairs = zip(mine[seed]["of_clips"][name], theirs[seed]["of_clips"][name], strict=True)
        clips = [a - b for a, b in pairs if a is not None and b is not None]
        if clips:
            single[seed] = statistics.fmean(clips)
    if not single:
        return None
    values = list(single.values())
    found: dict[str, Any] = {"seeds": {seed: round(value, 4) for seed, value in single.items()}}
    found["mean"] = round(statistics.fmean(values), 4)
    if len(values) > 1:
        half = T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
        return {**found, "interval": [round(found["mean"] - half, 4), round(found["mean"] + half, 4)], "over": "seeds"}
    again = np.random.default_rng(0).choice(clips, (2000, len(clips))).mean(axis=1)
    return {**found, "interval": [round(float(b), 4) for b in np.percentile(again, [2.5, 97.5])], "over": "clips"}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER OUT.json")
    folder, out = Path(sys.argv[1]), []
    trained: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    guided: dict[tuple[float, float], dict[int, Any]] = defaultdict(dict)
    setting = json.loads((folder / "setting.json").read_text(encoding="utf-8"))
    for path in sorted(folder.glob("*-*-*.json")):
        job = json.loads(path.read_text(encoding="utf-8"))
        for entry in job["judged"]:
            if path.name.startswith("scan"):
                guided[entry["text"], entry["bridge"]][job["seed"]] = entry
                continue
            trained[job["method"], entry["order"]][job["seed"]] = entry
            if job["method"] == WHOLE:
                guided[1.0, 1.0][job["seed"]] = entry
            errors = {name: round(job[name], 4) for name in ("video_error", "audio_error")}
            run = {"method": job["method"], "seed": job["seed"], "steps": job["steps"]}
            out.append({"kind": "run", **run, "seconds": job["train_seconds"], **errors, **rounded(entry)})
    for (method, order), seeds in trained.items():
        out.append({"kind": "mean", "method": method, "order": order, **means(seeds)})
    for (method, order), seeds in trained.items():
        if (method, order) == (WHOLE, "joint"):
            continue
        gaps = {name: gap(seeds, trained[WHOLE, "joint"], name) for name in ("together", "offset_ms")}
        out.append({"kind": "less_than_whole", "method": method, "order": order, **gaps})
    for (text, bridge), seeds in sorted(guided.items()):
        for seed, entry in sorted(seeds.items()):
            out.append({"kind": "guidance", "seed": seed, **rounded(entry)})
        out.append({"kind": "guidance_mean", "text": text, "bridge": bridge, **means(seeds)})
        gaps = {name: gap(seeds, guided[text, 1.0], name) for name in ("together", "offset_ms")}
        if bridge != 1.0:
            out.append({"kind": "over_s_B_1", "text": text, "bridge": bridge, **gaps})
    lines = [json.dumps({"kind": "setting", **setting}), *map(json.dumps, out)]
    write_text(Path(sys.argv[2]), "[\n" + ",\n".join(lines) + "\n]\n")
    for row in out:
        if row["kind"] in ("run", "guidance"):
            name = row.get("method", "guidance")
            scales = f"s_T={row['text']:g} s_B={row['bridge']:g} {row['order']}"
            print(name, row["seed"], scales, *(f"{k} {row[k][0]}" for k in KEPT))
        else:
            print({k: v for k, v in row.items() if v is not None})


if __name__ == "__main__":
    main()
