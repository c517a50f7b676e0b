"""Do highlighted cells and retrieved background steer a description? The variants of CTRLSciTab from one base.

    python benchmarks/tables/control.py BASE numericnlg DATA OUT [--seeds 0,1,2]
    python benchmarks/tables/control.py BASE fetaqa DATA OUT [--question]
    python benchmarks/tables/description_scores.py OUT/held-out.jsonl OUT results.json

DATA has val.jsonl and test.jsonl of numericNLG, or all.jsonl of FeTaQA (recipes/make_table_rows.py makes them; both may
be packed as .xz). numericNLG trains on val's tables, without those of papers that test has, and is tested on test's.
FeTaQA's tables are split by page: a page's name says where it goes. It has no background, and its questions are left
out, as they say what the highlights say (--question keeps them).

    full | body | nohighlight | neither     highlights; highlights and rows; rows and background; rows alone
    -none | -tsdae | -tsdae_corpus | -tfidf | -random | -oracle     who chooses three sentences

"tsdae_corpus" has learned from the sentences of --corpus first. Every contestant trains for the same steps, and its
last weights are tested. OUT gets one file a run, with its texts, and the held-out rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from few_shot import ends, lines_of, rows_of, write

from fathom.tables.text import CTRLSciTab, Grid, TableGenerator
from fathom.tables.text.ctrlscitab import query
from fathom.tables.text.linearize import sentences, words
from fathom.tables.text.retrieval import TSDAE, Retriever, make_retriever, strings
from fathom.tables.text.stages import Stage
from fathom.tasks.table_to_text import Row

VARIANTS = {
    "full": {}, "body": {"include_body": True}, "nohighlight": {"highlights": False}, "neither": {"highlights": False},
}  # fmt: skip
ORDER = {
    "fetaqa": ["full-none", "neither", "body-none"],
    "numericnlg": [
        "full-tfidf", "full-none", "neither", "full-random", "full-tsdae", "full-oracle", "nohighlight-tfidf",
        "full-tsdae_corpus", "body-none", "body-tfidf",
    ],
}  # fmt: skip


def grid_of(row: Row) -> Grid:
    assert isinstance(row.table, Grid)
    return row.table


def split(name: str, data: Path, question: bool) -> tuple[list[Row], list[Row]]:
    """Rows to train on and held-out rows."""
    if name == "numericnlg":
        train, held_out = rows_of(data / "val.jsonl"), rows_of(data / "test.jsonl")
        papers = {row.where for row in held_out}
        return [row for row in train if row.where not in papers], held_out
    rows = rows_of(data / "all.jsonl")
    if not question:
        asked = questions(data / "all.jsonl")
        rows = [
            dataclasses.replace(row, table=dataclasses.replace(grid_of(row), caption=said))
            for row, said in zip(rows, asked, strict=True)
        ]
    held = [zlib.crc32(row.where.encode()) % 6 == 0 for row in rows]
    return [row for row, out in zip(rows, held, strict=True) if not out], [
        row for row, out in zip(rows, held, strict=True) if out
    ]


def questions(path: Path) -> list[str]:
    """The captions of FeTaQA's rows without their questions."""
    return [row["caption"].removesuffix(row["question"]).strip() for row in lines_of(path)]


