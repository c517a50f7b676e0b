"""Evaluation sets of text to SQL as rows of the task text_to_sql and gold files of `fathom table score`.

    python recipes/make_text2sql.py TEXT2SQL runs/text2sql

TEXT2SQL has, plain or .xz, spider/{train_spider.jsonl, dev.jsonl, tables.json}, and what there is of
spider/train_others.jsonl, spider-variants/{spider_syn_dev.json, spider_dk.json, spider_dk_new_tables.json},
{sparc,cosql}/dev.jsonl and databases/NAME.sqlite. The folder gets

    tables.json                     the schemas of all sets
    train.jsonl, others.jsonl       Spider's training questions, and those of older sets
    dev.jsonl, syn.jsonl, dk.jsonl  Spider's dev set, the same questions in synonyms, and with domain knowledge
    sparc/fold-0 … 4, cosql/…       train.jsonl and held-out.jsonl: five folds by database, as SParC's and CoSQL's own
                                    training files are not at hand. Spider's training questions, whose databases are
                                    others, are in each train.jsonl, as in the papers. Not the official split.
    databases/                      the SQLite files that there are; other databases have no rows
"""

from __future__ import annotations

import argparse
import collections
import json
import lzma
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDS = 5


def rows_of(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a JSONL file or a JSON list, plain or .xz; None: there is no such file."""
    packed = path.with_name(path.name + ".xz")
    if packed.is_file():
        text = lzma.decompress(packed.read_bytes()).decode("utf-8")
    elif path.is_file():
        text = path.read_text("utf-8")
    else:
        return None
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} rows")


def question(row: dict[str, Any]) -> dict[str, Any]:
    asked = row.get("SpiderSynQuestion", row.get("question"))
    return {"db_id": row["db_id"], "question": asked, "query": row["query"]}


def folds(rows: list[dict[str, Any]], count: int = FOLDS) -> list[set[str]]:
    """The databases of each fold, which have about as many rows: the largest database first, into the least fold."""
    sizes = collections.Counter(row["db_id"] for row in rows)
    found: list[set[str]] = [set() for _ in range(count)]
    for name, _ in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        min(found, key=lambda fold: sum(sizes[n] for n in fold)).add(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    data, out = args.data, args.folder
    schemas = rows_of(data / "spider" / "tables.json")
    train = rows_of(data / "spider" / "train_spider.jsonl")
    if schemas is None or train is None:
        raise SystemExit(f"{data}: has no spider/tables.json or no spider/train_spider.jsonl, plain or .xz")
    schemas += rows_of(data / "spider-variants" / "spider_dk_new_tables.json") or []
    out.mkdir(parents=True, exist_ok=True)
    (out / "tables.json").write_text(json.dumps(schemas), encoding="utf-8")
    train = [question(row) for row in train]
    write(out / "train.jsonl", train)
    for name, path in (
        ("others", "spider/train_others.jsonl"), ("dev", "spider/dev.jsonl"),
        ("syn", "spider-variants/spider_syn_dev.json"), ("dk", "spider-variants/spider_dk.json"),
    ):  # fmt: skip
        rows = rows_of(data / path)
        if rows is not None:
            write(out / f"{name}.jsonl", map(question, rows))
    for name in ("sparc", "cosql"):
        rows = rows_of(data / name / "dev.jsonl")
        for number, held in enumerate(folds(rows) if rows is not None else []):
            place = out / name / f"fold-{number}"
            write(place / "train.jsonl", [*train, *(row for row in rows if row["db_id"] not in held)])
            write(place / "held-out.jsonl", [row for row in rows if row["db_id"] in held])
    (out / "databases").mkdir(exist_ok=True)
    for file in sorted((data / "databases").glob("*.sqlite")):
        shutil.copyfile(file, out / "databases" / file.name)


if __name__ == "__main__":
    main()
