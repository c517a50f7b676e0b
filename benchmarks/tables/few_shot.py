"""Descriptions from few pairs: does each part of AKG and PromptMize pay? Every contestant from the same base and pairs.

    python benchmarks/tables/few_shot.py BASE DATA OUT.json [--sizes 50,100] [--seeds 3]

BASE is a stock T5 or BART with its tokenizer (or a checkpoint of the task seq2seq, encoder "full"). DATA has
train.jsonl (rows of table_to_text; the first pairs are the few), held-out.jsonl (tables with all their references) and
corpus.jsonl (sentences without tables; those that are held-out references are left out). The adapter is trained once
for a size and seed, on the corpus's sentences that the few tables find, and every contestant with an adapter starts
from it; so is the planner.
Scores are those of the task, and the bootstrap's interval of each contestant's PARENT-F against plain pairs tables and
seeds. OUT.json is rewritten after every run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from fathom.models.seq2seq_bart import FathomBartForConditionalGeneration
from fathom.tables.text import AKG, METHODS, P2G, PromptMize, TableGenerator, TablePlain, metrics
from fathom.tables.text.base import planner_for
from fathom.tables.text.generator import make_planner
from fathom.tables.text.linearize import references_of_row, table_of_row, words
from fathom.tables.text.plan import gold_plan
from fathom.tables.text.prototypes import Candidates, PrototypeSelector
from fathom.tables.text.stages import Stage
from fathom.tasks.table_to_text import Row, description_scores

CONTESTANTS = {
    "plain": TablePlain(),
    "prototypes": P2G(),
    "adapter": AKG(prototypes=0),
    "prototypes_adapter": AKG(),
    "planner": PromptMize(adapter=False),
    "planner_adapter": PromptMize(),
    "oracle_plan": PromptMize(adapter=False, planner="oracle"),
    "prefix_tuning": PromptMize(adapter=False, planner="free_prefix", trains="prefix"),
}


def rows_of(path: Path) -> list[Row]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Row(table_of_row(row, f"{path} {i}"), references_of_row(row, f"{path} {i}"), "") for i, row in enumerate(found)
    ]


def stock(base: str, work: Path) -> str:
    """The base as a stock checkpoint."""
    if AutoConfig.from_pretrained(base).model_type != "fathom_bart":
        return base
    FathomBartForConditionalGeneration.from_pretrained(base).save_stock_pretrained(work)
    AutoTokenizer.from_pretrained(base).save_pretrained(work)
    return str(work)


def interval(differences: np.ndarray, draws: int = 2000) -> list[float]:
    """95 % of the bootstrap's means, over seeds and tables [seeds, tables]."""
    random = np.random.default_rng(0)
    seeds, tables = differences.shape
    means = [
        differences[random.integers(seeds, size=seeds)][:, random.integers(tables, size=tables)].mean()
        for _ in range(draws)
    ]
    return [float(value) for value in np.percentile(means, [2.5, 97.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="50")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="of the adapter and of the generator")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--test", type=int, default=630, help="held-out tables, from the first on")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    base = stock(asked.base, asked.out.parent / "stock_base")
    train, held_out = rows_of(asked.data / "train.jsonl"), rows_of(asked.data / "held-out.jsonl")[: asked.test]
    barred = {tuple(words(text)) for row in held_out for text in row.references}
    corpus = [json.loads(line)["text"] for line in (asked.data / "corpus.jsonl").read_text("utf-8").splitlines()]
    kept = [text for text in corpus if tuple(words(text)) not in barred]
    results: dict[str, Any] = {
        "arguments": {**vars(asked), "data": str(asked.data), "out": str(asked.out)},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "corpus": {"sentences": len(kept), "left_out": len(corpus) - len(kept)},
        "methods": {name: CONTESTANTS[name].to_dict() for name in asked.contestants.split(",")},
        "runs": [],
        "against_plain": [],
    }
    assert all(method.name in METHODS for method in CONTESTANTS.values())
    tables = [row.slots for row in held_out]
    for size in map(int, asked.sizes.split(",")):
        texts: dict[str, list[list[str]]] = {}
        for seed in range(asked.seeds):
            few = [(row.slots, row.references[0]) for row in train[:size]]
            candidates, shared = Candidates(kept), Shared(base, few, seed, asked, device)
            for name in asked.contestants.split(","):
                start = time.perf_counter()
                said, loss = shared.run(CONTESTANTS[name], candidates, held_out)
                texts.setdefault(name, []).append(said)
                run = {"contestant": name, "size": size, "seed": seed, "seconds": round(time.perf_counter() - start, 1)}
                run |= {"last_loss": loss, "scores": description_scores(said, held_out), "samples": said[:5]}
                run["parent_f_own_lambda"] = metrics.parent(said, [r.references for r in held_out], tables, None).f1
                results["runs"].append(run)
                print(
                    name,
                    size,
                    seed,
                    {k: round(v, 4) for k, v in run["scores"].items()},
                    f"{run['seconds']} s",
                    flush=True,
                )
                asked.out.write_text(json.dumps(results, indent=1, ensure_ascii=False))
        f1 = {name: np.array([[one_f1(text, row) for text, row in zip(some, held_out, strict=True)] for some in every])
              for name, every in texts.items()}  # fmt: skip
        for name, values in f1.items():
            if "plain" in f1 and name != "plain":
                difference = values - f1["plain"]
                found = {"contestant": name, "size": size, "parent_f": float(difference.mean())}
                results["against_plain"].append({**found, "interval": interval(difference)})
                print(results["against_plain"][-1], flush=True)
        asked.out.write_text(json.dumps(results, indent=1, ensure_ascii=False))


def one_f1(text: str, row: Row) -> float:
    return metrics.parent([text], [row.references], [row.slots]).f1


class Shared:
    """What contestants of one size and seed share: selector, planner and adapter, each trained when first needed."""

    def __init__(self, base: str, few: list[Any], seed: int, asked: Any, device: str):
        self.base, self.few, self.asked, self.device = base, few, asked, device
        self.stage = Stage(steps=asked.steps, batch_size=8, lr=asked.lr, warmup=asked.steps // 10, seed=seed)
        self.adapter: dict[str, torch.Tensor] | None = None
        self.selector: PrototypeSelector | None = None
        self.planner: Any = None

    def run(self, method: Any, candidates: Candidates, held_out: list[Row]) -> tuple[list[str], float]:
        generator = TableGenerator.from_pretrained(self.base, method)
        generator.model.to(self.device)
        generator.candidates = candidates
        if method.prototypes:
            generator.selector = self.selector = self.selector or self._selector(generator, candidates)
        if method.plans and method.planner != "oracle":
            generator.planner = self.planner = self.planner or make_planner(
                planner_for(method.planner, len(self.few)), self.few, generator.tokenizer, None,
                Stage(steps=min(150, self.asked.steps), batch_size=8, lr=5e-4, warmup=20, seed=self.stage.seed),
            )  # fmt: skip
        if method.adapter:
            own = {name: p for name, p in generator.model.named_parameters() if "knowledge_adapter" in name}
            if self.adapter is None:
                how = Stage(self.asked.steps, 8, 1e-3, schedule="constant", optimizer="adafactor", seed=self.stage.seed)
                generator.fit_knowledge([table for table, _ in self.few], how, [text for _, text in self.few])
                self.adapter = {name: p.detach().clone() for name, p in own.items()}
            for name, p in own.items():
                p.data.copy_(self.adapter[name])
        torch.manual_seed(self.stage.seed)
        losses = generator.fit_generator(self.few, self.stage)
        tables = [row.slots for row in held_out]
        plans = None
        if method.planner == "oracle":
            plans = [gold_plan(row.slots, row.references[0]) for row in held_out]
        generator.model.eval()
        return generator.describe(tables, plans, beams=self.asked.beams, max_new_tokens=64, batch_size=64), losses[-1]

    def _selector(self, generator: TableGenerator, candidates: Candidates) -> PrototypeSelector:
        selector = PrototypeSelector(None, generator.tokenizer, seed=self.stage.seed).to(self.device)
        examples = [(table, text, candidates.find(table, 100, [text])) for table, text in self.few]
        selector.fit(examples, Stage(max(50, self.asked.steps // 4), 4, 5e-4, warmup=20, seed=self.stage.seed))
        return selector


if __name__ == "__main__":
    main()
