"""Two processes under torchrun learn what one process learns: they share every batch of the recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fathom.data import prepare
from fathom.train import MethodConfig, Training, TrainResult, load_recipe, sequences_per_process, train_run

# tokens that stop on their own: ranks run different numbers of steps, and a penalty is a mean over all ranks' tokens
ADAPTIVE = {
    "name": "adaptive_latent_cot", "steps": 2, "threshold": 0.45, "router_bias": 0.0, "router_per_step": True,
    "penalty": 0.3, "beta": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "accumulation", "streaming", "optimizer"),
    [
        ({"name": "vanilla"}, 2, True, "adamw"),
        pytest.param(ADAPTIVE, 1, False, "adamw", marks=pytest.mark.slow),
        pytest.param({"name": "vanilla"}, 1, False, "muon", marks=pytest.mark.slow),
    ],
    ids=["vanilla", "adaptive_latent_cot", "muon"],
)
def test_one_recipe_learns_the_same(text, tmp_path: Path, monkeypatch, depth, accumulation, streaming, optimizer):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # both: NCCL takes no two processes on one GPU
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # else the second process asks for a second GPU's random state
    path = tmp_path / "recipe.yaml"
    recipe = {
        "name": "shared",
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {**text, "tokenizer": {"bpe": 270}, "block_size": 16, "num_proc": 1, "streaming": streaming},
        "methods": [{"name": "method", "depth": depth}],
        "training": {
            "tokens": 640, "sequences": 4 // accumulation, "gradient_accumulation": accumulation,
            "log_every": 1, "save_every": 4, "optimizer": optimizer,
        },
    }  # fmt: skip
    path.write_text(yaml.safe_dump(recipe))
    results = []
    for processes in (2, 1):
        folder = tmp_path / str(processes) / "shared" / "method-seed0"
        if processes == 2:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "fathom", "train", str(path), "--output", str(tmp_path / "2")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=no_gpu)
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

    # what is finished is finished; what goes on must have as many processes as before
    arguments = {"seed": 0, "folder": two.folder, "data": data}
    assert train_run(loaded, loaded.methods[0], **arguments) == two
    (two.folder / "result.json").unlink()
    with pytest.raises(ValueError, match=r"was begun by 2 processes and cannot go on with 1: start 2 again \(torchrun"):
        train_run(loaded, loaded.methods[0], **arguments)


@pytest.mark.parametrize(
    ("sequences", "accumulation", "remedy"),
    [
        (8, 1, "start 1 or 2, or make training.sequences a multiple of 3"),
        (4, 6, "sequences: 12 with gradient_accumulation: 2 make the same step on 3; or start 1 or 2"),
    ],
)
def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch, sequences, accumulation, remedy) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sequences_per_process(Training(640, sequences=12)) == 4
    with pytest.raises(ValueError) as refused:
        sequences_per_process(Training(640, sequences=sequences, gradient_accumulation=accumulation))
    assert f"training.sequences={sequences}: 3 processes cannot share" in str(refused.value)
    assert remedy in str(refused.value)


def test_a_run_begun_by_another_number_of_processes_is_told_from_older_files(recipe, data, folder) -> None:
    """run.json had no number of processes when each of them had a batch of the recipe's size."""
    method = MethodConfig("vanilla")
    train_run(recipe(), method, seed=0, folder=folder, data=data)
    (folder / "result.json").unlink()
    spec = json.loads((folder / "run.json").read_text())
    assert spec.pop("processes") == 1
    (folder / "run.json").write_text(json.dumps({**spec, "steps": 5, "tokens_per_step": 128}))
    with pytest.raises(ValueError, match="begun by 2 processes and cannot go on with 1"):
        train_run(recipe(), method, seed=0, folder=folder, data=data)
    (folder / "run.json").write_text(json.dumps(spec))
    assert train_run(recipe(), method, seed=0, folder=folder, data=data).steps == 10
