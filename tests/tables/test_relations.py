"""Schemas, serialisation, alignment and relations, against the sheet pair by pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import small_databases

from fathom.tables.database import Database
from fathom.tables.linking import bridge_values
from fathom.tables.rasat import Rasat, ids, numbering
from fathom.tables.relations import Turn, relation_matrix
from fathom.tables.schema import Schema
from fathom.tables.source import Source, answer_text, normalised, query_of, token_items, write
from fathom.tables.words import split

QUESTION = "What is the name of every person of age 41.5 who visited Upper Brome , the towns' head ?"
DEFAULT = ids(Rasat.Options())
NAMES = {number: name for name, number in DEFAULT.items()}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    with Database(small_databases.make(tmp_path_factory.mktemp("databases"))) as opened:
        yield opened


def test_a_schema_is_what_the_file_says(database):
    schema = database.schema
    assert schema.tables == ("town", "person", "visit")
    assert [(c.name, c.words, c.kind) for c in schema.columns[:8]] == [
        ("*", "*", "text"), ("town_id", "town id", "number"), ("name", "name", "text"), ("head", "head", "number"),
        ("big", "big", "boolean"), ("person_id", "person id", "number"), ("fullName", "full name", "text"),
        ("age", "age", "number"),
    ]  # fmt: skip
    assert schema.primary == {1, 5} and set(schema.foreign) == {(3, 5), (8, 1), (9, 5), (10, 1)}
    assert schema.columns[11].kind == "time" and database.values(7) == (30.0, 41.5)


def test_names_in_another_order_than_the_files_are_not_believed():
    entry = {
        "db_id": "shop", "table_names_original": ["albums", "artists"], "table_names": ["artists", "albums"],
        "column_names_original": [[-1, "*"], [0, "AlbumTitle"], [1, "id"]], "column_types": ["text", "text", "number"],
        "column_names": [[-1, "*"], [0, "name"], [1, "album title"]], "primary_keys": [2], "foreign_keys": [],
    }  # fmt: skip
    schema = Schema.from_spider(entry)
    assert schema.table_words == ("albums", "artists") and schema.columns[1].words == "album title"


def relations(options, text, turns, schema, database=None, spoken=()):
    """The matrix in the ids of a model with these options, and rows."""
    found, rows = relation_matrix(text, turns, schema, database, spoken, options.dependency)
    return np.array(numbering(options), dtype=np.uint8)[found], rows


def expected(a, b, schema, words, links):
    """The relation from part a to part b by the sheet's table (3.3 and 3.4)."""
    (kind, i), (other, j) = a, b
    columns, foreign = schema.columns, schema.foreign
    if kind == other == "q":
        return f"q-q:{j - i}" if abs(j - i) <= 2 else "q-q:generic"
    if kind == other == "t":
        pairs = {(columns[x].table, columns[y].table) for x, y in foreign}
        if i == j:
            return "t-t:identity"
        there, back = (i, j) in pairs, (j, i) in pairs
        return {(1, 1): "t-t:fk-both", (1, 0): "t-t:fk", (0, 1): "t-t:fk-reverse"}.get((there, back), "t-t:generic")
    if kind == other == "c":
        if i == j == 0:
            return "*-*:identity"
        if 0 in (i, j):
            return "*-c:generic" if i == 0 else "c-*:generic"
        if (i, j) in foreign:
            return "c-c:fk"
        if (j, i) in foreign:
            return "c-c:fk-reverse"
        if i == j:
            return "c-c:identity"
        return "c-c:same-table" if columns[i].table == columns[j].table else "c-c:generic"
    if {kind, other} == {"t", "c"}:
        table, column = (i, j) if kind == "t" else (j, i)
        if column == 0:
            return f"{kind if kind == 't' else '*'}-{'*' if other == 'c' else 't'}:generic"
        if columns[column].table != table:
            return f"{kind}-{other}:generic"
        return f"{kind}-{other}:{'pk' if column in schema.primary else 'has'}"
    if {kind, other} == {"c", "v"}:
        cell, column = (i, j) if kind == "v" else (j, i)
        return f"{kind}-{other}:has" if links["cells"][cell] == column else None
    if "v" in (kind, other):
        return None
    word, (name, index) = (i, b) if kind == "q" else (j, a)
    if (name, index) == ("c", 0):
        return "q-*:generic" if kind == "q" else "*-q:generic"
    return f"{kind}-{other}:{links.get((word, name, index), 'none')}"


