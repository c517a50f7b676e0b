"""What text to SQL costs a CPU: token checks of PICARD, relations of Spider's dev set, executions on filled databases.

    python benchmarks/tables/on_a_cpu.py TOKENIZER text2sql OUT.json

TOKENIZER: a folder of transformers. text2sql: the folder that has spider/dev.jsonl.xz and spider/tables.json.xz. Times
are CPU seconds of one process, everything that is remembered between questions remembered from the first one on. The
databases are files filled with made-up rows that have the right queries' constants. The token that is checked beside
the right one is another that begins like it or a chance one, so that most of them are rejected.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fathom.tables.picard import Picard
from fathom.tables.questions import Databases, read_gold, verdict
from fathom.tables.rasat import Rasat
from fathom.tables.source import Source, answer_text
from fathom.tables.suites import write_filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--questions", type=int, default=1034)
    args = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    tables = args.data / "spider" / "tables.json.xz"
    asked = read_gold(args.data / "spider" / "dev.jsonl.xz")[: args.questions]
    found: dict[str, Any] = {"machine": platform.machine(), "questions": len(asked)}
    draw = random.Random(0)

    with Databases(None, tables) as databases:
        names = [databases.schema(q.database).name for q in asked]
        schemas = {name: databases.schema(q.database) for name, q in zip(names, asked, strict=True)}
        answers = [
            tokenizer(answer_text(q.query, name), add_special_tokens=False)["input_ids"]
            for q, name in zip(asked, names, strict=True)
        ]
        picard, lost = Picard().processor(tokenizer, schemas, None), 0
        began = time.process_time()
        for ids, name in zip(answers, names, strict=True):
            for i, token in enumerate(ids):
                lost += not picard._allows(tuple(ids[:i]), token, name)
                picard._allows(tuple(ids[:i]), draw.randrange(len(tokenizer)), name)
        seconds = time.process_time() - began
        found["picard"] = {
            "checks": picard.checked, "a_second": picard.checked / seconds, "rejected": picard.rejected,
            "rejected_of_right_queries": lost, "cut_off": picard.cut_off,
        }  # fmt: skip
        print(found["picard"], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        queries: dict[str, list[str]] = {}
        for q in asked:
            queries.setdefault(q.database, []).append(q.query)
        with Databases(None, tables) as databases:
            for name, some in queries.items():
                write_filled(Path(folder) / f"{name}.sqlite", databases.schema(name), 0, some)
        with Databases(folder, tables) as databases:
            for part, options in (("names", {"values": False, "links": False}), ("names and cells", {})):
                source, tokens = Source(512, **options), 0  # type: ignore[arg-type]
                began = time.process_time()
                for q in asked:
                    schema, file = databases.schema(q.database), databases.open(q.database)
                    made = source.encode(tokenizer, q.turns, schema, None if options else file, whole=False)
                    made.relation_ids(Rasat.Options())
                    tokens += len(made.input_ids)
                found[f"relations of {part}"] = {"seconds": time.process_time() - began, "tokens": tokens}
                print(part, found[f"relations of {part}"], flush=True)
            began = time.process_time()
            right = [verdict(q.query, q, databases) for q in asked]
            found["executions"] = {
                "seconds": time.process_time() - began, "right": sum(bool(v.execution) for v in right),
                "exact": sum(bool(v.exact) for v in right),
            }  # fmt: skip
            print(found["executions"])
    args.output.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
