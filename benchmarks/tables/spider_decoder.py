"""Spider by a pretrained decoder, with RASAT's relations in its prompt and without.

    python benchmarks/tables/spider_decoder.py SMOLLM2 text2sql OUT.json --relations rasat --seed 0

SMOLLM2: a folder of a causal model of transformers. text2sql: the folder that has spider/train_spider.jsonl.xz,
spider/dev.jsonl.xz and spider/tables.json.xz. The model learns `database | query` after the question and the schema,
then answers the dev set greedily, freely and under PICARD; scores are exact set match. Tables start from zero, so that
both models begin as the same one. OUT says of every question whether it was right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, get_cosine_schedule_with_warmup

from fathom.tables.other_hosts import relate
from fathom.tables.picard import Picard
from fathom.tables.questions import Databases, Question, verdict
from fathom.tables.source import Source, answer_text, query_of


class AfterPrompt(LogitsProcessor):
    """A processor that is to see what the model writes, and not what it was asked."""

    def __init__(self, processor: LogitsProcessor, prompt: int):
        self.processor, self.prompt = processor, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(input_ids[:, self.prompt - 1 :], scores)


def questions(path: Path) -> list[Question]:
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    return [Question((row["question"],), row["query"], row["db_id"], number) for number, row in enumerate(rows)]


def encoded(asked: list[Question], tokenizer: Any, databases: Databases, tokens: int) -> list[Any]:
    """Each question's prompt, what its relations are made of, and the answer's tokens."""
    source, found = Source(tokens, values=False, links=False), []
    for question in asked:
        schema = databases.schema(question.database)
        made = source.encode(tokenizer, question.turns, schema, None, whole=False)
        answer = tokenizer(answer_text(question.query, schema.name), add_special_tokens=False)["input_ids"]
        found.append((made, [*answer, tokenizer.eos_token_id]))
    return found


def batch(rows: list[Any], options: Any, pad: int, answers: bool, device: str) -> dict[str, torch.Tensor]:
    """Prompts, padded on the left, and their answers where they are learned, padded on the right."""
    prompts, said = max(len(made.input_ids) for made, _ in rows), max(len(answer) for _, answer in rows) * answers
    size = prompts + said
    ids, mask = torch.full((len(rows), size), pad), torch.zeros(len(rows), size, dtype=torch.long)
    labels, relations = torch.full((len(rows), size), -100), torch.zeros(len(rows), size, size, dtype=torch.uint8)
    for row, (made, answer) in enumerate(rows):
        first, stop = prompts - len(made.input_ids), prompts + len(answer) * answers
        ids[row, first:prompts], mask[row, first:stop] = torch.tensor(made.input_ids), 1
        if answers:
            ids[row, prompts:stop] = labels[row, prompts:stop] = torch.tensor(answer)
        if options is not None:
            relations[row, first:prompts, first:prompts] = torch.from_numpy(made.relation_ids(options))
    found = {"ids": ids, "mask": mask, "labels": labels, "relations": relations}
    return {name: value.to(device) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--relations", choices=("none", "rasat"), default="rasat")
    parser.add_argument("--edges", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300, help="of --batch questions; 1,300 are three epochs of 16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument(
        "--table-lr", type=float, default=1e-3, help="of the tables of relations, which start from zero"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a question and its schema at most")
    parser.add_argument("--test", type=int, default=1034, help="questions of the dev set")
    parser.add_argument("--until", type=float, help="unix time after which no further part begins")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    draw, began = random.Random(args.seed), time.time()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).train()
    related = None
    if args.relations == "rasat":
        related = relate(model, {"name": "rasat", "init": "zero", "edges": args.edges})
    options = related.options if related else None
    tables = [p for name, p in model.named_parameters() if name.startswith("relations.")]
    own = [p for name, p in model.named_parameters() if not name.startswith("relations.")]
    groups = [{"params": own, "lr": args.lr}, {"params": tables, "lr": args.table_lr}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], weight_decay=0.0, fused=device == "cuda"
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    found: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}, "losses": []}

    def reading(relations: torch.Tensor) -> Any:
        return related.reads(relations) if related else contextlib.nullcontext()

    def keep() -> None:
        found["seconds"] = round(time.time() - began, 1)
        part = args.output.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(args.output)

    with Databases(None, args.data / "spider" / "tables.json.xz") as databases:
        learned = questions(args.data / "spider" / "train_spider.jsonl.xz")
        asked = questions(args.data / "spider" / "dev.jsonl.xz")[: args.test]
        rows = encoded(learned, tokenizer, databases, args.tokens)
        order: list[int] = []
        for step in range(args.steps):
            if len(order) < args.batch:
                order = draw.sample(range(len(rows)), len(rows))
            given = batch([rows[order.pop()] for _ in range(args.batch)], options, pad, True, device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), reading(given["relations"]):
                hidden = model.model(input_ids=given["ids"], attention_mask=given["mask"]).last_hidden_state
                targets = given["labels"][:, 1:]
                loss = F.cross_entropy(model.lm_head(hidden[:, :-1][targets >= 0]).float(), targets[targets >= 0])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 50 == 0 or step == args.steps - 1:
                found["losses"].append([step, float(loss.detach()), round(time.time() - began, 1)])
                print(args.relations, args.seed, *found["losses"][-1], flush=True)
                keep()
        model.eval()
        rows = encoded(asked, tokenizer, databases, args.tokens)
        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number][0].input_ids))
        for picard in (False, True):
            if args.until and time.time() > args.until:
                break
            said, width = [""] * len(rows), 4 * args.batch
            for start in range(0, len(rows), width):
                chosen = by_length[start : start + width]
                given = batch([rows[number] for number in chosen], options, pad, False, device)
                names = [databases.schema(asked[number].database).name for number in chosen]
                prompt, processors = given["ids"].shape[1], []
                if picard:
                    schemas = {databases.schema(name).name: databases.schema(name) for name in names}
                    processors = [AfterPrompt(Picard().processor(tokenizer, schemas, names), prompt)]
                with (
                    torch.no_grad(),
                    torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
                    reading(given["relations"]),
                ):
                    out = model.generate(
                        given["ids"], attention_mask=given["mask"], max_new_tokens=128, do_sample=False,
                        logits_processor=processors, pad_token_id=pad,
                    )  # fmt: skip
                texts = tokenizer.batch_decode(out[:, prompt:], skip_special_tokens=True)
                for number, text, name in zip(chosen, texts, names, strict=True):
                    said[number] = query_of(text, name)
            right = [verdict(query, question, databases).exact for query, question in zip(said, asked, strict=True)]
            name = "picard" if picard else "free"
            found[name] = {
                "exact": sum(map(bool, right)) / len(right), "right": "".join("01"[bool(x)] for x in right),
                "said": said[:12],
            }  # fmt: skip
            print(args.relations, args.seed, name, found[name]["exact"], flush=True)
            keep()


if __name__ == "__main__":
    main()
