"""Exact set match and hardness are the official script's."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from fathom.tables.execution import execution_match
from fathom.tables.mutants import mutants
from fathom.tables.schema import Column, Schema
from fathom.tables.sql_match import LEVELS, Unreadable, exact_match, hardness, parse, plain_quotes
from fathom.tables.suites import FilledDatabase

KEPT = json.loads(lzma.decompress((Path(__file__).parent / "data" / "exact_match_pairs.json.xz").read_bytes()))


def schema_of(kept: dict) -> Schema:
    columns, numbers = [Column(-1, "*", "*")], {}
    for table, (name, names) in enumerate(kept["tables"].items()):
        for column in names:
            numbers[f"{name}.{column}"] = len(columns)
            columns.append(Column(table, column, column))
    foreign = tuple((numbers[a], numbers[b]) for a, b in kept["foreign"])
    names = tuple(kept["tables"])
    return Schema("kept", names, names, tuple(columns), frozenset(), foreign)


def test_a_thousand_verdicts_are_the_official_ones():
    schemas = {name: schema_of(kept) for name, kept in KEPT["schemas"].items()}
    assert len(KEPT["pairs"]) == 1000
    verdicts, levels = Counter(), Counter()
    for database, gold, said, verdict, level in KEPT["pairs"]:
        assert exact_match(said, gold, schemas[database]) == verdict, (said, gold)
        assert hardness(parse(gold, schemas[database])) == level, gold
        verdicts[verdict] += 1
        levels[level] += 1
    assert min(verdicts.values()) >= 400 and set(levels) == set(LEVELS) and min(levels.values()) >= 100


def test_every_right_query_is_right():
    """Exact match and, on rows that are made up, execution of each gold query against itself."""
    for name, kept in KEPT["schemas"].items():
        schema = schema_of(kept)
        right = list(dict.fromkeys(pair[1] for pair in KEPT["pairs"] if pair[0] == name))
        filled = FilledDatabase(schema, 0, right, rows=6)
        for query in right:
            assert exact_match(query, query, schema) and execution_match(query, query, [filled]), query


SCHEMA = schema_of({"tables": {"town": ["id", "name", "size"], "person": ["id", "town_id", "age"]}, "foreign": []})


@pytest.mark.parametrize(
    "query",
    [
        "SELECT", "SELECT name FROM nowhere", "SELECT nothing FROM town", "SELECT name FROM town LEFT JOIN person ON 1",
        "SELECT name FROM town WHERE size IS NULL", "SELECT name FROM town WHERE (id = 1 OR id = 2)", "DROP TABLE town",
        "SELECT name FROM town WHERE name = 'x", "SELECT name AS n FROM town", "SELECT 1", "", "(" * 500,
    ],
)  # fmt: skip
def test_what_the_script_cannot_read_matches_nothing(query):
    with pytest.raises(Unreadable):
        parse(query, SCHEMA)
    assert not exact_match(query, "SELECT name FROM town", SCHEMA)


@pytest.mark.parametrize(
    ("said", "gold", "verdict"),
    [
        ("WHERE size > = 3", "WHERE size >= 1", True), ("WHERE size ! = 3", "WHERE size != 1", True),
        ("WHERE size = 'a > = b'", "WHERE size = 'c'", True), ("LIMIT 1 OFFSET 2", "LIMIT 3", True),
        ("LIMIT 2, 5", "LIMIT 3", True), ("LIMIT 1 OFFSET 2", "", False),
        ("WHERE name IS 'a'", "WHERE name IS 'b'", True),
        ("WHERE name IS 'a'", "WHERE name = 'a'", False), ("ORDER BY id NULLS LAST LIMIT 3", "ORDER BY id", True),
        ("ORDER BY id COLLATE NOCASE DESC LIMIT 3", "ORDER BY id", True),
        ("ORDER BY id DESC NULLS LAST", "ORDER BY id", False),
        ("WHERE id IN (SELECT id FROM town LIMIT 1 OFFSET 2)", "", None),
        ("WHERE id IN (SELECT id FROM town ORDER BY id NULLS LAST)", "", None),
        ("WHERE id IN (SELECT id FROM town ORDER BY id > 2)", "", None),
        ("HAVING count(*) > 1", "", None), ("INDEXED BY town_name", "", None), ("FETCH FIRST 1 ROW ONLY", "", None),
        ("WHERE size > (id)", "", None), ("WHERE (size) - id > 1", "", None), ("WHERE name IS NOT 'a'", "", None),
    ],
)  # fmt: skip
def test_strange_but_legal_queries_are_read_as_the_script_reads_them(said, gold, verdict):
    """Verdicts of a reader written after the script's rules, token by token, which has those of all kept pairs, too."""
    said, gold = (f"SELECT name FROM town {rest}" for rest in (said, gold))
    if verdict is None:
        with pytest.raises(Unreadable):
            parse(said, SCHEMA)
    else:
        assert exact_match(said, gold, SCHEMA) == exact_match(gold, said, SCHEMA) == verdict
    with pytest.raises(Unreadable):  # unless it is in brackets or compared
        parse("SELECT max(size) - min(size) FROM town", SCHEMA)
    assert hardness(parse("SELECT (max(size) - min(size)) FROM town WHERE max(size) - min(size) > 3", SCHEMA)) == "easy"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT name FROM other.town",
        "SELECT main.town.name FROM town",
        "SELECT name FROM town WHERE " + " OR ".join(["id = 1"] * 3000),
        " UNION ".join(["SELECT name FROM town"] * 900),
        "SELECT name FROM town WHERE id IN " + "(SELECT id FROM town WHERE id IN " * 300 + "(1)" + ")" * 300,
    ],
    ids=lambda query: query[:40],
)
def test_names_of_databases_and_endless_queries_match_nothing(query):
    assert not exact_match(query, "SELECT name FROM town", SCHEMA)


def test_quotes_of_both_kinds_are_texts():
    assert plain_quotes("""a = "O'Brien" AND b = 'say "hi"' AND c = 'it''s'""") == (
        """a = 'O''Brien' AND b = 'say "hi"' AND c = 'it''s'"""
    )


def test_mutants_differ_in_one_place():
    found = mutants("SELECT max(name) FROM town WHERE id > 3 AND size = 'x' LIMIT 2", SCHEMA)
    assert "SELECT max ( name ) FROM town WHERE id > 3 LIMIT 2" in found
    assert "SELECT max ( size ) FROM town WHERE id > 3 AND size = 'x' LIMIT 2" in found
    assert "SELECT min ( name ) FROM town WHERE id > 3 AND size = 'x' LIMIT 2" in found
    assert "SELECT max ( name ) FROM town WHERE id > 4 AND size = 'x' LIMIT 2" in found
    assert "SELECT max ( name ) FROM town WHERE id > 3 AND size = 'xx' LIMIT 2" in found
    assert "SELECT max ( name ) FROM town WHERE id > 3 OR size = 'x'" not in found and len(found) == len(set(found))
