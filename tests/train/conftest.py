"""A recipe of seconds: a two-layer model on generated prose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom.data import DataConfig, PreparedData, prepare
from fathom.train import Recipe, Training

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "residual_dropout": 0.1}
TRAINING = {"tokens": 10 * 4 * 16, "sequences": 4, "lr": 3e-3, "log_every": 1, "save_every": 3}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two files of made-up sentences. The training text is shorter than a run, so runs pass over it several times."""
    folder, generator = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["the", "a", "sun", "sea", "ship", "snow", "hill", "wind", "sails", "falls", "over", "under", "and", "then"]
    for name, sentences in (("train", 60), ("validation", 20)):
        lines = (" ".join(generator.choices(words, k=8)) + ".\n" for _ in range(sentences))
        (folder / f"{name}.txt").write_text("".join(lines))
    return {"train": str(folder / "train.txt"), "validation": str(folder / "validation.txt")}


@pytest.fixture(scope="session")
def data_config(text: dict[str, str]) -> DataConfig:
    return DataConfig(**text, tokenizer={"bpe": 270}, block_size=16, max_tokens=16 * 16, num_proc=1)


@pytest.fixture(scope="session")
def data(data_config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare(data_config, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def recipe(data_config: DataConfig) -> Callable[..., Recipe]:
    """A recipe of 10 steps; keyword arguments go to `Training`, `model` and `data` to those sections."""

    def make(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **training: Any) -> Recipe:
        return Recipe(
            "tiny",
            Training(**{**TRAINING, **training}),
            model={**MODEL, **(model or {})},
            data=dataclasses.replace(data_config, **(data or {})),
        )

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"
