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

from fathom.report.growing import asked_of
from fathom.report.growths import load_growths
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


@pytest.mark.parametrize("name", ["specialist", "specialist_smollm2"])
def test_the_comparison_reads_what_is_made(name, made, monkeypatch):
    """All files but the general text and what is held out of it; and what is held out of each kind of question."""
    monkeypatch.chdir(made)
    loaded = load_growths(ROOT / "recipes" / f"{name}.yaml")
    sources = [loaded.data.train["domain"].text, loaded.data.train["tables"].text, loaded.held_out["domain"]["papers"]]
    rows = {
        stage.data["train"]
        for way in loaded.methods
        for stage in way.stages
        if isinstance(stage.data.get("train"), str)
    }
    assert all(Path(file).is_file() for file in [*sources, *rows]) and rows
    tools, questions = asked_of(loaded.asked)
    assert list(questions) == ["told", "untold", "sums"] and set(tools) == {"look_up", "calculator"}
    papers = Path(sources[0]).read_text()
    for kind, some in questions.items():
        assert 0 < len(some) <= loaded.asked.most and len({one.question for one in some}) == len(some)
        called = [call for one in some for call in one.calls]
        assert {call["name"] for call in called} == {"calculator" if kind == "sums" else "look_up"}
        if kind != "sums":
            assert {call["arguments"]["column"] == "hardness" for call in called} == {kind == "untold"}
    assert "hardness" not in papers