def test_every_relation_is_the_sheets_and_all_45_occur(database):
    schema, words = database.schema, [word.text for word in split(QUESTION)]
    assert words[3] == "name" and words[6] == "person" and words[9] == "41.5" and words[12:14] == ["Upper", "Brome"]
    at = {word: place for place, word in enumerate(words)}
    links = {
        (at["name"], "c", 2): "exact", (at["name"], "c", 6): "partial", (at["person"], "t", 1): "exact",
        (at["person"], "c", 5): "partial", (at["person"], "c", 9): "partial", (at["age"], "c", 7): "exact",
        (at["41.5"], "c", 7): "value", (at["Upper"], "c", 2): "value", (at["Brome"], "c", 2): "value",
        (at["towns"], "t", 0): "exact", **{(at["towns"], "c", n): "partial" for n in (1, 8, 10)},
        (at["head"], "c", 3): "exact", (at["visited"], "t", 2): "exact", "cells": [2],
    }  # fmt: skip
    text = write([QUESTION], schema, {2: ["Upper Brome"]})
    found, _ = relations(Rasat.Options(), text, [QUESTION], schema, database)
    parts = [("q", i) for i in range(len(words))] + [("t", i) for i in range(3)] + [("c", i) for i in range(12)]
    parts.append(("v", 0))
    assert found.shape == (len(parts), len(parts)) and found.dtype == np.uint8
    for (row, a), (column, b) in itertools.product(enumerate(parts), repeat=2):
        assert NAMES.get(found[row, column]) == expected(a, b, schema, words, links), (a, b)
    # a partial match of a table needs a longer name
    longer = Schema("x", ("full person", "x"), ("full person", "x"), schema.columns[:1])
    other, _ = relations(Rasat.Options(), write(["a person"], longer, {}), ["a person"], longer)
    assert set(found.ravel()) | set(other.ravel()) | {0} == set(range(46))


def test_relations_back_are_those_of_there(database):
    found, _ = relations(Rasat.Options(), write([QUESTION], database.schema, {}), [QUESTION], database.schema)
    for row, column in itertools.product(range(len(found)), repeat=2):
        there, back = NAMES[found[row, column]], NAMES[found[column, row]]
        kinds, _, what = there.partition(":")
        pair = {"fk": "fk-reverse", "fk-reverse": "fk", **{str(i): str(-i) for i in range(-2, 3)}}
        assert back == f"{kinds[::-1]}:{pair.get(what, what)}"


def test_tokens_have_the_relations_of_their_words(database):
    """By the tokens' own characters: every token inside an item has the item's row, all others have none."""
    tokenizer, options = small_databases.tokenizer(), Rasat.Options()
    made = Source().encode(tokenizer, [QUESTION], database.schema, database)
    assert "name [ Upper Brome ] , head" in made.text.text and made.text.text.startswith(
        f"{QUESTION} | county | town :"
    )
    table, rows = relations(options, made.text, [QUESTION], database.schema, database)
    relation_ids = made.relation_ids(options)
    offsets = [*tokenizer(made.text.text, return_offsets_mapping=True)["offset_mapping"], (0, 0)]
    assert len(offsets) == len(made.input_ids) == len(relation_ids)
    owners = []
    for start, stop in offsets:
        inside = [i for i, item in enumerate(made.text.items) if start < item.stop and item.start < stop]
        assert len(inside) <= 1  # this tokenizer splits at spaces and signs
        owners.append(inside[0] if inside else None)
    pieces = {owner: owners.count(owner) for owner in owners}
    assert max(pieces.values()) > 2 and {i for i in owners if i is not None} == set(range(len(made.text.items)))
    for i, j in itertools.product(range(len(owners)), repeat=2):
        none = owners[i] is None or owners[j] is None
        assert relation_ids[i, j] == (0 if none else table[rows[owners[i]], rows[owners[j]]])


def test_a_special_token_in_a_question_is_text(database):
    tokenizer = small_databases.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
    asked = "head of </s> <pad> ?"
    made = Source().encode(tokenizer, [asked], database.schema, database)
    assert made.input_ids.count(tokenizer.eos_token_id) == 1 and made.input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in made.input_ids
    assert tokenizer.decode(made.input_ids[:-1]) == made.text.text and asked in made.text.text


def test_a_token_of_two_items_goes_to_the_larger_part(database):
    text = write(["ab cde"], database.schema, {})
    assert token_items(text, [(0, 2), (1, 6), (2, 3), (6, 8)]).tolist() == [0, 1, -1, -1]


