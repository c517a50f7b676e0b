"""From the raw scores of a zoo to the nulls that Fathom ships, and how they do on models that they have not seen.

    python benchmarks/lineage/calibrate.py docs/results/lineage_zoo docs/results/lineage_zoo_relatives

Reads what zoo.py has written. Writes src/fathom/lineage/calibration.json and docs/results/lineage_null.json. A third of
the models is held out: no pair with one of them is in the null. Pairs of the null without a common model are picked
greedily, those with the fewest alternatives first.
"""

import argparse
import gzip
import hashlib
import json
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from fathom.lineage import verdict
from fathom.lineage.awm import exceeds
from fathom.lineage.detection import detection, roc

# mode: (record of the zoo, prefix of its roles, whether the plain score is judged)
MODES = {
    "hardened-identity": ("identity", "", True),
    "hardened-lap": ("embedding_lap", "", False),
    "hardened-procrustes": ("embedding_procrustes", "", False),
    "hardened-lap-head": ("head_lap", "", False),
    "hardened-procrustes-head": ("head_procrustes", "", False),
    "paper-lap": ("embedding_lap", "raw_", False),
}
METHODS = ("hardened-lap", "hardened-procrustes", "huref-ics")  # one family, as `fathom lineage compare` runs them


def judged(pair: dict) -> dict[str, tuple[float, int]]:
    """{mode: (what is judged, layers)}."""
    found = {}
    for mode, (record, prefix, plain) in MODES.items():
        if record not in pair:
            continue
        table = (np.array(pair[record][prefix + "q"]) + np.array(pair[record][prefix + "k"])) / 2
        rows, columns = range(len(table)), range(len(table))
        if table.shape[0] != table.shape[1]:
            rows, columns = linear_sum_assignment(-table)
        table = table[np.ix_(rows, columns)]
        near = [[m for m in (l - 1, l + 1) if 0 <= m < len(table)] for l in range(len(table))]
        layers = [
            table[l, l] if plain else exceeds(table[l, l], [x for m in near[l] for x in (table[l, m], table[m, l])])
            for l in range(len(table))
        ]
        found[mode] = (round(float(np.median(layers)), 5), len(layers))
    terms = np.array(pair["huref"])
    found["huref-ics"] = (round(float(np.median(terms if terms.ndim == 1 else terms.diagonal())), 5), 2)
    return found


def held_out(model: str) -> bool:
    return hashlib.sha256(model.encode()).digest()[0] % 3 == 0


def read(folders: list[Path]) -> list[dict]:
    pairs = []
    for folder in folders:
        groups = json.loads((folder / "models.json").read_text())["groups"]
        with gzip.open(folder / "pairs.json.gz", "rt") as file:
            raw = json.load(file)["pairs"]
        for pair in raw:
            sides = [groups[pair[side][0]] for side in "ab"]
            names = [f"{g['source'] or g['name']}/{pair[side][1]}" for g, side in zip(sides, "ab")]
            pairs.append({
                "kind": pair["kind"], "models": names, "held_out": [held_out(n) for n in names],
                "width": min(g["width"] for g in sides), "tied": all(g["tied"] for g in sides),
                "same_text": pair["parts"][0] == pair["parts"][1], "tokens": pair["tokens"],
                "shapes": "one" if sides[0]["name"] == sides[1]["name"] else "two", "judged": judged(pair),
            })  # fmt: skip
    return pairs


def without_common_model(pairs: list[dict]) -> list[dict]:
    degree: dict[str, int] = defaultdict(int)
    for pair in pairs:
        for name in pair["models"]:
            degree[name] += 1
    used: set[str] = set()
    chosen = []
    for pair in sorted(pairs, key=lambda p: (sum(degree[n] for n in p["models"]), p["models"])):
        if not used & set(pair["models"]) and len(set(pair["models"])) == 2:
            used |= set(pair["models"])
            chosen.append(pair)
    return chosen


def nulls(pairs: list[dict], source: str) -> dict:
    entries = []
    for mode in [*MODES, "huref-ics"]:
        for tied in (False, True):
            inside = [p for p in pairs if p["tied"] == tied and mode in p["judged"]]
            if not inside:
                continue
            apart = without_common_model(inside)
            by_width = {}
            for width in sorted({p["width"] for p in inside}):
                here = [p for p in inside if p["width"] == width]
                scores = sorted(p["judged"][mode][0] for p in apart if p["width"] == width)
                by_width[width] = {"models": len({n for p in here for n in p["models"]}), "pairs": len(here),
                                   "max": max(p["judged"][mode][0] for p in here), "scores": scores}  # fmt: skip
            entries.append({"mode": mode, "tied": tied, "by_width": by_width})
    return {"source": source, "nulls": entries}


def words(pair: dict) -> dict:
    """The verdict of every method and of all three, as `compare` reaches it, with the smallest corrected p."""
    found = {}
    for mode in METHODS:
        used = mode
        identity = pair["judged"].get("hardened-identity")
        if mode != "huref-ics" and identity and identity[0] > 0.15:  # what the probe of `awm` goes by
            used = "hardened-identity"
        score, layers = pair["judged"][used]
        found[mode] = verdict.judge(
            used, pair["width"], score, tied=pair["tied"], tokens=pair["tokens"] if mode != "huref-ics" else None,
            tries=1 if mode == "huref-ics" else 2, layers=None if mode == "huref-ics" else layers,
        )  # fmt: skip
    p = min(x for x in verdict.holm([v.p for v in found.values()], len(METHODS)) if x is not None)
    return {"all": verdict.combine(list(found.values())), "p": p} | {m: v.verdict for m, v in found.items()}


