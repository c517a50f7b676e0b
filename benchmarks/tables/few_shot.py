"""Descriptions from few pairs: does each part of AKG and PromptMize pay? Every contestant from the same base and pairs.

    python benchmarks/tables/few_shot.py BASE DATA OUT [--sizes 50,100,200,500] [--seeds 0,1,2]
    python benchmarks/tables/description_scores.py DATA/held-out.jsonl OUT results.json

BASE is a stock T5, BART or Llama with its tokenizer (or a checkpoint of the task seq2seq, encoder "full"). DATA has
train.jsonl (rows of table_to_text, of which a seed draws its few), held-out.jsonl (tables with all their references),
dev.jsonl, of whose rows every second one chooses the training step, and corpus.jsonl (sentences without tables, of the
other rows; those that are held-out references are left out). recipes/make_table_rows.py makes them.

Every contestant trains for the same steps at the same rate; the step is kept whose descriptions of 100 development
tables have the highest BLEU. Prototypes come in BM25's order; "prototypes_trained" sorts them by a selector. The
adapter is trained once for a seed, on the corpus's sentences that the few tables find, or the first hundred of them;
the planner once for a size and seed.
"corpus_host" is the adapter's control: the whole host learns for as many steps from the same sentences, and then from
the pairs. "nearest" trains nothing and says the first prototype. OUT gets one file a run, with its texts; a run that is
there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import lzma
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from fathom.models.seq2seq_bart import FathomBartForConditionalGeneration
from fathom.tables.text import AKG, P2G, PromptMize, TableGenerator, TablePlain, metrics
from fathom.tables.text.base import planner_for
from fathom.tables.text.generator import make_planner
from fathom.tables.text.linearize import references_of_row, table_of_row, words
from fathom.tables.text.plan import gold_plan
from fathom.tables.text.prototypes import Candidates, PrototypeSelector
from fathom.tables.text.stages import Stage
from fathom.tasks.table_to_text import Row

CONTESTANTS = {
    "plain": TablePlain(),
    "prototypes": P2G(),
    "prototypes_adapter": AKG(),
    "adapter": AKG(prototypes=0),
    "planner": PromptMize(adapter=False),
    "planner_adapter": PromptMize(),
    "oracle_plan": PromptMize(adapter=False, planner="oracle"),
    "corpus_host": TablePlain(),
    "prototypes_trained": P2G(),
    "prefix_tuning": PromptMize(adapter=False, planner="free_prefix", trains="prefix"),
    "nearest": P2G(prototypes=1),
}
CHECKS, SELECTION = 3, 100  # how often a run is looked at, and on how many development tables
KNOWLEDGE_TABLES = 100


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """What a JSONL file says line by line; it may be packed as .xz."""
    packed = path if path.suffix == ".xz" else path.with_name(path.name + ".xz")
    with lzma.open(packed, "rt", encoding="utf-8") if packed.is_file() else path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def rows_of(path: Path) -> list[Row]:
    """The tables and descriptions of a JSONL file."""
    found = list(lines_of(path))
    return [
        Row(table_of_row(row, f"{path} {i}"), references_of_row(row, f"{path} {i}"), row.get("page", ""))
        for i, row in enumerate(found)
    ]


def stock(base: str, work: Path) -> str:
    """The base as a stock checkpoint."""
    if AutoConfig.from_pretrained(base).model_type != "fathom_bart":
        return base
    FathomBartForConditionalGeneration.from_pretrained(base).save_stock_pretrained(work)
    AutoTokenizer.from_pretrained(base).save_pretrained(work)
    return str(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="50,100,200,500")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=240, help="of the generator")
    parser.add_argument("--knowledge-steps", type=int, default=480, help="of the adapter, or of the host in its place")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--test", type=int, default=630, help="held-out tables, from the first on")
    parser.add_argument("--batch", type=int, default=315, help="tables that are described at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--later", help="contestants of the sizes after the first; all of them without")
    parser.add_argument("--until", type=float, default=float("inf"), help="unix time; no run begins that would pass it")
    parser.add_argument("--expect", type=float, default=0.0, help="seconds of a run, before one was timed")
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    asked.out.mkdir(parents=True, exist_ok=True)
    base = stock(asked.base, asked.out / "stock_base")
    held_out, development = (rows_of(asked.data / f"{name}.jsonl") for name in ("held-out", "dev"))
    held_out, development = held_out[: asked.test], development[1::2]
    development = development[:: max(1, len(development) // SELECTION)][:SELECTION]
    barred = {tuple(words(text)) for row in held_out for text in row.references}
    corpus = (row["text"] for row in lines_of(asked.data / "corpus.jsonl"))
    candidates = Candidates([text for text in corpus if tuple(words(text)) not in barred])
    train_rows = rows_of(asked.data / "train.jsonl")
    longest = asked.expect
    for number, size in enumerate(map(int, asked.sizes.split(","))):
        names = asked.later if number and asked.later else asked.contestants
        for seed in map(int, asked.seeds.split(",")):
            order = torch.randperm(len(train_rows), generator=torch.Generator().manual_seed(seed))[:size].tolist()
            few = [(train_rows[i].slots, train_rows[i].references[0]) for i in order]
            shared = Shared(base, few, seed, asked, candidates, development)
            for name in names.split(","):
                path = asked.out / f"{size}-{name}-{seed}.json"
                if path.is_file():
                    continue
                start = time.time()
                if start + longest > asked.until:
                    print("no time for", path.stem, flush=True)
                    return
                found = shared.run(name, held_out)
                if found is None:
                    print("peft's prefix does not reach generate() with this transformers: left out", flush=True)
                    continue
                longest = max(longest, time.time() - start)
                found |= {"contestant": name, "size": size, "seed": seed, "seconds": round(time.time() - start, 1)}
                write(path, found | {"method": CONTESTANTS[name].to_dict()})
                print(path.stem, {k: v for k, v in found.items() if k not in ("texts", "plans")}, found["texts"][:2])


def write(path: Path, found: dict[str, Any]) -> None:
    """The file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    os.replace(part, path)