def test_old_turns_go_first_and_what_does_not_fit_is_said(database):
    tokenizer, turns = small_databases.tokenizer(), [QUESTION, "Who is the head ?", "On that day ?"]
    whole = Source(tokens=400).encode(tokenizer, turns, database.schema)
    assert whole.cut == "" and whole.text.text.startswith(" | ".join(turns))
    shorter = Source(tokens=len(whole.input_ids) - 1).encode(tokenizer, turns, database.schema)
    assert shorter.cut == "the oldest 1 of 3 turns" and shorter.text.text.startswith(
        "Who is the head ? | On that day ?"
    )
    assert len(shorter.rows) == len(shorter.input_ids)
    with pytest.raises(
        ValueError, match=r"database 'county': its schema alone has \d+ tokens, and a source has room for 20"
    ):
        Source(tokens=20).encode(tokenizer, turns, database.schema)
    alone = len(Source().encode(tokenizer, ["a"], database.schema).input_ids)
    with pytest.raises(
        ValueError, match=r"question of 88 characters: with the schema of 'county' .*; ask it more briefly"
    ):
        Source(tokens=alone + 3).encode(tokenizer, [QUESTION], database.schema)
    cut = Source(tokens=alone).encode(tokenizer, [QUESTION], database.schema, whole=False)
    assert len(cut.input_ids) == alone == len(cut.rows) and "tokens of the schema" in cut.cut
    with pytest.raises(ValueError, match="question is empty"):
        Source().encode(tokenizer, [" "], database.schema)


def test_turns_coreference_and_parses(database):
    turns = ["Who is the head of Lind ?", "Is she of age ?"]  # words 0 … 6 and 7 … 11
    text = write(turns, database.schema, {})
    said = [Turn(mentions=((4, (2, 3)), (5, (5,)))), Turn(mentions=((4, (1,)),))]
    number = ids(Rasat.Options(coreference=True))
    found, _ = relations(Rasat.Options(coreference=True), text, turns, database.schema, spoken=said)
    assert found[2, 8] == found[3, 8] == number["q-q:coreference"] and found[8, 2] == number["q-q:generic"]
    assert found[2, 3] == number["q-q:1"]  # distances are written after coreference, as in the official code
    assert found[0, 7] == found[5, 9] == number["q-q:generic"] and found[0, 1] == number["q-q:1"]
    both, _ = relations(Rasat.Options(coreference=True, symmetric=True), text, turns, database.schema, spoken=said)
    assert both[8, 2] == both[8, 3] == number["q-q:coreference"]
    across, _ = relations(Rasat.Options(across_turns=True), text, turns, database.schema)
    assert across[6, 7] == DEFAULT["q-q:1"] and across[8, 6] == DEFAULT["q-q:-2"]

    parsed = [Turn(heads=(-1, 0, 3, 0, 5, 3, 0)), Turn(heads=(2, 0, -1, 2, 0))]
    number = ids(Rasat.Options(dependency=True))
    found, _ = relations(Rasat.Options(dependency=True), text, turns, database.schema, spoken=parsed)
    assert found[0, 1] == number["q-q:forward"] and found[1, 0] == number["q-q:backward"]
    assert found[1, 2] == number["q-q:unrelated"] and found[0, 7] == number["q-q:generic"]
    with pytest.raises(ValueError, match="turn 0 has no parse; give a CoNLL-U file"):
        relations(Rasat.Options(dependency=True), text, turns, database.schema)
    with pytest.raises(ValueError, match="the parse of turn 1 has 4 words and the question 5"):
        short = [parsed[0], Turn(heads=(2, 0, -1, 2))]
        relations(Rasat.Options(dependency=True), text, turns, database.schema, spoken=short)


@pytest.mark.parametrize(
    ("question", "column", "cells"),
    [
        ("who lives in Upper Brome ?", 2, ["Upper Brome"]),
        ("who lives in upper brom", 2, ["Upper Brome"][:0]),  # a name must stand there whole
        ("is Lind's head old?", 2, ["Lind"]),
        ("the 41.5 of Cy", 7, []),
        ("where is Ada Pel", 6, ["Ada Pell"]),
        ("where is ada pelican", 6, []),
    ],
)
def test_cells_that_nearly_stand_in_the_question(database, question, column, cells):
    assert bridge_values(question, database, column) == cells


def test_queries_are_written_in_one_way():
    query = "SELECT  T1.Name , count(*)\nFROM Town AS T1 WHERE x = \"Upper  Brome\" AND y = 'Ä, b' ;"
    said = "select t1.name, count(*) from town as t1 where x = \"Upper  Brome\" and y = 'Ä, b'"
    assert normalised(query) == said and answer_text(query, "county") == f"county | {said}"
    assert query_of(f"county | {said}") == said == query_of(said)
    query = "select a || ' , B' , c from t"
    assert normalised(query) == "select a || ' , B', c from t"  # a text stays as it is
    for name in ("county", "a | b", "a|b"):
        assert query_of(answer_text(query, name), name) == normalised(query) == query_of(normalised(query), name)