def counted(pairs: list[dict]) -> dict:
    total = {w: sum(p["words"]["all"] == w for p in pairs) for w in ("related", "inconclusive", "unrelated")}
    by_method = {m: sum(p["words"][m] == "related" for p in pairs) for m in METHODS}
    return {"pairs": len(pairs), "models": len({n for p in pairs for n in p["models"]}), **total,
            "p_below_0.001": sum(p["words"]["p"] < 1e-3 for p in pairs), "related_by_method": by_method}  # fmt: skip


def summary(pairs: list[dict]) -> dict:
    free = [p for p in pairs if p["kind"] == "independent"]
    parts = {"in the null": [p for p in free if not any(p["held_out"])],
             "one model held out": [p for p in free if sum(p["held_out"]) == 1],
             "both models held out": [p for p in free if all(p["held_out"])]}  # fmt: skip
    found: dict = {"false positives": {name: counted(some) for name, some in parts.items()}}
    fresh = [p for p in free if any(p["held_out"])]
    found["false positives, any model held out, by width and tying"] = {
        f"{width}, {'tied' if tied else 'untied'}": counted(some)
        for width in sorted({p["width"] for p in fresh})
        for tied in (False, True)
        if (some := [p for p in fresh if (p["width"], p["tied"]) == (width, tied)])
    }
    found["same text or other"] = {
        name: {mode: quantiles([p["judged"][mode][0] for p in some if p["tied"] == tied and mode in p["judged"]])
               for mode in [*MODES, "huref-ics"] if any(p["tied"] == tied and mode in p["judged"] for p in some)}
        for tied in (False, True)
        for name, some in ((f"same text, {'tied' if tied else 'untied'}", [p for p in free if p["same_text"]]),
                           (f"other text, {'tied' if tied else 'untied'}", [p for p in free if not p["same_text"]]))
    }  # fmt: skip
    kinds = sorted({p["kind"] for p in pairs} - {"independent"})
    found["other kinds"] = {
        f"{kind}, {'tied' if tied else 'untied'}": counted(some)
        | {mode: quantiles([p["judged"][mode][0] for p in some if mode in p["judged"]]) for mode in
           ("hardened-identity", *METHODS)}
        for kind in kinds
        for tied in (False, True)
        if (some := [p for p in pairs if p["kind"] == kind and p["tied"] == tied])
    }  # fmt: skip
    continued = [p for p in pairs if p["kind"] == "continued"]
    found["roc"] = {}
    for mode in [*MODES, "huref-ics"]:
        for tied in (False, True):
            for width in sorted({p["width"] for p in continued if p["tied"] == tied}):
                sides = [
                    np.array([p["judged"][mode][0] for p in some if p["tied"] == tied and p["width"] == width
                              and mode in p["judged"]])
                    for some in (continued, [p for p in free if any(p["held_out"])])
                ]  # fmt: skip
                if all(map(len, sides)):
                    curve = [[round(float(x), 4) for x in axis] for axis in roc(*sides)]
                    corners = sorted({(f, t) for f, t in zip(*curve)})
                    found["roc"][f"{mode}, {width}, {'tied' if tied else 'untied'}"] = detection(*sides) | {
                        "curve": corners if len(corners) <= 60 else corners[:: len(corners) // 60 + 1]
                    }
    return found


def quantiles(scores: list[float]) -> dict:
    at = np.quantile(scores, [0, 0.5, 0.95, 1]) if scores else [float("nan")] * 4
    return {"pairs": len(scores)} | {n: round(float(x), 4) for n, x in zip(("min", "median", "p95", "max"), at)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    pairs = read(args.runs)
    free = [p for p in pairs if p["kind"] == "independent"]
    models = {n for p in free for n in p["models"]}
    inside = [p for p in free if not any(p["held_out"])]
    shipped = nulls(inside, f"docs/results/lineage_null.json: {len(inside)} pairs of "
                    f"{len({n for p in inside for n in p['models']})} independently trained Llamas (two thirds of "
                    f"{len(models)}), widths 64 to 1024, 2 to 12 layers, four texts")  # fmt: skip
    out = Path(str(files("fathom.lineage"))) / "calibration.json"
    lines = [json.dumps(e, separators=(",", ":")) for e in shipped["nulls"]]
    out.write_text('{"source": ' + json.dumps(shipped["source"]) + ',\n"nulls": [\n' + ",\n".join(lines) + "\n]}\n")
    verdict.nulls.cache_clear()
    verdict.null_for.cache_clear()
    for pair in pairs:
        pair["words"] = words(pair)
    found = summary(pairs)
    results = Path(__file__).parents[2] / "docs" / "results"
    (results / "lineage_null.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "roc"}, indent=1))
    for name, entry in found["roc"].items():
        print(name, {k: v for k, v in entry.items() if k != "curve"})


if __name__ == "__main__":
    main()
