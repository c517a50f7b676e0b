"""Spider by a pretrained decoder, with RASAT's relations in its prompt and without.

    python benchmarks/tables/spider_decoder.py SMOLLM2 text2sql OUT.json [--seed 0] [--fit-until UNIX_TIME]
    python benchmarks/tables/spider_decoder.py SMOLLM2 text2sql OUT.json --score

For Spider-Syn and Spider-DK as well, both with --schemas DATA/tables.json --also DATA/syn.jsonl,DATA/dk.jsonl, after
python recipes/make_text2sql.py text2sql DATA.

SMOLLM2: a folder of a causal model of transformers. text2sql: the folder that has spider/train_spider.jsonl.xz,
spider/dev.jsonl.xz and spider/tables.json.xz. The model learns `database | query` after the question and the schema,
then answers the dev set greedily: freely, with the database's name given, and so under PICARD. Tables start from zero,
so that both models begin as one; they learn from the same batches in turn. Scores are exact set match, and execution:
the right query's rows on five databases filled with made-up rows, as the real ones are not at hand. --score puts them
into OUT, question by question, and beside them whether PICARD would have let the answer end. Answers to other sets are
named after their files: "rasat named syn".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from fathom.tables.acceptor import Acceptor
from fathom.tables.other_hosts import relate
from fathom.tables.picard import Picard
from fathom.tables.questions import Databases, Question, read_gold, verdict
from fathom.tables.source import Source, answer_text, begun, query_of
from fathom.tables.suites import FilledDatabase

FILLED = 5  # databases that a query must be right on
WARM, TIMED = 40, 30  # steps of warm-up, and after how many it is asked again how many more fit


def pieces(rows: list[Any], pairs: int) -> Iterator[list[Any]]:
    """A batch in parts of rows that have so many pairs of tokens, or one row.

    SmolLM2 keeps 1.6 KB of a pair (scores and weights of 30 layers of 9 heads) and 0.7 MB of a token: 40 GB of 32 rows
    of 681 tokens, and at most 9.5 GB of parts of 2²¹ pairs, 3.6 GB of 2¹⁹.
    """
    size = max(len(made.input_ids) for made, _ in rows) + max(len(answer) for _, answer in rows)
    many = max(1, pairs // size**2)
    yield from (rows[start : start + many] for start in range(0, len(rows), many))


class AfterPrompt(LogitsProcessor):
    """A processor that is to see what the model writes, and not what it was asked."""

    def __init__(self, processor: LogitsProcessor, prompt: int):
        self.processor, self.prompt = processor, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(input_ids[:, self.prompt - 1 :], scores)


def encoded(asked: list[Question], tokenizer: Any, databases: Databases, tokens: int) -> list[Any]:
    """Each question's prompt, what its relations are made of, and the answer's tokens."""
    source, found = Source(tokens, values=False, links=False), []
    for question in asked:
        schema = databases.schema(question.database)
        made = source.encode(tokenizer, question.turns, schema, None, whole=False)
        answer = tokenizer(answer_text(question.query, schema.name), add_special_tokens=False)["input_ids"]
        found.append((made, [*answer, tokenizer.eos_token_id]))
    return found


def batch(rows: list[Any], options: Any, pad: int, device: str) -> dict[str, torch.Tensor]:
    """Prompts, padded on the left, and what of their answers is there, padded on the right."""
    prompts, said = max(len(made.input_ids) for made, _ in rows), max(len(answer) for _, answer in rows)
    size = prompts + said
    ids, mask = torch.full((len(rows), size), pad), torch.zeros(len(rows), size, dtype=torch.long)
    labels, relations = torch.full((len(rows), size), -100), torch.zeros(len(rows), size, size, dtype=torch.uint8)
    for row, (made, answer) in enumerate(rows):
        first, stop = prompts - len(made.input_ids), prompts + len(answer)
        ids[row, first:prompts], mask[row, first:stop] = torch.tensor(made.input_ids), 1
        ids[row, prompts:stop] = labels[row, prompts:stop] = torch.tensor(answer, dtype=torch.long)
        if options is not None:
            relations[row, first:prompts, first:prompts] = torch.from_numpy(made.relation_ids(options))
    found = {"ids": ids, "mask": mask, "labels": labels, "relations": relations}
    return {name: value.to(device) for name, value in found.items()}


class Learner:
    """A model with its optimiser, and what it reads beside the tokens."""

    def __init__(self, name: str, args: argparse.Namespace, device: str):
        self.name, self.device, self.pairs = name, device, args.pairs
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.to(device).train()
        self.related = relate(self.model, {"name": name, "init": "zero"}) if name != "none" else None
        self.options = self.related.options if self.related else None
        tables = [p for name, p in self.model.named_parameters() if name.startswith("relations.")]
        own = [p for name, p in self.model.named_parameters() if not name.startswith("relations.")]
        groups = [{"params": own, "lr": args.lr}, {"params": tables, "lr": args.table_lr}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], weight_decay=0.0, fused=device == "cuda"
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def reading(self, given: dict[str, torch.Tensor]) -> Any:
        """Within it the model reads a batch in mixed precision, with its relations."""
        found = contextlib.ExitStack()
        found.enter_context(torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"))
        if self.related:
            found.enter_context(self.related.reads(given["relations"]))
        return found

    def step(self, rows: list[Any], pad: int, rate: float) -> torch.Tensor:
        """The loss a token of the answers, before the step."""
        targets, loss = sum(len(answer) for _, answer in rows), torch.zeros((), device=self.device)
        for some in pieces(rows, self.pairs):
            part = self.loss(some, pad) / targets
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group, most in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = most * rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def loss(self, rows: list[Any], pad: int) -> torch.Tensor:
        """The sum over the tokens of the answers."""
        given = batch(rows, self.options, pad, self.device)
        with self.reading(given):
            hidden = self.model.model(input_ids=given["ids"], attention_mask=given["mask"]).last_hidden_state
            targets = given["labels"][:, 1:]
            logits = self.model.lm_head(hidden[:, :-1][targets >= 0]).float()
            return F.cross_entropy(logits, targets[targets >= 0], reduction="sum")

    @torch.no_grad()
    def answers(
        self, rows: list[Any], asked: list[Question], databases: Databases, tokenizer: Any, pad: int, width: int,
        named: bool, picard: bool,
    ) -> tuple[list[str], dict[str, float]]:  # fmt: skip
        """Queries that the model writes, and what PICARD did. named: an answer begins with its database's name."""
        self.model.eval()
        said, counts, began = [""] * len(rows), collections.Counter(), time.time()
        names = [databases.schema(question.database).name for question in asked]
        first = [begun(tokenizer, name) if named else [] for name in names]
        order = sorted(range(len(rows)), key=lambda number: (len(first[number]), len(rows[number][0].input_ids)))
        for _, group in itertools.groupby(order, key=lambda number: len(first[number])):
            some = list(group)
            for chosen in (some[start : start + width] for start in range(0, len(some), width)):
                given = batch([(rows[n][0], first[n]) for n in chosen], self.options, pad, self.device)
                prompt, processors = given["ids"].shape[1] - len(first[chosen[0]]), []
                if picard:
                    schemas = {names[n]: databases.schema(asked[n].database) for n in chosen}
                    one = Picard().processor(tokenizer, schemas, [names[n] for n in chosen])
                    processors = [AfterPrompt(one, prompt)]
                with self.reading(given):
                    out = self.model.generate(
                        given["ids"], attention_mask=given["mask"], max_new_tokens=128, do_sample=False,
                        logits_processor=processors, pad_token_id=pad,
                    )  # fmt: skip
                texts = tokenizer.batch_decode(out[:, prompt:], skip_special_tokens=True)
                for number, text in zip(chosen, texts, strict=True):
                    said[number] = query_of(text, names[number])
                if picard:
                    counts.update({k: getattr(one, k) for k in ("checked", "rejected", "dead_ends", "cut_off")})
        return said, {**counts, "seconds": round(time.time() - began, 1)}


