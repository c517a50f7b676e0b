"""Checkpoints that earlier code wrote load as the functions they were, and are saved under the names they had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fathom  # noqa: F401  (registers the Auto classes)
from old_files.make import decoded
from tiny import assert_close

FOLDER = Path(__file__).parent / "old_files"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def test_every_checkpoint_is_here():
    assert len(NAMES) == 30


@pytest.mark.parametrize("name", NAMES)
def test_an_old_checkpoint_is_the_function_it_was(name, tmp_path):
    expected = load_file(FOLDER / name / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name).eval()
    assert_close(decoded(model, expected["ids"]), expected["logits"])

    model.save_pretrained(tmp_path)
    with (
        safe_open(FOLDER / name / "model.safetensors", "pt") as old,
        safe_open(tmp_path / "model.safetensors", "pt") as new,
    ):
        assert sorted(new.keys()) == sorted(old.keys())
    old_config, new_config = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER / name, tmp_path))
    assert set(old_config) <= set(new_config)
