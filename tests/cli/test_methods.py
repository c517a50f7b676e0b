"""`fathom methods`."""

import json

import pytest

from fathom import caches
from fathom.models.registry import REGISTRIES
from fathom_cli.methods import WINGS
from tiny_checkpoint import run_cli


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "methods", *arguments)


def test_json_has_every_registered_method(run):
    code, out, _ = run("--json")
    rows = json.loads(out)
    assert code == 0
    assert all(set(row) == {"name", "wing", "registry", "paper", "summary"} for row in rows)
    assert all(row["name"] and row["summary"] and "\n" not in row["summary"] for row in rows)
    listed = {(row["registry"], row["name"]) for row in rows}
    assert {(registry, name) for registry, methods in REGISTRIES.items() for name in methods} <= listed
    assert {("cache", name) for name in caches.METHODS} <= listed
    assert {row["registry"] for row in rows} <= {*REGISTRIES, *WINGS.values()}
    pondering = next(row for row in rows if row["name"] == "pondering")
    assert (pondering["wing"], pondering["registry"], pondering["paper"]) == ("depth", "depth", "2505.20674")


def test_a_wings_mapping_is_read(run, monkeypatch):
    class Named:
        """Reads weights.

        At length.
        """

        paper = "Title, arXiv 2501.00001"

    monkeypatch.setattr("fathom.lineage.METHODS", {"named": Named}, raising=False)
    row = {
        "name": "named", "wing": "lineage", "registry": "lineage", "paper": Named.paper, "summary": "Reads weights.",
    }  # fmt: skip
    assert row in json.loads(run("--json")[1])
    assert ["named", "lineage", "lineage", "2501.00001", "Reads", "weights."] in map(str.split, run()[1].splitlines())


def test_table_is_plain_and_aligned(run):
    lines = run()[1].splitlines()
    column = lines[0].index("summary")
    assert lines[0].split() == ["name", "wing", "registry", "paper", "summary"]
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    assert "\x1b" not in "".join(lines)


def test_help_has_an_example(run):
    assert "fathom methods --json" in run("--help")[1]