def batches(rows: list[Any], size: int, draw: random.Random) -> Iterator[list[Any]]:
    """Batches of rows of like length, in chance order, without end."""
    while True:
        order = draw.sample(range(len(rows)), len(rows))
        found = []
        for start in range(0, len(order), 16 * size):
            like = sorted(order[start : start + 16 * size], key=lambda number: len(rows[number][0].input_ids))
            found += [like[i : i + size] for i in range(0, len(like), size)]
        draw.shuffle(found)
        yield from ([rows[number] for number in chosen] for chosen in found)


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: up in a line, down along a cosine."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARM) / max(1, steps - WARM))))


def allows(acceptor: Acceptor, text: str) -> bool:
    """Whether PICARD lets an answer end as it does."""
    state = acceptor.advance(Acceptor.START, text)
    return state is not None and acceptor.complete(state)


def score(found: dict[str, Any], sets: dict[str, list[Question]], databases: Databases) -> None:
    """Verdicts of all answers of all models."""
    right: dict[str, list[str]] = collections.defaultdict(list)
    for question in itertools.chain(*sets.values()):
        right[question.database].append(question.query)
    filled = {
        name: [FilledDatabase(databases.schema(name), seed, queries) for seed in range(FILLED)]
        for name, queries in right.items()
    }
    acceptor = Acceptor({databases.schema(name).name: databases.schema(name) for name in right})
    for name, said in found["answers"].items():
        asked = sets[" ".join(name.split()[2:])]
        verdicts = [
            verdict(query, question, databases, filled) for query, question in zip(said["said"], asked, strict=True)
        ]
        levels = collections.Counter(str(v.hardness) for v in verdicts)
        said["questions"] = dict(levels)
        judged = {kind: [bool(getattr(v, kind)) for v in verdicts] for kind in ("exact", "execution", "runs")}
        texts = [answer_text(q, databases.schema(o.database).name) for q, o in zip(said["said"], asked, strict=True)]
        judged["allowed"] = [bool(query) and allows(acceptor, text) for query, text in zip(said["said"], texts)]
        for kind, ones in judged.items():
            said[kind] = sum(ones) / len(ones)
            said[f"{kind}_of"] = "".join("01"[one] for one in ones)
            said[f"{kind}_by_hardness"] = {
                level: sum(one for one, v in zip(ones, verdicts, strict=True) if str(v.hardness) == level) / count
                for level, count in levels.items()
            }


