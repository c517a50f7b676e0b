"""How much of a description do the background sentences hold that a retriever chooses? The retrievers of CTRLSciTab.

    python benchmarks/tables/retrieval.py DATA OUT.json [--model FOLDER] [--steps 200]

DATA has val.jsonl and test.jsonl of numericNLG (recipes/make_table_rows.py makes them, with papers' abstracts beside
the tables). Retrievers learn from val's tables, without those of papers that test has. Asked are test's tables with
more than three sentences; a retriever's score is the share of the words of the description, stop words left out, that
its three sentences have. Of --kinds `tsdae` is an encoder from scratch; with --model, a published BERT, `encoder` is it
as it is, and `tsdae_published` it after TSDAE. The paper's code encodes a sentence behind its query, and so do these;
`encoder_alone` encodes it by itself. The bootstrap draws tables and compares each retriever with TF-IDF and with
chance, which is the mean of twenty draws.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from control import grid_of, split
from few_shot import write
from transformers import AutoTokenizer

from fathom.tables.text.ctrlscitab import query
from fathom.tables.text.linearize import content_words
from fathom.tables.text.retrieval import TSDAE, Random, Retriever, TfIdf, strings
from fathom.tables.text.stages import Stage
from fathom.tasks.table_to_text import Row

KEPT, CHANCES = 3, 20
RATES = {"tsdae": 5e-4, "tsdae_published": 3e-5}  # of what learns


class Alone(TSDAE):
    """cos(enc(q), enc(s)): sentences without the query before them."""

    @torch.no_grad()
    def scores(self, asked: str, sentences: Sequence[str]) -> list[float]:
        self.eval()
        first, *rest = (self.encode([self.ids(text)]) for text in (asked, *sentences))
        return F.cosine_similarity(first, torch.cat(rest)).tolist()


def recall(found: Retriever, rows: list[Row], oracle: bool = False) -> np.ndarray:
    """The share of each description's words that three sentences have: one number a row."""
    shares = []
    for row in rows:
        grid, wanted = grid_of(row), set(content_words(row.references[0]))
        some = found.top(query(grid, row.references[0] if oracle else None), grid.background, KEPT)
        shares.append(len(wanted & {word for text in some for word in content_words(text)}) / max(1, len(wanted)))
    return np.array(shares)


def against(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """The mean difference, and 95 % of the bootstrap's."""
    random = np.random.default_rng(0)
    gap = ours - theirs
    means = [gap[random.integers(len(gap), size=len(gap))].mean() for _ in range(2000)]
    return [round(float(value), 4) for value in (gap.mean(), *np.percentile(means, [2.5, 97.5]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="folder of a published BERT, whose tokenizer all use")
    parser.add_argument("--kinds", default="encoder,encoder_alone,tsdae,tsdae_published")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    train, held_out = split("numericnlg", asked.data, False)
    rows = [row for row in held_out if len(set(grid_of(row).background)) > KEPT]
    found: dict[str, Any] = {"random": np.mean([recall(Random(seed), rows) for seed in range(CHANCES)], axis=0)}
    found |= {"tfidf": recall(TfIdf(), rows), "oracle": recall(TfIdf(), rows, oracle=True)}
    losses = {}
    if asked.model:
        barred = [text for row in held_out for text in (*row.references, *grid_of(row).background)]
        texts, _ = strings([grid_of(row) for row in train], [row.references[0] for row in train], barred)
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
        for name in asked.kinds.split(","):
            kind, rate = Alone if name == "encoder_alone" else TSDAE, RATES.get(name, 0.0)
            tsdae = kind(None if name == "tsdae" else asked.model, tokenizer, seed=asked.seed)
            if rate:
                how = Stage(asked.steps, 8, rate, schedule="constant", seed=asked.seed)
                some = tsdae.fit(texts, how)
                losses[name] = [round(float(np.mean(part)), 3) for part in (some[:10], some[-10:])]
            found[name] = recall(tsdae, rows)
            print(name, found[name].mean(), losses.get(name), flush=True)
    result = {
        "rows": len(rows), "sentences": float(np.mean([len(set(grid_of(row).background)) for row in rows])),
        "arguments": {"steps": asked.steps, "seed": asked.seed, "model": asked.model and Path(asked.model).name},
        "device": platform.processor() or platform.machine(), "losses": losses,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "reference_words": {name: round(float(some.mean()), 4) for name, some in found.items()},
        "against_tfidf": {name: against(some, found["tfidf"]) for name, some in found.items() if name != "tfidf"},
        "against_chance": {name: against(some, found["random"]) for name, some in found.items() if name != "random"},
    }  # fmt: skip
    write(asked.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
