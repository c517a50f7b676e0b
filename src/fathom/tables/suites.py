"""Databases filled with made-up rows, and test suites of them (after arXiv 2010.02840, with a generator of our own).

Rows have the kinds of their columns; primary keys are distinct and foreign keys refer to rows that exist; constants of
the queries, and values beside them, occur in the columns that they are compared with. A suite keeps few databases,
chosen so that a mutant of a query returns something else on at least one of them.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fathom.tables.database import ROWS, STEPS, Answer, QueryError, connect, guard, quoted, run
from fathom.tables.execution import runnable, same_rows
from fathom.tables.mutants import mutants
from fathom.tables.schema import Schema
from fathom.tables.sql_match import ColumnUnit, Query, Unreadable, parse

_STARTS, _ENDS = (
    ("ba", "co", "di", "fu", "ga", "he", "jo", "ki", "lu", "mo"),
    ("bel", "dam", "fin", "gor", "lan", "mer"),
)
_TYPES = {"number": "NUMERIC", "boolean": "NUMERIC"}
_LARGEST = 2.0**62  # of a whole number with neighbours that SQLite stores
MUTANTS = 20  # of each query, at most, that a suite is chosen by


class FilledDatabase:
    """A database in memory with made-up rows. `run` is that of `Database`.

    Args:
        seed: of the rows.
        queries: queries whose constants occur in the rows.
        rows: the most rows of a table.
    """

    def __init__(self, schema: Schema, seed: int, queries: Iterable[str] = (), rows: int = 24):
        self.schema = schema
        self.connection = connect("file::memory:")
        fill(self.connection, schema, seed, constants(queries, schema), rows)
        guard(self.connection)

    def run(self, sql: str) -> Answer:
        return run(self.connection, sql, STEPS, ROWS)


def write_filled(path: str | Path, schema: Schema, seed: int, queries: Iterable[str] = (), rows: int = 24) -> None:
    """A filled database as an SQLite file. Raises FileExistsError where there is one."""
    if Path(path).exists():
        raise FileExistsError(f"{path} is there already; remove it, or name another file")
    connection = sqlite3.connect(path)
    fill(connection, schema, seed, constants(queries, schema), rows)
    connection.commit()
    connection.close()


def fill(
    connection: sqlite3.Connection, schema: Schema, seed: int, wanted: Mapping[int, Sequence[Any]], rows: int
) -> None:
    """Tables of the schema with up to `rows` rows each; `wanted` are values that columns should have."""
    draw = random.Random(seed)
    target = dict(schema.foreign)
    sizes = [draw.randint(max(1, rows // 3), rows) for _ in schema.tables]
    filled: dict[int, list[Any]] = {}

    def column(number: int, open_: frozenset[int] = frozenset()) -> list[Any]:
        """The values of a column, those that it refers to first; a circle of references is cut where it closes."""
        if number not in filled:
            found = schema.columns[number]
            size, alone = sizes[found.table], _is_key(schema, number)
            to = target.get(number)
            if to is not None and to not in open_:
                pool = column(to, open_ | {number})
                filled[number] = draw.sample(pool, min(size, len(pool))) if alone else draw.choices(pool, k=size)
            elif alone:
                filled[number] = _distinct(draw, found.kind, size, wanted.get(number, ()))
            else:
                filled[number] = _values(draw, found.kind, size, wanted.get(number, ()))
        return filled[number]

    for table, name in enumerate(schema.tables):
        if name.lower().startswith("sqlite_"):  # SQLite's own, which some of Spider's schemas list
            continue
        numbers = schema.of_table(table)
        if not numbers:
            continue
        columns = [column(number) for number in numbers]
        titles = ", ".join(
            f"{quoted(schema.columns[n].name)} {_TYPES.get(schema.columns[n].kind, 'TEXT')}" for n in numbers
        )
        connection.execute(f"CREATE TABLE {quoted(name)} ({titles})")
        made = list(zip(*columns))  # a key that refers to a smaller table makes the table smaller
        connection.executemany(f"INSERT INTO {quoted(name)} VALUES ({', '.join('?' * len(numbers))})", made)


def _is_key(schema: Schema, number: int) -> bool:
    """Whether the column alone is its table's primary key."""
    table = schema.columns[number].table
    return number in schema.primary and sum(n in schema.primary for n in schema.of_table(table)) == 1


