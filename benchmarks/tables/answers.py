"""What the models of a comparison answer, with and without PICARD, by kind of question.

    python benchmarks/tables/answers.py runs/tables_gpu runs/databases runs/databases/held-out.jsonl OUT.json

Reads every `model` folder that is somewhere in the folder. Greedy; each held-out row may say its `kind`. With --named
an answer begins with its database's name, as `fathom table ask` has it. Beside the
counts OUT has, for each model, a letter of every question: "e" for exact match alone, "x" for execution alone, "b" for
both.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import lzma
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fathom.tables.ask import options_of, source_of
from fathom.tables.picard import Picard
from fathom.tables.questions import Databases, Question, verdict
from fathom.tables.source import begun, query_of

BATCH = 128


def inputs(model: Any, tokenizer: Any, questions: list[Question], databases: Databases) -> dict[str, torch.Tensor]:
    """A batch, padded on the right; relations of a padding token are 0."""
    source, options = source_of(model.config), options_of(model.config)
    made = [
        source.encode(tokenizer, q.turns, databases.schema(q.database), databases.open(q.database), whole=False)
        for q in questions
    ]
    size = max(len(one.input_ids) for one in made)
    found = {"input_ids": torch.full((len(made), size), model.config.pad_token_id)}
    found["attention_mask"] = torch.zeros(len(made), size, dtype=torch.long)
    if options is not None:
        found["relation_ids"] = torch.zeros(len(made), size, size, dtype=torch.uint8)
    for row, one in enumerate(made):
        length = len(one.input_ids)
        found["input_ids"][row, :length] = torch.tensor(one.input_ids)
        found["attention_mask"][row, :length] = 1
        if options is not None:
            found["relation_ids"][row, :length, :length] = torch.from_numpy(one.relation_ids(options))
    return {name: value.to(model.device) for name, value in found.items()}


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, questions: list[Question], databases: Databases, picard: bool, tokens: int, named: bool
) -> tuple[list[str], dict[str, Any]]:
    """Queries that a model writes, and what PICARD did."""
    said = [""] * len(questions)
    first = [begun(tokenizer, databases.schema(q.database).name) if named else [] for q in questions]
    order = sorted(range(len(questions)), key=lambda number: len(first[number]))  # a batch begins with as many tokens
    batches = [
        ones[start : start + BATCH]
        for _, group in itertools.groupby(order, key=lambda number: len(first[number]))
        for ones in [list(group)]
        for start in range(0, len(ones), BATCH)
    ]
    counts: collections.Counter = collections.Counter()
    began = time.perf_counter()
    for chosen in batches:
        asked = [questions[number] for number in chosen]
        names = [databases.schema(q.database).name for q in asked]
        schemas = {name: databases.schema(q.database) for name, q in zip(names, asked, strict=True)}
        processors = [Picard().processor(tokenizer, schemas, names)] if picard else []
        out = model.generate(
            **inputs(model, tokenizer, asked, databases), max_new_tokens=tokens, num_beams=1, do_sample=False,
            logits_processor=processors,
            decoder_input_ids=torch.tensor(
                [[model.config.decoder_start_token_id, *first[number]] for number in chosen], device=model.device
            ),
        )  # fmt: skip
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        for number, text, name in zip(chosen, texts, names, strict=True):
            said[number] = query_of(text, name)
        for one in processors:
            counts.update({name: getattr(one, name) for name in ("checked", "rejected", "dead_ends", "cut_off")})
    return said, {**counts, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("databases", help='folder of SQLite files; "" for none')
    parser.add_argument("held_out", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--schemas", help="a file like Spider's tables.json")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument("--named", action="store_true", help="the database's name is given")
    args = parser.parse_args()
    raw = args.held_out.read_bytes()
    text = (lzma.decompress(raw) if args.held_out.suffix == ".xz" else raw).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    kinds = [row.get("kind", "all") for row in rows]
    questions = [Question((row["question"],), row["query"], row["db_id"], number) for number, row in enumerate(rows)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"questions": len(rows), "kinds": collections.Counter(kinds), "models": {}}
    with Databases(args.databases or None, args.schemas) as databases:
        for folder in sorted(path.parent for path in args.runs.rglob("model/config.json")):
            model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval().to(device)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            for picard in (False, True):
                said, counts = answers(model, tokenizer, questions, databases, picard, args.tokens, args.named)
                verdicts = [verdict(one, question, databases) for one, question in zip(said, questions, strict=True)]
                by_kind: dict[str, list[Any]] = collections.defaultdict(list)
                for kind, one in zip(kinds, verdicts, strict=True):
                    for part in {kind, "all"}:
                        by_kind[part].append(one)
                shares = {
                    kind: {name: sum(bool(getattr(v, name)) for v in ones) for name in ("exact", "execution", "runs")}
                    for kind, ones in by_kind.items()
                }
                letters = "".join("-exb"[bool(v.exact) + 2 * bool(v.execution)] for v in verdicts)
                name = "/".join(folder.relative_to(args.runs).parts[:-1]) + (" picard" if picard else "")
                found["models"][name] = {"right": shares, "answers": letters, "said": said[:8], **counts}
                print(
                    name,
                    {kind: (row["exact"], row["execution"], row["runs"]) for kind, row in shares.items()},
                    flush=True,
                )
                part = args.output.with_suffix(".part")
                part.write_text(json.dumps(found), encoding="utf-8")
                part.replace(args.output)


if __name__ == "__main__":
    main()
