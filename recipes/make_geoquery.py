"""GeoQuery's question split as rows of the task text_to_sql, for recipes/geoquery_gpu.yaml.

    python recipes/make_geoquery.py geography.json.xz geography.sqlite runs/geoquery

Reads the `geography.json` of text2sql-data (plain or .xz) and its database. Table aliases become t1, t2, … in the order
of their first use, commas in FROM become JOIN and <> becomes !=, which PICARD's grammar asks for. A
training question that names a place is there --copies times more, with other names of the same column of the database.
Test questions stay as they are.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import shutil
import sqlite3
from pathlib import Path

# variable → where its names stand
COLUMNS = {
    "state_name": "state.state_name", "city_name": "city.city_name", "river_name": "river.river_name",
    "capital": "state.capital", "mountain_name": "mountain.mountain_name",
}  # fmt: skip


def query(sql: str) -> str:
    """With aliases t1, t2, … and the spaces of Spider's queries."""
    aliases = {}
    for alias in re.findall(r"\b\w+alias\d+\b", sql):
        aliases.setdefault(alias, f"t{len(aliases) + 1}")
    sql = re.sub(r"\b\w+alias\d+\b", lambda found: aliases[found.group()], sql)
    sql = re.sub(r" , (\w+ AS t\d+)(?=[ ,)])", r" JOIN \1", sql).replace("<>", "!=")
    sql = re.sub(r"\( ", "(", re.sub(r" \)", ")", sql.strip().rstrip(";").strip()))
    return re.sub(r"\b(COUNT|MAX|MIN|SUM|AVG) \(", r"\1(", sql)


def filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("database", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", type=int, default=7)
    args = parser.parse_args()
    raw = args.questions.read_bytes()
    entries = json.loads(lzma.decompress(raw) if args.questions.suffix == ".xz" else raw)
    (args.folder / "databases").mkdir(parents=True, exist_ok=True)
    shutil.copy(args.database, args.folder / "databases" / "geography.sqlite")
    connection = sqlite3.connect(args.database)
    names = {
        kind: sorted({row[0] for row in connection.execute(f"SELECT {place} FROM {place.split('.')[0]}") if row[0]})
        for kind, place in COLUMNS.items()
    }  # fmt: skip
    draw = random.Random(0)
    rows: dict[str, list[dict]] = {"train": [], "dev": [], "test": []}
    for entry in entries:
        for sentence in entry["sentences"]:
            given = sentence["variables"]
            choices = [given]
            kinds = {name: name.rstrip("0123456789") for name in given}
            if sentence["question-split"] == "train" and given and set(kinds.values()) <= set(names):
                choices += [
                    {name: draw.choice(names[kind]) for name, kind in kinds.items()} for _ in range(args.copies)
                ]
            for values in choices:
                rows[sentence["question-split"]].append(
                    {"db_id": "geography", "question": filled(sentence["text"], values),
                     "query": query(filled(entry["sql"][0], values))}
                )  # fmt: skip
    for part in ("train", "test"):
        kept = (
            [json.loads(text) for text in dict.fromkeys(json.dumps(row) for row in rows[part])]
            if part == "train"
            else rows[part]
        )
        (args.folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        print(f"{args.folder / part}.jsonl: {len(kept)} questions")


if __name__ == "__main__":
    main()