def _values(draw: random.Random, kind: str, size: int, wanted: Sequence[Any]) -> list[Any]:
    """Values of a kind, few enough that some occur twice, half of them of those wanted."""
    if kind == "number":
        pool: list[Any] = [draw.randint(0, 60) for _ in range(max(2, size // 2))]
    elif kind == "boolean":
        pool = [0, 1]
    elif kind == "time":
        pool = [f"{draw.randint(1990, 2024)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}" for _ in range(size)]
    else:
        pool = [_word(draw) for _ in range(max(2, size // 2))]
    return [draw.choice(wanted) if wanted and draw.random() < 0.5 else draw.choice(pool) for _ in range(size)]


def _distinct(draw: random.Random, kind: str, size: int, wanted: Sequence[Any]) -> list[Any]:
    """`size` distinct values."""
    found: dict[Any, None] = dict.fromkeys(
        _stored(value, kind) for value in draw.sample(list(wanted), min(len(wanted), size // 2))
    )
    number = 1
    while len(found) < size:
        found[number if kind in ("number", "boolean") else f"{_word(draw)}{number}"] = None
        number += 1
    return draw.sample(list(found), size)


def _stored(value: Any, kind: str) -> Any:
    """The value as a column of the kind has it: a text of digits is a number there."""
    if kind not in _TYPES or not isinstance(value, str) or not re.fullmatch(r"\s*[+-]?\d+(\.\d*)?\s*", value):
        return value
    return int(float(value)) if float(value).is_integer() else float(value)


def _word(draw: random.Random) -> str:
    return (draw.choice(_STARTS) + draw.choice(_ENDS)).capitalize()


def constants(queries: Iterable[str], schema: Schema) -> dict[int, list[Any]]:
    """For each column the values that queries compare it with, and values that tell < from ≤ and LIKE from =."""
    found: dict[int, dict[Any, None]] = {}

    def visit(query: Query) -> None:
        for condition in query.conditions:
            unit = condition.left.first
            if unit.aggregate or unit.column == "*" or condition.left.second is not None:
                continue
            table, name = unit.column
            for value in (condition.value, condition.second):
                if value is None or isinstance(value, Query | ColumnUnit):
                    continue
                place = found.setdefault(schema.by_name[table][name], {})
                place.update(dict.fromkeys(_near(value, condition.operator)))
        for inner in (*query.nested, *(t for t in query.tables if isinstance(t, Query))):
            visit(inner)

    for query in queries:
        try:
            visit(parse(query, schema))
        except Unreadable:
            continue
    return {column: list(values) for column, values in found.items()}


def _near(value: Any, operator: str) -> list[Any]:
    if isinstance(value, float):
        if abs(value) > _LARGEST:
            return [value]
        whole = int(value) if value == int(value) else value
        return [whole, whole - 1, whole + 1]
    if operator == "like":
        plain = value.strip("%").replace("%", " ").replace("_", "x")
        return [plain, f"{plain}s", f"A {plain}", f"A {plain} b"]
    return [value]


def suite(
    schema: Schema, queries: Sequence[str], most: int = 8, candidates: int = 24, seed: int = 0
) -> list[FilledDatabase]:
    """At most `most` databases, of `candidates`, on which the most mutants of the queries return something else."""
    draw = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    for query in dict.fromkeys(queries):
        others = mutants(query, schema)
        pairs += [(query, other) for other in draw.sample(others, min(MUTANTS, len(others)))]
    made = [FilledDatabase(schema, seed * 1000 + number, queries) for number in range(candidates)]
    kills = [killed(database, pairs) for database in made]
    kept: list[FilledDatabase] = []
    left = set().union(*kills) if kills else set()
    while left and len(kept) < most:
        best = max(range(len(made)), key=lambda number: len(kills[number] & left))
        kept.append(made[best])
        left -= kills[best]
    return kept or made[:1]


def killed(database: FilledDatabase, pairs: Sequence[tuple[str, str]]) -> set[int]:
    """Which pairs (query, mutant) return something else on a database; a mutant that fails does."""
    found, expected = set(), dict[str, Any]()
    for number, (query, other) in enumerate(pairs):
        if query not in expected:
            try:
                expected[query] = database.run(runnable(query)).rows
            except QueryError:
                expected[query] = None
        if expected[query] is None:
            continue
        ordered = "order by" in " ".join(query.lower().split())
        try:
            if not same_rows(expected[query], database.run(runnable(other)).rows, ordered):
                found.add(number)
        except QueryError:
            found.add(number)
    return found


def suites_of(questions: Sequence[Any], databases: Any, most: int) -> dict[str, list[FilledDatabase]]:
    """A suite for each database that the questions are over, chosen by all their right queries."""
    by_database: dict[str, list[str]] = {}
    for question in questions:
        by_database.setdefault(question.database, []).append(question.query)
    return {name: suite(databases.schema(name), queries, most) for name, queries in by_database.items()}
