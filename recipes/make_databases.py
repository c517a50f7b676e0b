"""The data of recipes/tables_demo.yaml: databases with made-up names and questions over them. Ours, Apache-2.0.

    python recipes/make_databases.py runs/databases     # writes train.jsonl, held-out.jsonl and databases/*.sqlite

Names are two syllables each, and no name of a held-out database is one of a training database: a right query needs the
schema, not memory. Some questions name a cell and not its column. Made from one seed.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from pathlib import Path

TRAIN, HELD_OUT, QUESTIONS = 240, 24, 16  # databases, and questions for each
STARTS = ("ba", "co", "di", "fu", "ga", "he", "jo", "ki", "lu", "mo", "ne", "po", "ra", "su", "ti", "vo", "wa", "ze")
ENDS = ("bel", "cot", "dam", "fin", "gor", "lan", "mer", "nus", "pik", "rod", "sel", "tan", "vik", "zon")


def database(draw: random.Random, names: list[str], path: Path) -> dict:
    """An SQLite file of two tables, each with two columns of text and one of numbers; returns what is in it."""
    order = draw.sample(names, len(names))
    tables, words, cells = {}, iter(order[:8]), itertools.cycle(order[8:])
    connection = sqlite3.connect(path)
    for _ in range(2):
        table, first, second, amount = (next(words) for _ in range(4))
        rows = [(next(cells), next(cells), draw.randrange(10, 99)) for _ in range(6)]
        connection.execute(f"CREATE TABLE {table} ({first} TEXT, {second} TEXT, {amount} INTEGER)")
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
        tables[table] = {"text": (first, second), "amount": amount, "rows": rows}
    connection.commit()
    connection.close()
    return tables


def question(draw: random.Random, tables: dict) -> tuple[str, str]:
    """A question and its query."""
    table, columns = draw.choice(list(tables.items()))
    place = draw.randrange(2)
    shown, other, amount = columns["text"][place], columns["text"][1 - place], columns["amount"]
    row = draw.choice(columns["rows"])
    cell, number = row[1 - place], row[2]
    return draw.choice(
        [
            (f"how many {table} are there ?", f"SELECT count(*) FROM {table}"),
            (f"what is the {shown} of every {table} ?", f"SELECT {shown} FROM {table}"),
            (f"what is the mean {amount} of all {table} ?", f"SELECT avg({amount}) FROM {table}"),
            (
                f"show the {shown} of the {table} with the highest {amount} .",
                f"SELECT {shown} FROM {table} ORDER BY {amount} DESC LIMIT 1",
            ),
            (
                f"show the {shown} of each {table} whose {amount} is above {number} .",
                f"SELECT {shown} FROM {table} WHERE {amount} > {number}",
            ),
            (
                f"show the {shown} of the {table} whose {other} is {cell} .",
                f"SELECT {shown} FROM {table} WHERE {other} = '{cell}'",
            ),
            (f"find the {shown} for {cell} .", f"SELECT {shown} FROM {table} WHERE {other} = '{cell}'"),
        ]
    )


def main(folder: Path) -> None:
    draw = random.Random(0)
    names = [start + end for start in STARTS for end in ENDS]
    draw.shuffle(names)
    parts = {"train": (TRAIN, names[60:]), "held-out": (HELD_OUT, names[:60])}
    (folder / "databases").mkdir(parents=True, exist_ok=True)
    for part, (count, own) in parts.items():
        rows = []
        for number in range(count):
            name = f"{'abcdefghij'[number % 10]}{number // 10}" if part == "train" else f"h{number}"
            path = folder / "databases" / f"{part}_{name}.sqlite"
            path.unlink(missing_ok=True)
            tables = database(draw, own, path)
            asked = dict(question(draw, tables) for _ in range(QUESTIONS))
            rows += [{"db_id": path.stem, "question": text, "query": query} for text, query in asked.items()]
        draw.shuffle(rows)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / part}.jsonl: {len(rows)} questions over {count} databases")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/databases"))
