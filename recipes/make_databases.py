"""The data of recipes/tables_demo.yaml: databases with made-up names and questions over them. Ours, Apache-2.0.

    python recipes/make_databases.py runs/databases     # train.jsonl, held-out.jsonl, databases/*.sqlite, tokenizer/

Every name is two syllables, "zedam", and a token each. No name of a held-out database is one of a training database,
while all syllables are in both: a model can learn to copy names that it never saw. From one seed.

A question says names, and a right query needs what the schema alone knows: the table of a column, the column of a cell,
the keys that join two tables. Foreign keys are not in the text that a model reads; RASAT has them as relations. Half of
the training databases have a single small table: from those a model learns to copy sooner.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

STARTS = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeio"]
ENDS = [first + middle + last for first in "bdgklmnprt" for middle, last in ("an", "el", "is", "or", "um")]
HELD_OUT_NAMES = 560  # of 2,800
# What stands between names, each a token.
PIECES = (
    "how many ", "list every ", "which ", " has the highest ", "list the ", " of ", " beside its ", " ?", " .",
    " | ", " : ", " , ", " [ ", " ; ", " ]", "select ", "select count(*)", "select t1.", ", t2.", " from ",
    " as t1 join ", " as t2 on t1.", " = t2.", " where ", " = '", "'", " order by ", " desc limit 1",
)  # fmt: skip


def database(draw: random.Random, names: list[str], tables: int, path: Path) -> list[dict]:
    """An SQLite file of `tables` tables; each has a key and two columns of text in any order, and all but the first a
    foreign key to the one before. A single table has no key and one column or two. Returns what is in it."""
    words = iter(draw.sample(names, 15 * tables))
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    found: list[dict] = []
    for number in range(tables):
        name, key, shown, other, link = (next(words) for _ in range(5))
        columns = {key: "INTEGER PRIMARY KEY", shown: "TEXT", other: "TEXT"}
        keys = draw.sample(range(100, 1000), 5)
        values = {key: keys, shown: [next(words) for _ in keys], other: [next(words) for _ in keys]}
        if number:
            before = found[-1]
            columns[link] = f"INTEGER REFERENCES {before['name']}({before['key']})"
            values[link] = draw.sample(before["values"][before["key"]], 5)
        if tables == 1:
            columns = {shown: "TEXT"} if draw.random() < 0.5 else {shown: "TEXT", other: "TEXT"}
        order = draw.sample(list(columns), len(columns))
        connection.execute(f"CREATE TABLE {name} ({', '.join(f'{column} {columns[column]}' for column in order)})")
        rows = list(zip(*(values[column] for column in order), strict=True))
        connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(order))})", rows)
        texts = [column for column in columns if columns[column] == "TEXT"]
        found.append({"name": name, "key": key, "texts": texts, "link": link, "values": values})
    connection.commit()
    connection.close()
    return found


def question(draw: random.Random, tables: list[dict], both_ways: bool) -> tuple[str, str, str]:
    """A question, its query, and what kind it is. A join begins at the foreign key, or at either end (`both_ways`)."""
    table = draw.choice(tables)
    name = table["name"]
    shown = draw.choice(table["texts"])
    kinds = [
        (f"how many {name} ?", f"select count(*) from {name}", "table"),
        (f"list every {shown} .", f"select {shown} from {name}", "column"),
    ]
    if len(table["texts"]) > 1:
        other = next(column for column in table["texts"] if column != shown)
        cell = draw.choice(table["values"][other])
        highest = f"select {shown} from {name} order by {other} desc limit 1"
        kinds.append((f"which {shown} has the highest {other} ?", highest, "two columns"))
        kinds.append((f"list the {shown} of {cell} .", f"select {shown} from {name} where {other} = '{cell}'", "cell"))
    if len(tables) > 1:
        number = draw.randrange(1, len(tables))
        left, right = tables[number], tables[number - 1]
        on = [left["link"], right["key"]]
        if both_ways and draw.random() < 0.5:
            left, right, on = right, left, on[::-1]
        first, second = draw.choice(left["texts"]), draw.choice(right["texts"])
        join = f"{left['name']} as t1 join {right['name']} as t2 on t1.{on[0]} = t2.{on[1]}"
        kinds.append(
            (f"list every {first} beside its {second} .", f"select t1.{first}, t2.{second} from {join}", "join")
        )
    return draw.choice(kinds)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that splits a text into the fewest pieces: syllables, what stands between names, bytes."""
    scores = [("<unk>", -20.0), ("</s>", 0.0), *((piece, -1.0) for piece in (*STARTS, *ENDS, *PIECES))]
    scores += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    model = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/databases"))
    parser.add_argument("--tables", type=int, default=2, help="of a database")
    parser.add_argument("--train", type=int, default=1500, help="training databases")
    parser.add_argument("--held-out", type=int, default=24, help="held-out databases")
    parser.add_argument("--both-ways", action="store_true", help="joins begin at either end of a foreign key")
    parser.add_argument("--questions", type=int, default=12, help="of a database at most")
    args = parser.parse_args()
    folder = args.folder
    draw = random.Random(0)
    names = [start + end for start in STARTS for end in ENDS]
    draw.shuffle(names)
    (folder / "databases").mkdir(parents=True, exist_ok=True)
    labels: set[str] = set()
    parts = [("train", args.train, names[HELD_OUT_NAMES:]), ("held-out", args.held_out, names[:HELD_OUT_NAMES])]
    for part, count, own in parts:
        rows = []
        for _ in range(count):
            label = "".join(draw.sample(own, 2))
            while label in labels:
                label = "".join(draw.sample(own, 2))
            labels.add(label)
            single = part == "train" and draw.random() < 0.5
            tables = database(draw, own, 1 if single else args.tables, folder / "databases" / f"{label}.sqlite")
            asked = {
                text: rest for text, *rest in (question(draw, tables, args.both_ways) for _ in range(args.questions))
            }
            rows += [
                {"db_id": label, "question": text, "query": query, "kind": kind}
                for text, (query, kind) in asked.items()
            ]
        draw.shuffle(rows)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / part}.jsonl: {len(rows)} questions over {count} databases")
    tokenizer().save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    main()
