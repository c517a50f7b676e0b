"""A verb that gets another verb's model says in one line what it takes, and which verb reads this one."""

from __future__ import annotations

import contextlib
import json
import sqlite3

import pytest

from tiny_checkpoint import run_cli, save_fathom


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder, configs of other families, a database and a picture."""
    folder = tmp_path_factory.mktemp("families")
    save_fathom(folder / "decoder")
    for family in ("fathom_mova", "fathom_latent", "fathom_table_t5", "fathom_t5"):
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps({"model_type": family}))
    with contextlib.closing(sqlite3.connect(folder / "singers.sqlite")) as database:
        database.execute("create table singer (id int, name text)")
    (folder / "stages.yaml").write_text("stages: {space: {}}")
    (folder / "growths.yaml").write_text("base: {tokens: 512}\nmethods: [innovator]")
    (folder / "recipe.yaml").write_text("model: {backbone: llama}\nmethods: [vanilla]")
    from PIL import Image

    Image.new("RGB", (8, 8)).save(folder / "cat.png")
    return folder


@pytest.mark.parametrize(
    "words, said",
    [
        ("video make decoder --prompt ball", "decoder: family 'fathom'; give a model that task audiovideo has trained"),
        ("table ask decoder how --db singers.sqlite", "give a model that task text_to_sql has trained"),
        ("table ask fathom_table_t5 how --db singers.sqlite", "this one is read by `fathom table describe`"),
        ("latents recovery decoder", "give a model of a stage that `fathom latents run` has trained"),
        ("vision bench decoder --image cat.png --tokens 4", "give one of LLaVA, LLaVA-NeXT"),
        (
            "generate fathom_mova --prompt x",
            "fathom_mova: family 'fathom_mova'; this one is read by `fathom video make`",
        ),
        ("generate fathom_t5 --prompt x", "this one is read by `fathom table ask` and `fathom table show`"),
        (
            "inspect fathom_latent --text stages.yaml",
            "this one is read by `fathom generate` and `fathom latents recovery`",
        ),
        ("train stages.yaml", "stages.yaml: has stages, which `fathom latents run` trains one after the other"),
        ("train growths.yaml", "growths.yaml: has a base, which `fathom grow` trains and then grows"),
        ("cost growths.yaml", "growths.yaml: name is missing"),  # it prices them
        ("grow recipe.yaml", "no base to grow; `fathom train` and `fathom compare` read such a recipe"),
    ],
)
def test_a_model_of_another_kind_is_refused_with_the_verb_that_reads_it(folder, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folder)
    code, out, err = run_cli(monkeypatch, capsys, *words.split())
    assert code == 2 and not out and said in err and len(err.splitlines()) == 1
