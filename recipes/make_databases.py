"""The data of recipes/tables_demo.yaml: databases with made-up names and questions over them. Ours, Apache-2.0.

    python recipes/make_databases.py runs/databases     # writes train.jsonl, held-out.jsonl and databases/*.sqlite

A question names the first word of a column, "zedam" for the column zedam_code, and seldom its table: the rest of a
right query stands in the schema alone. No name of a held-out database is one of a training database. From one seed.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from pathlib import Path

TRAIN, HELD_OUT, QUESTIONS = 1500, 24, 12  # databases, and questions for each
STARTS = ("ba", "co", "di", "fu", "ga", "he", "jo", "ki", "lu", "mo", "ne", "po", "ra", "su", "ti", "vo", "wa", "ze")
ENDS = ("bel", "cot", "dam", "fin", "gor", "lan", "mer", "nus", "pik", "rod", "sel", "tan", "vik", "zon")
TEXTS, AMOUNTS = ("name", "code", "type"), ("count", "size", "rank")


def database(draw: random.Random, names: list[str], path: Path) -> dict:
    """An SQLite file of two tables, each with two columns of text and one of numbers; returns what is in it."""
    order = draw.sample(names, len(names))
    tables, words, cells = {}, iter(order[:8]), itertools.cycle(order[8:])
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    for _ in range(2):
        table, kinds = next(words), (*draw.sample(TEXTS, 2), draw.choice(AMOUNTS))
        columns = tuple(f"{next(words)}_{kind}" for kind in kinds)
        rows = [(next(cells), next(cells), draw.randrange(10, 99)) for _ in range(6)]
        connection.execute(f"CREATE TABLE {table} ({columns[0]} TEXT, {columns[1]} TEXT, {columns[2]} INTEGER)")
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
        tables[table] = (columns, rows)
    connection.commit()
    connection.close()
    return tables


def question(draw: random.Random, tables: dict) -> tuple[str, str]:
    """A question and its query."""
    table, (columns, rows) = draw.choice(list(tables.items()))
    place = draw.randrange(2)
    shown, other, amount = columns[place], columns[1 - place], columns[2]
    said, also, much = (column.split("_")[0] for column in (shown, other, amount))
    row = draw.choice(rows)
    cell, number = row[1 - place], row[2]
    return draw.choice(
        [
            (f"how many {table} are there ?", f"SELECT count(*) FROM {table}"),
            (f"list every {said} .", f"SELECT {shown} FROM {table}"),
            (f"what is the mean {much} ?", f"SELECT avg({amount}) FROM {table}"),
            (f"which {said} has the highest {much} ?", f"SELECT {shown} FROM {table} ORDER BY {amount} DESC LIMIT 1"),
            (f"list {said} with {much} above {number} .", f"SELECT {shown} FROM {table} WHERE {amount} > {number}"),
            (f"list {said} whose {also} is {cell} .", f"SELECT {shown} FROM {table} WHERE {other} = '{cell}'"),
            (f"find the {said} for {cell} .", f"SELECT {shown} FROM {table} WHERE {other} = '{cell}'"),
        ]
    )


def main(folder: Path) -> None:
    draw = random.Random(0)
    names = [start + end for start in STARTS for end in ENDS]
    draw.shuffle(names)
    (folder / "databases").mkdir(parents=True, exist_ok=True)
    for part, first, count, own in (("train", 0, TRAIN, names[60:]), ("held-out", TRAIN, HELD_OUT, names[:60])):
        rows = []
        for number in range(first, first + count):
            path = folder / "databases" / f"d{number}.sqlite"
            tables = database(draw, own, path)
            asked = dict(question(draw, tables) for _ in range(QUESTIONS))
            rows += [{"db_id": path.stem, "question": text, "query": query} for text, query in asked.items()]
        draw.shuffle(rows)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / part}.jsonl: {len(rows)} questions over {count} databases")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/databases"))
