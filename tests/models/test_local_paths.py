"""A mistyped path is refused here; only what may be a name of the hub goes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.data import Source, load_tokenizer
from fathom.evaluate.load_model import load_config
from fathom.lineage.reader import open_checkpoint
from fathom.models.local_paths import is_local, refuse_absent
from fathom.train import MethodConfig, Recipe, Training, model_config

VANILLA = MethodConfig("vanilla")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with texts/note.txt and runs/model in it, and a hub that nobody may ask."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "note.txt").write_text("text")
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for place in (
        "transformers.AutoConfig.from_pretrained",
        "transformers.AutoTokenizer.from_pretrained",
        "datasets.load_dataset",
        "huggingface_hub.snapshot_download",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("the hub was asked"))
    return tmp_path


def test_what_can_only_be_a_path(here):
    paths = ["./x", "../x", "/x", "~/x", "x/", "a/b/c", "texts/nope", "texts/note.txt/x", "runs/modell", "texts"]
    assert [is_local(path) for path in paths] == [True] * 9 + [False]
    assert not any(is_local(name) for name in ("gpt2", "EleutherAI/pythia-160m", "wikitext", "org/data.v2"))


def test_the_nearest_name_is_suggested(here):
    with pytest.raises(FileNotFoundError, match=r"^--model: no such folder; did you mean runs/model\?$"):
        refuse_absent("runs/modell", "--model")
    with pytest.raises(FileNotFoundError, match=r"^--model: no such folder$"):
        refuse_absent("absent/x/y", "--model")
    refuse_absent("runs/model", "--model")


@pytest.mark.parametrize("name", ["texts/nope", "texts/nope:subset", "texts/nope@main"])
def test_texts(here, name):
    with pytest.raises(FileNotFoundError, match=rf"data\.validation='{name}': no such file or folder$"):
        list(Source(name, argument="data.validation").documents())


def test_every_place_that_takes_a_model(here):
    recipe = Recipe("tiny", Training(1000), model={"checkpoint": "runs/modell"})
    for ask, message in (
        (lambda: load_config("runs/modell"), r"^runs/modell: no such folder; did you mean runs/model\?"),
        (lambda: model_config(recipe, VANILLA), r"^model\.checkpoint='runs/modell': no such folder; did you"),
        (lambda: load_tokenizer("runs/modell"), r"^data\.tokenizer='runs/modell': no such folder; did you"),
        (lambda: open_checkpoint("runs/modell"), r"^runs/modell: no such file or folder"),
        (lambda: open_checkpoint(Path("runs/modell")), r"^runs/modell: no such file or folder"),
    ):
        with pytest.raises((OSError, ValueError), match=message):
            ask()
