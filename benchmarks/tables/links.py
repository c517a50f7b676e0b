"""RASAT's schema linking: of the tables and columns that a right query names, how many does the question link?

    python recipes/make_text2sql.py text2sql DATA
    python benchmarks/tables/links.py DATA OUT.json

For Spider's dev set, the same questions in synonyms (Spider-Syn) and Spider-DK: the share of the right query's tables
and columns that some word of the question links to exactly, or at least partially, and the share of links that lead to
a name the query does not have. No model is asked: relations that are not there cannot help one. Intervals draw
questions; of dev and Syn the same ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from fathom.tables.linking import EXACT, NONE, link_columns, link_names
from fathom.tables.questions import Databases, read_gold
from fathom.tables.sql_match import ColumnUnit, Unreadable, parse
from fathom.tables.words import split

SETS, DRAWS = ("dev", "syn", "dk"), 2000


def named(query: Any, schema: Any) -> tuple[set[int], set[int]]:
    """Numbers of the tables and columns that a parsed query has."""
    tables, columns = set[int](), set[int]()
    lower = [name.lower() for name in schema.tables]

    def visit(value: Any) -> None:
        if isinstance(value, ColumnUnit) and value.column != "*":
            columns.add(schema.by_name[value.column[0]][value.column[1]])
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                visit(getattr(value, field.name))
        elif isinstance(value, tuple):
            for part in value:
                visit(part)

    visit(query)
    visit_tables = [query]
    while visit_tables:
        one = visit_tables.pop()
        tables |= {lower.index(name) for name in one.tables if isinstance(name, str)}
        visit_tables += [*one.nested, *(name for name in one.tables if not isinstance(name, str))]
    return tables, columns


def counts(question: Any, schema: Any) -> list[int] | None:
    """Counts of tables, then of columns: how many the query names, are linked exactly, and at all; then how many links
    of all lead to a name that it does not have. None for a query that cannot be read."""
    try:
        tables, columns = named(parse(question.query, schema), schema)
    except Unreadable:
        return None
    words, found = split(question.turns[-1]), []
    for wanted, links in (
        (tables, link_names(words, schema.table_words)), (columns, link_columns(words, schema, None)),
    ):  # fmt: skip
        best = links.max(0) if len(words) else np.zeros(links.shape[1])
        linked = {int(n) for n in np.flatnonzero(best > NONE)}
        exact = sum(best[n] == EXACT for n in wanted)
        found += [len(wanted), int(exact), len(wanted & linked), len(linked), len(linked - wanted)]
    return found


def shares(rows: np.ndarray) -> dict[str, float]:
    total = rows.sum(0)
    return {
        f"{kind} {name}": total[first + part] / total[first + of]
        for kind, first in (("tables", 0), ("columns", 5))
        for name, part, of in (("exact", 1, 0), ("linked", 2, 0), ("links elsewhere", 4, 3))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"sets": {}}
    rows: dict[str, list[list[int] | None]] = {}
    with Databases(None, args.data / "tables.json") as databases:
        for name in SETS:
            asked = read_gold(args.data / f"{name}.jsonl")
            rows[name] = [counts(question, databases.schema(question.database)) for question in asked]
            kept = np.array([row for row in rows[name] if row])
            draw = np.random.default_rng(0)
            drawn = [shares(kept[draw.integers(len(kept), size=len(kept))]) for _ in range(DRAWS)]
            found["sets"][name] = {"questions": len(kept), "unread": len(asked) - len(kept)} | {
                key: [round(float(v), 4) for v in (value, *np.percentile([d[key] for d in drawn], [2.5, 97.5]))]
                for key, value in shares(kept).items()
            }
            print(name, found["sets"][name], flush=True)
    both = [pair for pair in zip(rows["syn"], rows["dev"], strict=True) if pair[0] and pair[1]]
    syn, dev = (np.array(side) for side in zip(*both, strict=True))
    draw, gaps = np.random.default_rng(0), []
    for _ in range(DRAWS):
        chosen = draw.integers(len(syn), size=len(syn))
        ours, theirs = shares(syn[chosen]), shares(dev[chosen])
        gaps.append({key: ours[key] - theirs[key] for key in ours})
    ours, theirs = shares(syn), shares(dev)
    found["syn over dev"] = {
        key: [
            round(float(v), 4) for v in (ours[key] - theirs[key], *np.percentile([g[key] for g in gaps], [2.5, 97.5]))
        ]
        for key in ours
    }
    print("syn over dev", found["syn over dev"])
    args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
