"""Two processes under torchrun learn what one process learns from the same batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fathom.data import prepare
from fathom.train import TrainResult, load_recipe, train_run


def test_ddp(text, tmp_path: Path) -> None:
    results = []
    for devices in (2, 1):
        path = tmp_path / f"{devices}.yaml"
        recipe = {
            "name": f"devices-{devices}",
            "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "data": {**text, "tokenizer": {"bpe": 270}, "block_size": 16, "num_proc": 1},
            "training": {"tokens": 640, "sequences": 4 // devices, "log_every": 1, "save_every": 4},
        }
        path.write_text(yaml.safe_dump(recipe))
        folder = tmp_path / recipe["name"] / "vanilla-seed0"
        if devices == 2:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "fathom.cli", "train", str(path), "--output", str(tmp_path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("Model: ") == 1  # only rank 0 speaks
            result = TrainResult.load(folder)
        else:
            loaded = load_recipe(path)
            data = prepare(loaded.data, tmp_path / ".data")
            result = train_run(loaded, loaded.methods[0], seed=0, folder=folder, data=data)
        results.append(result)
    two, one = results
    assert (
        (two.steps, two.tokens, two.train_flops)
        == (one.steps, one.tokens, one.train_flops)
        == (10, 640, one.train_flops)
    )
    assert two.validation_loss == pytest.approx(one.validation_loss, abs=1e-5)
    for a, b in zip(two.history, one.history, strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=1e-5)
    assert {path.name for path in (two.folder / "checkpoint-10").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