HOW = {"free": (False, False), "named": (True, False), "picard": (True, True)}  # name given, PICARD
PAIRS = (
    ("rasat free", "none free"), ("rasat named", "none named"), ("rasat picard", "none picard"),
    ("none picard", "none named"), ("rasat picard", "rasat named"),
)  # fmt: skip


def gaps(answers: dict[str, Any], draws: int = 2000) -> list[dict[str, Any]]:
    """Differences of the scores, with 95 % intervals of a bootstrap over the questions."""
    found = []
    sets = dict.fromkeys(" ".join(name.split()[2:]) for name in answers)
    pairs = [(f"{one} {name}".strip(), f"{other} {name}".strip()) for name in sets for one, other in PAIRS]
    for one, other in pairs:
        if one in answers and other in answers:
            row: dict[str, Any] = {"contestant": one, "against": other}
            for name in ("exact", "execution"):
                ours, theirs = (np.array([int(c) for c in answers[who][f"{name}_of"]]) for who in (one, other))
                gap, draw = ours - theirs, np.random.default_rng(0)
                means = [gap[draw.integers(len(gap), size=len(gap))].mean() for _ in range(draws)]
                row[name] = [round(float(v), 4) for v in (gap.mean(), *np.percentile(means, [2.5, 97.5]))]
                row[f"{name}_won_lost"] = [int((gap > 0).sum()), int((gap < 0).sum())]
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--relations", default="none,rasat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1100, help="of --batch questions; 1,100 are five epochs of 32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument(
        "--table-lr", type=float, default=1e-3, help="of the tables of relations, which start from zero"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a question and its schema at most")
    parser.add_argument("--test", type=int, default=1034, help="questions of the dev set")
    parser.add_argument("--fit-until", type=float, help="unix time: as many steps as end by then, if not all")
    parser.add_argument("--until", type=float, default=math.inf, help="unix time after which no further part begins")
    parser.add_argument("--pairs", type=int, default=2**21, help="pairs of tokens that are learned from at once")
    parser.add_argument("--width", type=int, default=64, help="questions that are answered at once")
    parser.add_argument("--ways", default="free,named,picard", help="how the dev set is answered, in this order")
    parser.add_argument("--memory", type=float, default=20, help="most GB of the GPU that it takes")
    parser.add_argument("--also", default="", help="further sets: JSONL files with question, query and db_id")
    parser.add_argument("--schemas", type=Path, help="of all sets; without it Spider's own")
    parser.add_argument("--score", action="store_true")
    args = parser.parse_args()
    sets = {"": read_gold(args.data / "spider" / "dev.jsonl.xz")[: args.test]}
    sets |= {Path(path).stem: read_gold(path)[: args.test] for path in args.also.split(",") if path}

    def keep() -> None:
        part = args.output.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(args.output)

    with Databases(None, args.schemas or args.data / "spider" / "tables.json.xz") as databases:
        if args.score:
            found = json.loads(args.output.read_text("utf-8"))
            score(found, sets, databases)
            found["differences"] = gaps(found["answers"])
            keep()
            for name, said in found["answers"].items():
                print(name, {k: round(said[k], 4) for k in ("exact", "execution", "runs")})
            print(*found["differences"], sep="\n")
            return
        device, began = "cuda" if torch.cuda.is_available() else "cpu", time.time()
        torch.manual_seed(args.seed)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(args.memory * 1e9 / torch.cuda.mem_get_info()[1])
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        learners = [Learner(name, args, device) for name in args.relations.split(",")]
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "losses": [], "answers": {}}
        learned = encoded(read_gold(args.data / "spider" / "train_spider.jsonl.xz"), tokenizer, databases, args.tokens)
        drawn, steps, step, timed = batches(learned, args.batch, random.Random(args.seed)), args.steps, 0, 0.0
        while step < steps:
            rows = next(drawn)
            losses = [float(learner.step(rows, pad, rate(step, steps))) for learner in learners]
            step += 1
            if not all(map(math.isfinite, losses)):
                raise FloatingPointError(f"step {step}: losses {losses} of {args.relations}")
            if step == TIMED // 2:
                timed = time.time()
            if step % TIMED == 0 and args.fit_until:
                each = (time.time() - timed) / (step - TIMED // 2)
                steps = min(args.steps, step + max(1, int((args.fit_until - time.time()) / each)))
            if step % 25 == 0 or step == steps:
                if device == "cuda":
                    torch.cuda.empty_cache()  # batches of many lengths leave pieces that fit none
                    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                found["losses"].append([step, *losses, round(time.time() - began, 1)])
                found["steps"] = step
                print(*found["losses"][-1], flush=True)
                keep()
        rows = {name: encoded(asked, tokenizer, databases, args.tokens) for name, asked in sets.items()}
        for how, (name, asked) in itertools.product(args.ways.split(","), sets.items()):
            named, picard = HOW[how]
            for learner in learners:
                if time.time() > args.until:
                    return
                said, counts = learner.answers(rows[name], asked, databases, tokenizer, pad, args.width, named, picard)
                found["answers"][f"{learner.name} {how} {name}".strip()] = {"said": said, **counts}
                exact = [verdict(query, one, databases).exact for query, one in zip(said, asked, strict=True)]
                print(learner.name, how, name, sum(map(bool, exact)) / len(exact), counts, said[:3], flush=True)
                keep()


if __name__ == "__main__":
    main()
