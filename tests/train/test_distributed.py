"""Two processes under torchrun learn what one process learns from the same batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fathom.data import prepare
from fathom.train import TrainResult, load_recipe, train_run

# tokens that stop on their own: ranks run different numbers of steps, and a penalty is a mean over all ranks' tokens
ADAPTIVE = {
    "name": "adaptive_latent_cot", "steps": 2, "threshold": 0.45, "router_bias": 0.0, "router_per_step": True,
    "penalty": 0.3, "beta": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("depth", [{"name": "vanilla"}, ADAPTIVE], ids=lambda depth: depth["name"])
def test_ddp(text, tmp_path: Path, depth) -> None:
    results = []
    for devices in (2, 1):
        path = tmp_path / f"{devices}.yaml"
        recipe = {
            "name": f"devices-{devices}",
            "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "data": {**text, "tokenizer": {"bpe": 270}, "block_size": 16, "num_proc": 1},
            "methods": [{"name": "method", "depth": depth}],
            "training": {"tokens": 640, "sequences": 4 // devices, "log_every": 1, "save_every": 4},
        }
        path.write_text(yaml.safe_dump(recipe))
        folder = tmp_path / recipe["name"] / "method-seed0"
        if devices == 2:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "fathom", "train", str(path), "--output", str(tmp_path)]
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
    assert (two.steps, two.tokens) == (one.steps, one.tokens) == (10, 640)
    # measured on rank 0's tokens where these differ
    assert two.train_flops == pytest.approx(one.train_flops, rel=0.0 if depth["name"] == "vanilla" else 0.3)
    assert two.validation_loss == pytest.approx(one.validation_loss, abs=1e-5)
    for a, b in zip(two.history, one.history, strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=1e-5)
    assert {path.name for path in (two.folder / "checkpoint-10").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
