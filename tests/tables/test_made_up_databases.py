"""recipes/make_databases.py: what the demo of text to SQL learns from and is asked."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from fathom.data import DataConfig, load_tokenizer
from fathom.data.tokenizer import train_bpe
from fathom.tables.acceptor import Acceptor
from fathom.tables.questions import Databases
from fathom.tables.source import Source, answer_text, begun
from fathom.tasks.text_to_sql import TextToSQL

PARTS = ("train", "held-out")
SCRIPT = Path(__file__).parents[2] / "recipes" / "make_databases.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    given = sys.argv
    sys.argv = [str(SCRIPT), str(folder), "--train", "12", "--held-out", "4", "--tables", "3"]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = given
    return folder


def test_schemas_without_files_need_suites(made, tmp_path):
    with Databases(made / "databases") as databases:
        schemas = [databases.schema(name) for name in {row["db_id"] for part in PARTS for row in rows(made, part)}]
    entries = [
        {
            "db_id": schema.name, "table_names_original": schema.tables, "table_names": schema.table_words,
            "column_names_original": [(c.table, c.name) for c in schema.columns],
            "column_names": [(c.table, c.words) for c in schema.columns],
            "column_types": [c.kind for c in schema.columns], "primary_keys": [], "foreign_keys": [],
        }
        for schema in schemas
    ]  # fmt: skip
    (tmp_path / "tables.json").write_text(json.dumps(entries), encoding="utf-8")
    data = DataConfig(
        train=str(made / "train.jsonl"), validation=str(made / "held-out.jsonl"), tokenizer=str(made / "tokenizer"),
        block_size=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"none of the 4 held-out databases.*task\.suites"):
        TextToSQL(schemas=str(tmp_path / "tables.json"), target_tokens=28).prepare(data, tmp_path / "cache")


def rows(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_no_name_of_a_held_out_database_is_one_of_a_training_database(made):
    names = {"train": set(), "held-out": set()}
    with Databases(made / "databases") as databases:
        for part, found in names.items():
            for name in {row["db_id"] for row in rows(made, part)}:
                schema = databases.schema(name)
                found |= {*schema.tables, *(column.name for column in schema.columns[1:]), name}
    assert names["train"] and names["held-out"] and not names["train"] & names["held-out"]


def test_every_query_returns_rows_and_every_text_is_read_back(made):
    tokenizer = load_tokenizer(str(made / "tokenizer"))
    asked = rows(made, "held-out") + rows(made, "train")
    assert {row["kind"] for row in asked} == {"table", "column", "two columns", "cell", "join"}
    with Databases(made / "databases") as databases:
        for row in asked:
            schema, database = databases.schema(row["db_id"]), databases.open(row["db_id"])
            assert database.run(row["query"]).rows
            answer = answer_text(row["query"], row["db_id"])
            for text in (Source().write([row["question"]], schema, database).text, answer):
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert tokenizer.decode(ids) == text
                assert not any(token.startswith("<0x") for token in tokenizer.convert_ids_to_tokens(ids))
            acceptor = Acceptor({row["db_id"]: schema})
            state = acceptor.advance(Acceptor.START, answer, [row["db_id"]])
            assert state is not None and acceptor.complete(state)


def test_an_answer_begins_with_the_tokens_that_it_is_learned_with(made):
    held_out = rows(made, "held-out")
    texts = [answer_text(row["query"], row["db_id"]) for row in held_out]
    for tokenizer in (load_tokenizer(str(made / "tokenizer")), train_bpe(texts, 300)):
        for row, text in zip(held_out, texts, strict=True):
            first = begun(tokenizer, row["db_id"])
            assert tokenizer(text, add_special_tokens=False)["input_ids"][: len(first)] == first
            assert tokenizer.decode(first).strip() == f"{row['db_id']} |"