class Shared:
    """What contestants of one size and seed share: selector, planner and adapter, each trained when first needed."""

    adapters: dict[tuple[int, int], tuple[dict[str, torch.Tensor], list[float]]] = {}  # noqa: RUF012

    def __init__(
        self, base: str, few: list[Any], seed: int, asked: Any, candidates: Candidates, development: list[Row]
    ):
        self.base, self.few, self.asked, self.candidates, self.development = base, few, asked, candidates, development
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.stage = Stage(steps=asked.steps, batch_size=8, lr=asked.lr, warmup=asked.steps // 10, seed=seed)
        self.planner: Any = None
        self.plans: list[Any] = []  # of the development and the held-out tables

    def load(self, method: Any) -> TableGenerator:
        gc.collect()  # the model before
        torch.manual_seed(self.stage.seed)
        generator = TableGenerator.from_pretrained(self.base, method)
        generator.model.to(self.device, torch.float32)
        generator.candidates = self.candidates
        return generator

    def run(self, name: str, held_out: list[Row]) -> dict[str, Any] | None:
        method = CONTESTANTS[name]
        found: dict[str, Any] = {}
        if name == "nearest":
            return {"texts": [self.candidates.find(row.slots, 1)[0] for row in held_out]}
        causal = getattr(AutoConfig.from_pretrained(self.base), "is_encoder_decoder", False) is False
        if causal and method.prefixes:  # a decoder's prefix is peft's
            return self._peft_prefix(held_out)
        generator, stage = self.load(method), self.stage
        if method.prefixes:
            stage = dataclasses.replace(stage, lr=10 * stage.lr)
        developed, tables = ([row.slots for row in rows] for rows in (self.development, held_out))
        if name == "prototypes_trained":
            generator.selector = self._selector(generator)
        if method.plans and method.planner != "oracle":
            self.planner = self.planner or make_planner(
                planner_for(method.planner, len(self.few)), self.few, generator.tokenizer, None,
                Stage(steps=min(150, self.asked.steps), batch_size=8, lr=5e-4, warmup=20, seed=self.stage.seed),
            )  # fmt: skip
            generator.planner = self.planner
            self.plans = self.plans or [self.planner.predict(some) for some in (developed, tables)]
            found["plans"] = self.plans[1]
        if method.adapter:
            own = {name: p for name, p in generator.model.named_parameters() if "knowledge_adapter" in name}
            key = (min(len(self.few), KNOWLEDGE_TABLES), self.stage.seed)
            if key not in self.adapters:
                how = Stage(
                    self.asked.knowledge_steps, 8, 1e-3, schedule="constant", optimizer="adafactor", seed=stage.seed
                )
                losses = ends(self._knowledge(generator, how, "knowledge"))
                self.adapters[key] = ({name: p.detach().clone() for name, p in own.items()}, losses)
            weights, found["adapter_losses"] = self.adapters[key]
            for name, p in own.items():
                p.data.copy_(weights[name])
        if name == "corpus_host":
            how = dataclasses.replace(stage, steps=self.asked.knowledge_steps)
            found["corpus_losses"] = ends(self._knowledge(generator, how, "host"))
        return found | self._fit(generator, stage, method, held_out)

    def _knowledge(self, generator: TableGenerator, how: Stage, part: str) -> list[float]:
        few = self.few[:KNOWLEDGE_TABLES]
        return generator.fit_knowledge([table for table, _ in few], how, [text for _, text in self.few], part)

    def _fit(self, generator: TableGenerator, stage: Stage, method: Any, held_out: list[Row]) -> dict[str, Any]:
        """The descriptions of the best of the looked-at steps."""
        both = [self.development, held_out]
        plans: list[Any] = self.plans if method.plans else [None, None]
        if method.planner == "oracle":
            plans = [gold(rows) for rows in both]
        seen, best, kept = [], -1.0, {}
        every = max(1, stage.steps // CHECKS)
        trained = [(name, p) for name, p in generator.model.named_parameters() if p.requires_grad]

        def look(done: int) -> None:
            nonlocal best, kept
            if done % every == 0:
                said = self._describe(generator, self.development, plans[0])
                value = metrics.bleu(said, [row.references for row in self.development])
                seen.append([done, round(value, 3)])
                if value > best:
                    best, kept = value, {name: p.detach().clone() for name, p in trained}

        losses = generator.fit_generator(self.few, stage, watch=look)
        for name, p in trained:
            p.data.copy_(kept[name])
        texts = self._describe(generator, held_out, plans[1])
        return {"losses": ends(losses), "selection": seen, "lr": stage.lr, "texts": texts}

    def _describe(self, generator: TableGenerator, rows: list[Row], plans: Any) -> list[str]:
        generator.model.eval()
        return generator.describe(
            [row.slots for row in rows], plans, self.asked.beams, self.asked.new_tokens, self.asked.batch
        )

    def _peft_prefix(self, held_out: list[Row]) -> dict[str, Any] | None:
        """Prefix-tuning of a decoder: peft's, at the better of two rates, by the development tables' BLEU. None where
        generate() does not read the prefix: peft 0.21 gives it under a name that transformers 5.24 passes over."""
        from peft import PrefixTuningConfig, get_peft_model

        runs = []
        for lr in (3e-4, 3e-3):
            generator = self.load(TablePlain())
            width = generator.model.config.hidden_size
            how = PrefixTuningConfig(
                task_type="CAUSAL_LM", num_virtual_tokens=20, prefix_projection=True, encoder_hidden_size=width
            )
            generator.model = get_peft_model(generator.model, how).to(self.device).eval()
            if not reads_prefix(generator):
                return None
            stage = dataclasses.replace(self.stage, lr=lr)
            runs.append(self._fit(generator, stage, TablePlain(), held_out))
        return max(runs, key=lambda run: max(value for _, value in run["selection"]))

    def _selector(self, generator: TableGenerator) -> PrototypeSelector:
        selector = PrototypeSelector(None, generator.tokenizer, seed=self.stage.seed).to(self.device)
        examples = [(table, text, self.candidates.find(table, 100, [text])) for table, text in self.few]
        selector.fit(examples, Stage(max(1, self.asked.steps // 2), 4, 5e-4, warmup=20, seed=self.stage.seed))
        return selector


@torch.no_grad()
def reads_prefix(generator: TableGenerator) -> bool:
    """Whether generate() goes on as the forward does, with the prefix at hand that it has at the start, scaled up."""
    weights = [p for p in generator.model.parameters() if p.requires_grad]
    was = [p.clone() for p in weights]
    for p in weights:
        p.normal_()
    ids = torch.arange(5, 25, device=weights[0].device).view(4, 5)
    first = generator.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].argmax(-1)
    said = generator.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    for p, old in zip(weights, was, strict=True):
        p.copy_(old)
    return bool((said[:, -1] == first).all())


def gold(rows: list[Row]) -> list[list[str]]:
    return [gold_plan(row.slots, row.references[0]) for row in rows]


def ends(losses: list[float]) -> list[float]:
    """The means of the first and last ten losses."""
    return [round(sum(some) / len(some), 4) for some in (losses[:10], losses[-10:])]


if __name__ == "__main__":
    main()