class Chosen:
    """The background of every row by a retriever, chosen once for a seed."""

    def __init__(self, train: list[Row], held_out: list[Row], tokenizer: Any, asked: Any, seed: int, device: str):
        self.rows, self.held_out, self.tokenizer = (train, held_out), held_out, tokenizer
        self.asked, self.seed, self.device = asked, seed, device
        self.known: dict[str, list[list[list[str]]]] = {}

    def of(self, kind: str) -> list[list[list[str]]]:
        """The sources of the training and of the held-out rows."""
        if kind not in self.known:
            found = self.retriever(kind)
            if isinstance(found, torch.nn.Module):
                found.to(self.device)
            self.known[kind] = [[self.top(kind, found, row) for row in rows] for rows in self.rows]
        return self.known[kind]

    def top(self, kind: str, found: Retriever, row: Row) -> list[str]:
        grid = grid_of(row)
        return found.top(query(grid, row.references[0] if kind == "oracle" else None), grid.background, 3)

    def retriever(self, kind: str) -> Retriever:
        grids, references = [grid_of(row) for row in self.rows[0]], [row.references[0] for row in self.rows[0]]
        barred = [text for row in self.held_out for text in (*row.references, *grid_of(row).background)]
        steps = self.asked.retriever_steps
        if not kind.startswith("tsdae"):
            return make_retriever(kind, grids, references, self.tokenizer, None, steps, "plain", barred, self.seed)
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        tsdae = TSDAE(None, self.tokenizer, seed=self.seed, **sizes).to(self.device)
        if kind == "tsdae_corpus":
            how = Stage(3 * steps, 32, 5e-4, warmup=steps // 10, seed=self.seed)
            tsdae.fit(corpus_sentences(self.asked.corpus, 32 * how.steps), how)
        texts, _ = strings(grids, references, barred)
        tsdae.fit(texts, Stage(steps, 8, 3e-4, warmup=steps // 10, seed=self.seed))
        return tsdae

    def agreement(self, kind: str) -> dict[str, float]:
        """The share of the oracle's three sentences that a retriever has, over held-out rows with more than three, and
        the share of the reference's words that its sentences have."""
        rows = [i for i, row in enumerate(self.held_out) if len(set(grid_of(row).background)) > 3]
        mine, right = self.of(kind)[1], self.of("oracle")[1]
        both = [len(set(mine[i]) & set(right[i])) / 3 for i in rows]
        said = [{word for text in mine[i] for word in words(text)} for i in rows]
        wanted = [set(words(self.held_out[i].references[0])) for i in rows]
        recall = [len(a & b) / len(b) for a, b in zip(said, wanted, strict=True)]
        return {
            "rows": len(rows), "oracle_share": sum(both) / max(1, len(rows)),
            "reference_words": sum(recall) / max(1, len(rows)),
        }  # fmt: skip


def corpus_sentences(path: Path, count: int) -> list[str]:
    """Sentences of 5 to 60 words, from the first documents on."""
    found: list[str] = []
    for document in lines_of(path):
        found += [text for text in sentences(document["text"]) if 5 <= len(text.split()) <= 60]
        if len(found) >= count:
            break
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("name", choices=list(ORDER))
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--source-tokens", type=int, default=448)
    parser.add_argument("--target-tokens", type=int, default=200)
    parser.add_argument("--retriever-steps", type=int, default=1000)
    parser.add_argument("--corpus", type=Path, help="JSONL, packed as .xz: sentences for tsdae_corpus")
    parser.add_argument("--train", type=int, default=10_000, help="rows to train on, from the first on")
    parser.add_argument("--test", type=int, default=600, help="held-out rows, from the first on")
    parser.add_argument("--question", action="store_true", help="FeTaQA's captions keep their questions")
    parser.add_argument("--contestants")
    parser.add_argument("--until", type=float, default=float("inf"), help="unix time; no run begins that would pass it")
    parser.add_argument("--expect", type=float, default=0.0, help="seconds of a run, before one was timed")
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked.out.mkdir(parents=True, exist_ok=True)
    train, held_out = split(asked.name, asked.data, asked.question)
    train, held_out = train[: asked.train], held_out[: asked.test]
    text = "".join(json.dumps({**dataclasses.asdict(row.table), "text": row.references[0]}) + "\n" for row in held_out)
    (asked.out / "held-out.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(train)} rows to train on, {len(held_out)} held out", flush=True)
    longest = asked.expect
    for seed in map(int, asked.seeds.split(",")):
        chosen: Chosen | None = None
        for name in (asked.contestants or ",".join(ORDER[asked.name])).split(","):
            path = asked.out / f"{len(train)}-{name}-{seed}.json"
            start = time.time()
            if path.is_file():
                continue
            if start + longest > asked.until:
                print("no time for", path.stem, flush=True)
                return
            variant, _, kind = name.partition("-")
            background = kind not in ("", "none")
            method = CTRLSciTab(**VARIANTS[variant], background=background, source_tokens=asked.source_tokens)  # type: ignore[arg-type]
            gc.collect()  # the model before
            torch.manual_seed(seed)
            generator = TableGenerator.from_pretrained(asked.base, method)
            generator.model.to(device, torch.float32)
            chosen = chosen or Chosen(train, held_out, generator.tokenizer, asked, seed, device)
            texts = chosen.of(kind) if background else [[[]] * len(rows) for rows in (train, held_out)]
            stage = Stage(asked.steps, asked.batch, asked.lr, warmup=asked.steps // 10, seed=seed)
            pairs = [(row.table, row.references[0]) for row in train]
            losses = generator.fit_generator(pairs, stage, asked.target_tokens, backgrounds=texts[0])
            generator.model.eval()
            said = generator.describe(
                [row.table for row in held_out], beams=1, max_new_tokens=asked.target_tokens, batch_size=80,
                backgrounds=texts[1],
            )  # fmt: skip
            found = {"contestant": name, "size": len(train), "seed": seed, "losses": ends(losses), "texts": said}
            found |= {"lr": asked.lr, "steps": asked.steps, "method": method.to_dict()}
            found |= {"retrieved": chosen.agreement(kind)} if background else {}
            longest = max(longest, time.time() - start)
            write(path, found | {"seconds": round(time.time() - start, 1)})
            print(path.stem, {k: v for k, v in found.items() if k != "texts"}, said[:1], flush=True)


if __name__ == "__main__":
    main()
