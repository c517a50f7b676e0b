"""Does a trained selector find better prototypes than BM25? AKG's first stage by itself, on a CPU.

    python benchmarks/tables/selector.py TOKENIZER DATA OUT.json [--sizes 50,200,500] [--seeds 0,1,2] [--model FOLDER]

TOKENIZER is a folder that has one. DATA has what few_shot.py reads. For each held-out table the twenty nearest
sentences of the corpus by BM25 are at hand; judged is the one that comes first, by its sentence BLEU with the
references, AKG's own measure, and by the share of the table's slots that it tells. The selector is a small BERT from
scratch, or --model, trained on few pairs as few_shot.py's "prototypes_trained". "chance" is the mean over the twenty,
and "oracle" the best of them by that BLEU. The bootstrap draws seeds and tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from few_shot import ends, lines_of, rows_of, write
from transformers import AutoTokenizer

from fathom.tables.text.linearize import END, SEPARATOR, with_markers, words
from fathom.tables.text.metrics import coverage
from fathom.tables.text.prototypes import RERANKED, Candidates, PrototypeSelector
from fathom.tables.text.stages import Stage
from fathom.tasks.table_to_text import Row


def judged(text: str, row: Row) -> tuple[float, float]:
    """Sentence BLEU with the references, and the share of the slots that it tells."""
    return sacrebleu.sentence_bleu(text, list(row.references)).score, coverage(text, row.slots.values) or 0.0


def interval(gaps: np.ndarray, draws: int = 2000) -> list[float]:
    """Mean and 95 % of a bootstrap over seeds and tables: gaps [seeds, tables]."""
    draw = np.random.default_rng(0)
    seeds, tables = gaps.shape
    means = [gaps[draw.integers(seeds, size=seeds)][:, draw.integers(tables, size=tables)].mean() for _ in range(draws)]
    return [round(float(value), 4) for value in (gaps.mean(), *np.percentile(means, [2.5, 97.5]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="50,200,500")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--test", type=int, default=200, help="held-out tables, from the first on")
    parser.add_argument("--model", help="folder of a BERT; a small one from scratch without")
    asked = parser.parse_args()
    tokenizer = with_markers(AutoTokenizer.from_pretrained(asked.tokenizer), (SEPARATOR, END))
    held_out, pairs = rows_of(asked.data / "held-out.jsonl"), rows_of(asked.data / "train.jsonl")
    barred = {tuple(words(text)) for row in held_out for text in row.references}
    corpus = (row["text"] for row in lines_of(asked.data / "corpus.jsonl"))
    candidates = Candidates([text for text in corpus if tuple(words(text)) not in barred])
    held_out = held_out[: asked.test]
    pools = [candidates.find(row.slots, RERANKED) for row in held_out]
    scores = np.array([[judged(text, row) for text in pool] for pool, row in zip(pools, held_out, strict=True)])
    table, first = np.arange(len(held_out)), scores[:, 0]
    best = scores[table, scores[:, :, 0].argmax(1)]
    about: dict[str, Any] = {"tables": len(held_out), "corpus": len(candidates.texts), "machine": platform.machine()}
    about |= {name: getattr(asked, name) for name in ("sizes", "seeds", "steps", "lr", "test")}
    found: dict[str, Any] = {"about": about, "rows": []}

    def keep(name: str, chosen: np.ndarray, **more: Any) -> None:
        """chosen [seeds, tables, (BLEU, slots)]"""
        row = {"chosen_by": name, "bleu": chosen[..., 0].mean(), "slots": chosen[..., 1].mean(), **more}
        for number, measure in enumerate(("bleu", "slots")):
            row[f"{measure}_over_bm25"] = interval(chosen[..., number] - first[:, number])
        found["rows"].append(row)
        write(asked.out, found)
        print(json.dumps(row), flush=True)

    keep("bm25", first[None])
    keep("chance", scores.mean(1)[None])
    keep("oracle", best[None])
    for size in map(int, asked.sizes.split(",")):
        took, losses, chosen = time.time(), [], []
        for seed in map(int, asked.seeds.split(",")):
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:size].tolist()
            few = [(pairs[i].slots, pairs[i].references[0]) for i in order]
            selector = PrototypeSelector(asked.model, tokenizer, seed=seed)
            examples = [(slots, text, candidates.find(slots, 100, [text])) for slots, text in few]
            losses.append(ends(selector.fit(examples, Stage(asked.steps, 4, asked.lr, warmup=20, seed=seed))))
            ranked = [selector.rank(row.slots, pool)[0] for row, pool in zip(held_out, pools, strict=True)]
            chosen.append(scores[table, [pool.index(text) for pool, text in zip(pools, ranked, strict=True)]])
        keep(f"selector, {size} pairs", np.array(chosen), losses=losses, seconds=round(time.time() - took, 1))


if __name__ == "__main__":
    main()
