"""`fathom methods`: what it reads from the sources is what the imported classes say, and every method has a card."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import textwrap
from pathlib import Path

import pytest

import fathom
from fathom import caches, curation, diffusion, growth, latents, lineage, tables
from fathom.audiovideo import Mova
from fathom.models.registry import ENCODER_PLAIN, REGISTRIES, methods_of
from fathom.tables import text
from fathom.vision import METHODS
from fathom_cli.catalogue import Entry, Module, entries
from tiny_checkpoint import run_cli

# registry → name → the method's class
CLASSES = {
    **REGISTRIES, **{section: methods_of(section) for section in ENCODER_PLAIN}, "cache": caches.METHODS,
    "growth": growth.methods(), "vision": METHODS, "tables": tables.METHODS, "table_to_text": text.METHODS,
    "audiovideo": {Mova.name: Mova}, "latents": latents.METHODS, "curation": curation.METHODS,
}  # fmt: skip
for _method in diffusion.METHODS.values():
    CLASSES.setdefault(_method.registry, {})[_method.name] = _method
CARDS = Path(__file__).parents[2] / "docs" / "methods"
every_method = pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "methods", *arguments)


def taker(entry: Entry) -> type:
    """The real class whose fields are the options."""
    cls = CLASSES[entry.registry][entry.name]
    return cls.Options if entry.section else cls


def test_every_method_is_in_the_catalogue_once():
    real = [(registry, name) for registry, methods in CLASSES.items() for name in methods]
    real += [("lineage", name) for name in lineage.METHODS]
    assert sorted((entry.registry, entry.name) for entry in entries()) == sorted(real)


@every_method
def test_what_the_catalogue_says_is_what_the_class_says(entry):
    if entry.registry == "lineage":
        said = lineage.METHODS[entry.name]
        module, _, name = said.call.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
        if said.options:
            module, _, name = said.options.rpartition(".")
            expected = [(f.name, f.default) for f in dataclasses.fields(getattr(importlib.import_module(module), name))]
            assert [(option.name, option.default) for option in entry.options] == expected
        return
    cls = CLASSES[entry.registry][entry.name]
    assert (entry.summary, entry.equation, entry.paper) == (cls.summary, " ".join(cls.equation.split()), cls.paper)
    assert entry.call == cls.__name__
    assert Path(fathom.__file__).parent.parent / entry.source == Path(importlib.import_module(cls.__module__).__file__)
    options = {option.name: option for option in entry.options}
    fields = dataclasses.fields(taker(entry))
    assert list(options) == [field.name for field in fields]
    for field in fields:
        assert options[field.name].default == field.default
        assert options[field.name].type == field.type


@every_method
def test_every_option_has_a_meaning(entry):
    assert entry.equation and entry.summary and "\n" not in entry.summary
    assert not [option.name for option in entry.options if not option.meaning]


@every_method
def test_every_method_has_a_card_with_its_verdict_and_cost(entry):
    card = CARDS / f"{entry.name}.md"
    assert entry.card == card
    assert card.read_text().startswith(f"# {entry.name}\n")
    assert entry.cost and entry.verdict


def test_every_card_is_of_a_method():
    assert {card.stem for card in CARDS.glob("*.md")} <= {entry.name for entry in entries()}


def test_a_method_of_a_later_wing_needs_no_line_elsewhere(tmp_path):
    """A sampler, say: a dataclass in a folder of its own, with options from a base in another file."""
    for name, source in {
        "fathom/samplers/base.py": """
            import dataclasses
            from typing import ClassVar

            @dataclasses.dataclass(frozen=True)
            class Sampler:
                '''Shared.

                steps: forwards of the model.
                seed, rows: of the noise,
                    and how many.
                '''

                steps: int = 8
                seed: int = 0
                rows: int | None = None
                kind: str = "any"
                paper: ClassVar[str] = "2501.00001"
            """,
        "fathom/samplers/greedy.py": """
            import dataclasses
            from fathom.samplers.base import Sampler as Base

            @dataclasses.dataclass(frozen=True)
            class Greedy(Base):
                '''Takes the likeliest.

                width: tokens a step.
                '''

                width: int = 2
                steps: int = 4
                kind: ClassVar[str] = "greedy"
                name = "greedy"
                summary = "Takes the likeliest."
                equation = "x = argmax p"

                def __call__(self):
                    return None
            """,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(source))
    (entry,) = Module(tmp_path / "fathom", tmp_path / "fathom/samplers/greedy.py").methods()
    assert (entry.name, entry.wing, entry.registry, entry.paper) == ("greedy", "samplers", "samplers", "2501.00001")
    assert (entry.call, entry.source, entry.section) == ("Greedy", "fathom/samplers/greedy.py", False)
    assert [(option.name, option.default, option.meaning) for option in entry.options] == [
        ("steps", 4, "forwards of the model."),
        ("seed", 0, "of the noise, and how many."),
        ("rows", None, "of the noise, and how many."),
        ("width", 2, "tokens a step."),
    ]


def test_a_card_that_is_not_there(tmp_path):
    stranger = dataclasses.replace(entries()[0], name="stranger")
    assert stranger.card is None and (stranger.cost, stranger.verdict) == ("", "")


def test_the_list_as_json(run):
    code, out, _ = run("--json")
    rows = json.loads(out)
    assert code == 0
    assert all(list(row) == ["name", "wing", "registry", "paper", "summary"] for row in rows)
    pondering = next(row for row in rows if row["name"] == "pondering")
    assert (pondering["wing"], pondering["registry"], pondering["paper"]) == ("depth", "depth", "2505.20674")
    assert {"act", "exit_gate"} <= {row["name"] for row in rows}


def test_the_list_is_plain_and_aligned(run):
    lines = run()[1].splitlines()
    column = lines[0].index("summary")
    assert lines[0].split() == ["name", "wing", "registry", "paper", "summary"]
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    assert "\x1b" not in "".join(lines)


@every_method
def test_one_method_on_a_page(run, entry):
    out = run(entry.name)[1]
    assert max(map(len, out.splitlines())) <= 110
    words = " ".join(out.split())
    assert "](" not in words  # links are for pages
    parts = (part for text in (entry.cost, entry.verdict) for part in re.split(r"\[|\]\([^)]*\)", text))
    for said in (entry.summary, entry.equation, *parts, entry.source):
        assert " ".join(said.split()) in words
    for option in entry.options:
        assert f"{option.name} = {option.default!r}" in words
    assert f"{entry.name}.md" in words
    arxiv = re.search(r"\d{4}\.\d{5}", entry.paper)
    assert arxiv is None or f"https://arxiv.org/abs/{arxiv.group()}" in words


def test_one_method_as_json(run):
    said = json.loads(run("treekv", "--json")[1])
    assert said["options"][0] == {
        "name": "budget", "type": "int", "default": 1024, "meaning": "tokens stored per key/value head.",
    }  # fmt: skip
    assert said["verdict"] and said["cost"] and said["equation"] and said["card"].endswith("treekv.md")


def test_a_method_that_does_not_exist(run):
    code, _, err = run("TreeVK")
    assert code == 2
    assert err == "fathom: method 'TreeVK' does not exist (did you mean 'treekv'?); `fathom methods` lists all\n"
    for word, meant in (("fourier_transformer", "fourier"), ("fovea-transformer", "fovea")):
        assert f"(did you mean '{meant}'?)" in run(word)[2]


def test_help_has_an_example(run):
    assert "fathom methods treekv" in run("--help")[1]
