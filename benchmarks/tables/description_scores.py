"""Scores of the descriptions that few_shot.py and control.py wrote, and what each part changes, with intervals.

    python benchmarks/tables/description_scores.py HELD_OUT.jsonl OUT results.json [--all] [--until UNIX_TIME]

Differences are of the mean over seeds and tables; the bootstrap draws seeds and tables, the same ones for both
contestants, 2,000 times, and its interval has 95 %. BLEU is the corpus's, of the drawn tables. A table's score is over
all its references. `off_target` is the share of the mentioned cells that are not highlighted; of tables of slots, the
share of the mentioned names, foods and areas of all held-out tables that this table does not have. Scores of a run are
kept beside it, so that another call computes only what is new. --until waits for more runs until that time. --all adds
ROUGE-4 and METEOR, which take most of the time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from few_shot import rows_of, write

from fathom.tables.text import Grid, metrics
from fathom.tables.text.metrics.entailed import _one, tokens
from fathom.tables.text.plan import gold_plan
from fathom.tasks.table_to_text import Row

PAIRS = [  # (what it adds, contestant, compared with)
    ("prototypes", "prototypes", "plain"), ("adapter", "adapter", "plain"),
    ("adapter beside prototypes", "prototypes_adapter", "prototypes"), ("AKG", "prototypes_adapter", "plain"),
    ("planner", "planner", "plain"), ("adapter beside planner", "planner_adapter", "planner"),
    ("planner beside adapter", "planner_adapter", "adapter"), ("PromptMize", "planner_adapter", "plain"),
    ("the reference's plan", "oracle_plan", "plain"), ("corpus into the host", "corpus_host", "plain"),
    ("adapter, not host", "adapter", "corpus_host"), ("prefix-tuning", "prefix_tuning", "plain"),
    ("trained selector", "prototypes_trained", "prototypes"), ("training at all", "plain", "nearest"),
    ("highlights", "full-none", "neither"), ("highlights, with the body", "body-none", "neither"),
    ("the body", "body-none", "full-none"), ("highlights beside background", "full-tfidf", "nohighlight-tfidf"),
    *((f"background by {name}", f"full-{name}", "full-none")
      for name in ("tsdae", "tsdae_corpus", "tfidf", "random", "oracle")),
    ("TSDAE, not TF-IDF", "full-tsdae", "full-tfidf"), ("TSDAE, not random", "full-tsdae", "full-random"),
    ("TSDAE of a corpus, not TF-IDF", "full-tsdae_corpus", "full-tfidf"),
    ("TSDAE of a corpus, not random", "full-tsdae_corpus", "full-random"),
    ("TF-IDF, not random", "full-tfidf", "full-random"),
]  # fmt: skip
NAMED = ("name", "near", "food", "area")  # slots whose values are names


def each(said: list[str], rows: list[Row], plans: Any) -> dict[str, list[float]]:
    """Scores of every description by itself."""
    known = {value for row in rows if not isinstance(row.table, Grid) for key, value in row.slots.slots if key in NAMED}
    found: dict[str, list[float]] = {}
    for number, (text, row) in enumerate(zip(said, rows, strict=True)):
        grid = isinstance(row.table, Grid)
        cells = (row.table.highlights or row.table.cells) if grid else row.slots.values
        best = max((_one(text, reference, row.slots, 0.5) for reference in row.references), key=lambda one: one.f1)
        if grid:
            off = metrics.off_target(text, row.table)
        else:
            named = {value for value in known if metrics.mentioned(value, text)}
            off = len(named - set(row.slots.values)) / len(named) if named else None
        gold = [gold_plan(row.slots, reference) for reference in row.references] if not grid else []
        held = (*row.table.header, *row.table.cells) if isinstance(row.table, Grid) else row.slots.values
        one = {
            "parent_f": best.f1, "parent_precision": best.precision, "parent_recall": best.recall,
            "coverage": metrics.coverage(text, cells) or 0.0, "off_target": off or 0.0,
            "hallucination": metrics.hallucination(text, row.slots, [row.table.caption] if grid else ()) or 0.0,
            "number_precision": one_or(metrics.number_precision(text, held)),
            "words": len(tokens(text)),
        }  # fmt: skip
        if plans:
            one["plan_distance"] = min(metrics.plan_distance(plans[number], plan) for plan in gold)
            one["plan_kept"] = one_or(metrics.plan_adherence(text, row.slots, plans[number]))
        for name, value in one.items():
            found.setdefault(name, []).append(round(float(value), 5))
    return found


def one_or(value: float | None) -> float:
    return 1.0 if value is None else value


class Bleu:
    """Corpus BLEU of any draw of the texts, from each text's counts."""

    def __init__(self, references: list[tuple[str, ...]]):
        from sacrebleu.metrics import BLEU

        self.scorer: Any = BLEU(tokenize="13a", force=True)
        most = max(map(len, references))
        self.streams = [[some[i] if i < len(some) else None for some in references] for i in range(most)]

    def counts(self, said: list[str]) -> np.ndarray:
        return np.array(self.scorer._extract_corpus_statistics(said, self.streams))

    def of(self, counts: np.ndarray) -> float:
        return float(self.scorer._compute_score_from_stats(counts.sum(0).tolist()).score)


