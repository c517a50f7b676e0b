"""`fathom table describe`, on checkpoints of every kind of method."""

from __future__ import annotations

import json

import pytest
import typer
from table_cases import CORPUS, host, pairs, tokenizer

from fathom.tables.text import PromptMize, TableGenerator
from fathom.tables.text.generator import MODELS, Stages
from fathom.tables.text.stages import Stage
from fathom_cli.table_describe import describe


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    stock = tmp_path_factory.mktemp("stock")
    host().save_pretrained(stock)
    tokenizer().save_pretrained(stock)
    found = {"stock": str(stock)}
    for table in ("akg", "ctrlscitab"):
        found[table] = str(tmp_path_factory.mktemp(table))
        section = {"name": table, **({"reduction": 4} if table == "akg" else {})}
        MODELS["t5"].from_pretrained(stock, table=section).save_pretrained(found[table])
        tokenizer().save_pretrained(found[table])
    found["promptmize"] = str(tmp_path_factory.mktemp("promptmize"))
    generator = TableGenerator.from_pretrained(found["stock"], PromptMize(adapter=False))
    short = Stages(planner=Stage(steps=1), generator=Stage(steps=1))
    generator.fit(pairs(2), stages=short)
    generator.save_pretrained(found["promptmize"])
    (stock / "t.csv").write_text("model,F1\nours,27.5\nbase,21\n")
    (stock / "one.csv").write_text("name,food\nAlan,Thai\n")
    (stock / "corpus.txt").write_text("\n".join(CORPUS))
    (stock / "facts.txt").write_text("We train on news. The base is a tree.")
    return found


def run(folders, capsys, name: str, *arguments: str) -> dict:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(describe)
    arguments = [argument.replace("@", folders["stock"] + "/") for argument in arguments]
    app([folders[name], *arguments, "--json", "--new-tokens", "6", "--beams", "1"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("stock", ["@one.csv"]),
        ("akg", ["@one.csv", "--corpus", "@corpus.txt"]),
        ("promptmize", ["@one.csv"]),
        ("promptmize", ["@one.csv", "--plan", "food, name"]),
        ("ctrlscitab", ["@t.csv", "--highlight", "27.5", "--highlight", "ours", "--background", "@facts.txt"]),
        ("ctrlscitab", ["@t.csv", "--highlight", "ours", "--caption", "Scores"]),
    ],
)
def test_a_table_is_described(name, arguments, folders, capsys):
    found = run(folders, capsys, name, *arguments)
    assert found["method"] == ("table_plain" if name == "stock" else name)
    cells = {"Alan", "Thai"} if "@one.csv" in arguments else {"27.5", "ours"} & set(arguments)
    assert set(found["missed"]) | (set(found["mentioned"]) & cells) == cells
    assert found["coverage"] == pytest.approx(1 - len(found["missed"]) / len(cells))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("akg", ["@one.csv"], "corpus=None: method 'akg' reads prototypes"),
        ("akg", ["@one.csv", "--corpus", "@none.txt"], "--corpus .*none.txt: no such file"),
        ("ctrlscitab", ["@t.csv", "--highlight", "33"], "highlight='33': no cell of the table has this text"),
        ("ctrlscitab", ["@t.csv", "--plan", "F1"], "--plan F1: method 'ctrlscitab' reads no plan"),
        ("ctrlscitab", ["@t.csv", "--retriever", "tsdae"], "--retriever tsdae: use tfidf or random"),
        ("promptmize", ["@one.csv", "--plan", "colour"], "plan item 'colour': no key of the table; keys: name, food"),
        (
            "promptmize",
            ["@one.csv", "--highlight", "Thai"],
            "--highlight Thai: method 'promptmize' reads tables of slots",
        ),
        ("stock", ["@none.csv"], "none.csv: no such file"),
    ],
)
def test_what_cannot_be_described_is_refused(name, arguments, said, folders, capsys):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        run(folders, capsys, name, *arguments)
