"""Two processes under torchrun learn what one process learns, and a run goes on with another number of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from fathom.data import prepare
from fathom.train import MethodConfig, Training, TrainResult, load_recipe, sequences_per_process, train_run
from fathom.train.complete_checkpoints import checkpoints
from fathom.train.trainer import FathomTrainer
from sharded_on_cpu import ENVIRONMENT

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

    # what is finished is finished, whoever asks
    assert train_run(loaded, loaded.methods[0], seed=0, folder=two.folder, data=data) == two


# how the run begins and goes on: processes, and what FSDP2 writes where it shares the model among them
OTHERWISE = {
    "two, then one": ((2, None), (1, None)),
    "one, then two": ((1, None), (2, None)),
    "shards of two, then one": ((2, "SHARDED_STATE_DICT"), (1, None)),
    "one, then shards of two": ((1, None), (2, "SHARDED_STATE_DICT")),
    "four shards, then two": ((4, "SHARDED_STATE_DICT"), (2, "SHARDED_STATE_DICT")),
    "gathered by two, then one": ((2, "FULL_STATE_DICT"), (1, None)),
    "shards of two, then gathered": ((2, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT")),
}


def launch(recipe: Path, folder: Path, processes: int, fsdp: str | None, *step: int) -> subprocess.CompletedProcess:
    command = [str(Path(__file__).with_name("processes_child.py")), str(recipe), str(folder), *map(str, step)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if fsdp is not None:
        environment |= {**ENVIRONMENT, "FSDP_STATE_DICT_TYPE": fsdp}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else ()), *command],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHERWISE)
def test_a_killed_run_goes_on_otherwise(text, tmp_path: Path, monkeypatch, way: str) -> None:
    """Killed at step 6 of 10, two after its checkpoint: every later loss is that of a run that nobody stopped."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    path = tmp_path / "recipe.yaml"
    recipe = {
        "name": "moved",
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": True},
        "data": {
            **text,
            "tokenizer": {"bpe": 270},
            "block_size": 16,
            "num_proc": 1,
            "streaming": way == "two, then one",
        },
        "training": {"tokens": 640, "sequences": 4, "log_every": 1, "save_every": 4, "lr": 1.0e-2},
    }
    recipe["data"]["streaming"] = way == "two, then one"
    path.write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(path)
    data = prepare(loaded.data, tmp_path / ".data")
    whole = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "whole", data=data)
    begins, goes_on = OTHERWISE[way]
    killed = launch(path, tmp_path / "moved", *begins, 6)
    assert killed.returncode != 0 and (tmp_path / "moved/checkpoint-4/complete.json").exists(), killed.stderr[-3000:]
    done = launch(path, tmp_path / "moved", *goes_on)
    assert done.returncode == 0, done.stderr[-3000:]
    moved = TrainResult.load(tmp_path / "moved")
    assert moved is not None and moved.interruptions == 1
    losses = [{line["step"]: line["loss"] for line in run.history if "loss" in line} for run in (whole, moved)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert moved.validation_loss == pytest.approx(whole.validation_loss, abs=1e-5)


def test_other_random_numbers_follow_from_seed_step_and_rank(recipe, data, folder, monkeypatch) -> None:
    """A checkpoint holds the random numbers of each process; on another number of them all get new ones."""
    method = MethodConfig("vanilla")
    train_run(recipe(), method, seed=0, folder=folder, data=data)
    [checkpoint] = checkpoints(folder)
    shutil.copy(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")  # as of two
    drawn = []
    for step, rank in ((10, 0), (10, 1), (10, 0), (20, 0)):
        here = SimpleNamespace(
            args=SimpleNamespace(seed=0, world_size=1, process_index=rank), state=SimpleNamespace(global_step=step)
        )
        torch.manual_seed(0)
        FathomTrainer._load_rng_state(here, str(checkpoint))
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[2] and len({*drawn, torch.manual_seed(0) and torch.rand(()).item()}) == 4


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


def test_a_run_of_a_time_when_every_process_had_a_batch_of_its_own(recipe, data, folder) -> None:
    """run.json had no number of processes, and two of them read twice the tokens a step."""
    method = MethodConfig("vanilla")
    train_run(recipe(), method, seed=0, folder=folder, data=data)
    (folder / "result.json").unlink()
    spec = json.loads((folder / "run.json").read_text())
    assert spec.pop("processes") == 1
    (folder / "run.json").write_text(json.dumps({**spec, "steps": 5, "tokens_per_step": 128}))
    with pytest.raises(ValueError, match="holds another run: its steps is 5, now 10"):
        train_run(recipe(), method, seed=0, folder=folder, data=data)
    (folder / "run.json").write_text(json.dumps(spec))
    assert train_run(recipe(), method, seed=0, folder=folder, data=data).steps == 10