@functools.cache
def bleu_of(rows: tuple[Row, ...]) -> Bleu:
    return Bleu([row.references for row in rows])


def score(path: Path, rows: list[Row], everything: bool) -> dict[str, Any]:
    """The scores of one run, from the file beside it or computed."""
    run, kept = json.loads(path.read_text("utf-8")), path.parent / "scores" / path.name
    found: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    rows, said = rows[: len(run["texts"])], run["texts"]
    bleu = bleu_of(tuple(rows))
    if not found:
        found = {"each": each(said, rows, run.get("plans")), "counts": bleu.counts(said).tolist()}
        found["means"] = {name: math.fsum(some) / len(some) for name, some in found["each"].items()}
        found["means"] |= {"bleu": bleu.of(np.array(found["counts"])), "distinct_2": metrics.distinct(said, 2)}
    if everything and "meteor" not in found["means"]:
        references = [row.references for row in rows]
        found["means"] |= {"rouge4": metrics.rouge4(said, references), "meteor": metrics.meteor(said, references)}
    kept.parent.mkdir(exist_ok=True)
    write(kept, found)
    return run | found


def differences(runs: list[dict[str, Any]], rows: list[Row], draws: int) -> list[dict[str, Any]]:
    """What each part changes, at every size, over the seeds that both contestants have."""
    by = {(run["contestant"], run["size"], run["seed"]): run for run in runs}
    found = []
    for label, one, other in PAIRS:
        for size in sorted({run["size"] for run in runs}):
            seeds = sorted(seed for name, of, seed in by if name == one and of == size and (other, size, seed) in by)
            if not seeds:
                continue
            random = np.random.default_rng(0)
            ours, theirs = ([by[name, size, seed] for seed in seeds] for name in (one, other))
            tables = len(ours[0]["texts"])
            bleu = bleu_of(tuple(rows[:tables]))
            drawn = [(random.integers(len(seeds), size=len(seeds)), random.integers(tables, size=tables))
                     for _ in range(draws)]  # fmt: skip
            row: dict[str, Any] = {"adds": label, "contestant": one, "against": other, "size": size, "seeds": seeds}
            for name in ("parent_f", "coverage", "off_target", "hallucination"):
                gap = np.array([a["each"][name] for a in ours]) - np.array([b["each"][name] for b in theirs])
                means = [gap[some][:, where].mean() for some, where in drawn]
                row[name] = [round(float(v), 5) for v in (gap.mean(), *np.percentile(means, [2.5, 97.5]))]
            counts = [(np.array(a["counts"]), np.array(b["counts"])) for a, b in zip(ours, theirs, strict=True)]

            def gap_of(some: Any, where: Any, counts: Any = counts, bleu: Bleu = bleu) -> float:
                return float(np.mean([bleu.of(counts[i][0][where]) - bleu.of(counts[i][1][where]) for i in some]))

            whole = gap_of(range(len(seeds)), np.arange(tables))
            means = [gap_of(*pair) for pair in drawn[: max(1, draws // 4)]]
            row["bleu"] = [round(float(v), 3) for v in (whole, *np.percentile(means, [2.5, 97.5]))]
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--until", type=float, default=0.0)
    asked = parser.parse_args()
    rows = rows_of(asked.held_out)
    done: dict[str, dict[str, Any]] = {}
    while True:
        for path in sorted(asked.out.glob("[0-9]*-*.json"), key=lambda one: one.stat().st_mtime):
            if path.stem not in done:
                done[path.stem] = score(path, rows, asked.all)
                means = done[path.stem]["means"]
                print(path.stem, {name: round(value, 4) for name, value in means.items()}, flush=True)
        if time.time() >= asked.until:
            break
        time.sleep(2)
    runs = list(done.values())
    mean = [gold_scores(rows[: len(runs[0]["texts"])])] if runs else []
    long = ("texts", "plans", "each", "counts")
    shown = [{k: v for k, v in run.items() if k not in long} | {"samples": run["texts"][:3]} for run in runs]
    found = {"references": mean, "runs": shown, "differences": differences(runs, rows, asked.draws)}
    write(asked.results, found)
    for row in found["differences"]:
        print({k: v for k, v in row.items() if k not in ("contestant", "against")})


def gold_scores(rows: list[Row]) -> dict[str, float]:
    """What the first reference of every table has, as a description of it."""
    found = each([row.references[0] for row in rows], rows, None)
    return {name: math.fsum(some) / len(some) for name, some in found.items() if not name.startswith("parent")}


if __name__ == "__main__":
    main()
