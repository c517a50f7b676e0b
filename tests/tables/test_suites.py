"""Filled databases keep keys and constants; a suite of a few tells what a hundred random ones tell."""

from __future__ import annotations

import dataclasses
import random

import pytest
import small_databases

from fathom.tables.database import Database, QueryError
from fathom.tables.execution import execution_match
from fathom.tables.mutants import mutants
from fathom.tables.suites import FilledDatabase, constants, killed, suite, write_filled

QUERIES = [
    "SELECT name FROM town WHERE big = 1 AND town_id > 7",
    "SELECT T1.fullName FROM person AS T1 JOIN visit AS T2 ON T1.person_id = T2.person_id WHERE T2.day LIKE '2020%'",
    "SELECT count(*) FROM person WHERE age >= 30 AND fullName != 'Ada Pell'",
    "SELECT town_id, count(*) FROM person GROUP BY town_id ORDER BY count(*) DESC LIMIT 1",
    "SELECT name FROM town EXCEPT SELECT T2.name FROM visit AS T1 JOIN town AS T2 ON T1.town_id = T2.town_id",
]


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    with Database(small_databases.make(tmp_path_factory.mktemp("databases"))) as database:
        return database.schema


def test_keys_kinds_and_constants(schema):
    wanted = constants(QUERIES, schema)
    names = {schema.columns[number].name: values for number, values in wanted.items()}
    assert names["age"] == [30, 29, 31] and names["fullName"] == ["Ada Pell"] and "2020" in names["day"]
    seen = set()
    for seed in range(6):
        database = FilledDatabase(schema, seed, QUERIES)
        rows = {name: database.run(f"SELECT * FROM {name}").rows for name in schema.tables}
        for column in schema.primary:
            table, name = schema.tables[schema.columns[column].table], schema.columns[column].name
            values = [row[0] for row in database.run(f"SELECT {name} FROM {table}").rows]
            assert len(set(values)) == len(values) and None not in values
        for column, other in schema.foreign:
            here, there = schema.columns[column], schema.columns[other]
            loose = f"SELECT count(*) FROM {schema.tables[here.table]} WHERE {here.name} NOT IN "
            loose += f"(SELECT {there.name} FROM {schema.tables[there.table]})"
            assert database.run(loose).rows == [(0,)]
        seen |= {row[1] for row in rows["person"]}
        assert all(isinstance(row[2], int) for row in rows["person"])
        for query in QUERIES:
            database.run(query)
    assert "Ada Pell" in seen
    again, same = (FilledDatabase(schema, 3, QUERIES).run("SELECT * FROM person").rows for _ in range(2))
    assert again == same


def test_constants_that_no_column_can_have_and_keys_in_quotes(schema):
    """Infinite, beyond SQLite's whole numbers, and '3' in a column of numbers, which is 3 there."""
    queries = [f"SELECT name FROM town WHERE town_id {sign}" for sign in ("> 1e400", "< 99999999999999999999")]
    queries += [f"SELECT name FROM town WHERE town_id = '{n}'" for n in range(1, 40)]
    empty = dataclasses.replace(schema, tables=(*schema.tables, "bare"), table_words=(*schema.table_words, "bare"))
    for seed in range(4):
        database = FilledDatabase(empty, seed, queries)
        counted = database.run("SELECT count(*) - count(DISTINCT town_id), count(town_id) FROM town").rows[0]
        assert counted[0] == 0 < counted[1] and database.run(queries[0]).rows == []


def test_a_filled_database_is_guarded_and_can_be_written(schema, tmp_path):
    with pytest.raises(QueryError):
        FilledDatabase(schema, 0).run("DROP TABLE town")
    write_filled(tmp_path / "county.sqlite", schema, 4, QUERIES)
    with Database(tmp_path / "county.sqlite") as written:
        query = "SELECT * FROM visit"
        assert written.run(query).rows == FilledDatabase(schema, 4, QUERIES).run(query).rows
    with pytest.raises(FileExistsError, match="is there already"):
        write_filled(tmp_path / "county.sqlite", schema, 4)


def test_a_few_databases_tell_what_a_hundred_random_ones_tell(schema):
    kept = suite(schema, QUERIES)
    draw = random.Random(1)
    pairs = []
    for query in QUERIES:
        others = mutants(query, schema)
        pairs += [(query, other) for other in draw.sample(others, min(25, len(others)))]
    told = set().union(*(killed(database, pairs) for database in kept))
    by_hundred = set().union(*(killed(FilledDatabase(schema, 10_000 + n, QUERIES), pairs) for n in range(100)))
    assert len(kept) <= 8 and len(by_hundred) > 60
    assert len(told & by_hundred) >= 0.95 * len(by_hundred)
    for query in QUERIES:
        assert execution_match(query.lower().replace("'ada pell'", "'Ada Pell'"), query, kept)
