"""docs/tools.md: its tools are loaded, its recipe and its commands have the options that they name, and the recipes of
the small specialist fit the data that is made for them."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from fathom.tasks import Task
from fathom.tools import load_tools
from fathom.train import load_recipe
from fathom_cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text()


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_command_has_its_options():
    lines = [line.split(" #")[0] for block in fences("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("fathom ")]
    assert len(commands) >= 9 and all(
        line.startswith(("fathom ", "python recipes/make_specialist.py")) for line in lines
    )
    for words in commands:
        command = typer.main.get_command(app)
        context = command.make_context("fathom", list(words))
        name, verb, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        verb.make_context(name, rest, parent=context)


def test_the_tools_of_the_page(tmp_path):
    (source,) = fences("python")
    (tmp_path / "my_tools.py").write_text(source)
    tools = load_tools(tmp_path / "my_tools.py")
    assert list(tools) == ["celsius", "calculator"] and tools["celsius"].call({"fahrenheit": 212}) == "100.0"


def test_the_tasks_of_the_page():
    rows, mixed = (Task.from_yaml(yaml.safe_load(source)["task"], "task") for source in fences("yaml"))
    assert (rows.template, rows.balance, rows.tight) == ("alpaca", 0.5, True)
    assert list(mixed.text) == ["prose"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("specialist")
    runpy.run_path(str(ROOT / "recipes" / "make_specialist.py"))["main"](folder / "runs" / "specialist")
    return folder


def test_the_recipes_of_the_specialist_fit_their_data(made, monkeypatch):
    monkeypatch.chdir(made)
    domain = load_recipe(ROOT / "recipes" / "specialist_cpu_domain.yaml")
    weights = [source.weight for source in domain.data.train.values()]
    assert weights == [8, 1, 1] and all(Path(source.text).is_file() for source in domain.data.train.values())
    written = yaml.safe_load((ROOT / "recipes" / "specialist_cpu.yaml").read_text())
    assert written["model"]["checkpoint"] == f"runs/{domain.name}/vanilla-seed0/model"
    task = Task.from_yaml(written["task"], "task")
    rows = [json.loads(line) for line in Path(written["data"]["train"]).read_text().splitlines()]
    assert {row["type"] for row in rows} >= {"look_up", "calculator", "paper definition"}
    held_out = Path(written["data"]["validation"]).read_text().splitlines()
    calls = [
        {json.dumps(m["tool_calls"]) for row in map(json.loads, lines) for m in row["messages"] if m.get("tool_calls")}
        for lines in (held_out, map(json.dumps, rows))
    ]
    assert calls[0] and not calls[0] & calls[1]  # no held-out call is learned
    assert task.template == "react"


def test_the_specialists_questions_are_answered_by_its_tools(made):
    folder = made / "runs" / "specialist"
    tools = load_tools(folder / "tools.py")
    for line in (folder / "questions.jsonl").read_text().splitlines():
        asked = json.loads(line)
        (call,) = asked["calls"]
        assert tools[call["name"]].call(call["arguments"]) == asked["answer"]
