"""Every task trains on two processes (DDP and FSDP2 over gloo) as on one: they share every batch of the recipe.

Where a task draws noise, masks or dropout, each process draws its own, and losses are near those of one process, not
equal. Under FSDP2 each draws what it draws under DDP: there they are equal.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import recipe
from safetensors.torch import load_file

from fathom.tasks import tasks
from fathom.train import TrainResult, load_recipe, train_run
from sharded_on_cpu import ENVIRONMENT

TOLERANCE = 1e-4  # of losses: sums over ranks are rounded in another order
# methods of depth whose tokens, or held-out texts, take different numbers of steps on the two
STEPS = {
    "adaptive_latent_cot": {"steps": 2, "threshold": 0.45, "router_bias": 0.0, "router_per_step": True},
    "adaponderlm": {"steps": 2, "threshold": 0.5},
    "ponderlm2": {"random_sweeps": False},
    "ponderlm3": {"random_sweeps": False},
}
DRAWN = {  # of the mean
    "masked_diffusion": 0.3, "latent_diffusion": 0.5, "contextual_decoder": 0.2, "audiovideo": 0.3,
    "adaponderlm": 0.01,  # draws nothing: its penalty is of the smallest gates of each process
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for task in (*tasks(), *STEPS):
        folder = tmp_path_factory.mktemp(task)
        written = recipe("causal_lm" if task in STEPS else task, folder)
        written["training"] |= {"log_every": 1}
        if task in STEPS:
            written["methods"] = [{"name": task, "depth": {"name": task, **STEPS[task]}}]
        paths[task] = folder / "recipe.yaml"
        paths[task].write_text(yaml.safe_dump(written))
    return paths


SHARDED = {**ENVIRONMENT, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def on_two(script: str, given: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A script that runs on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).parent / script), *given]
    environment: dict[str, Any] = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", **more}
    return subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)


def train_on_two(folder: str, paths: list[Path], more: dict[str, str]) -> None:
    """One launch for all."""
    done = on_two("two_processes.py", [folder, *map(str, paths)], more)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ddp(recipes) -> str:
    train_on_two("ddp", list(recipes.values()), {})
    return "ddp"


@pytest.fixture(scope="module")
def fsdp2(recipes) -> str:
    train_on_two("fsdp2", list(recipes.values()), SHARDED)
    return "fsdp2"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("task", [*tasks(), *STEPS])
def test_two_processes_learn_what_one_learns(recipes, way, task, request, monkeypatch) -> None:
    folder = request.getfixturevalue(way)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    path = recipes[task]
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, path.parent / ".data")
    one = train_run(loaded, loaded.methods[0], seed=0, folder=path.parent / "one", data=data)
    two = TrainResult.load(path.parent / folder)
    assert two is not None and (two.steps, two.tokens) == (one.steps, one.tokens)
    losses = [[line["loss"] for line in run.history if "loss" in line] for run in (one, two)]
    assert len(losses[0]) == len(losses[1]) == one.steps
    if task in DRAWN:
        assert statistics.fmean(losses[1]) == pytest.approx(statistics.fmean(losses[0]), rel=DRAWN[task])
        if way == "fsdp2":
            other = TrainResult.load(path.parent / request.getfixturevalue("ddp"))
            assert other is not None
            assert losses[1] == pytest.approx([line["loss"] for line in other.history if "loss" in line], rel=TOLERANCE)
            assert two.validation_loss == pytest.approx(other.validation_loss, rel=TOLERANCE)
    else:
        assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
        assert two.validation_loss == pytest.approx(one.validation_loss, rel=TOLERANCE)
    assert {path.name for path in two.model.iterdir()} == {path.name for path in one.model.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [SHARDED, {}], ids=["fsdp2", "ddp"])
def test_steps_of_others_change_nothing(environment) -> None:
    done = on_two("sharded_depth.py", [], environment)
    assert done.stdout.count("10 equal") == 2, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["latent_diffusion", "contextual_decoder", "adaptive_latent_cot"])
def test_a_killed_run_ends_as_another(recipes, fsdp2, task, tmp_path) -> None:
    """Under FSDP2, killed at step 4, one after its checkpoint: weights, their running mean and noise are those of a run
    that nobody stopped, bit by bit."""
    given = [str(recipes[task]), str(tmp_path / "run")]
    killed = on_two("../train/processes_child.py", [*given, "4"], SHARDED)
    assert killed.returncode != 0 and (tmp_path / "run/checkpoint-3/complete.json").exists(), killed.stderr[-4000:]
    assert not (tmp_path / "run" / "result.json").exists()
    done = on_two("../train/processes_child.py", given, SHARDED)
    assert done.returncode == 0, done.stderr[-4000:]
    resumed, whole = TrainResult.load(tmp_path / "run"), TrainResult.load(recipes[task].parent / fsdp2)
    assert resumed is not None and whole is not None and resumed.interruptions == 1
    losses = [{line["step"]: line["loss"] for line in run.history if "loss" in line} for run in (resumed, whole)]
    assert losses[0] == losses[1] and resumed.scores == whole.scores
    for path in whole.model.rglob("*.safetensors"):
        others = load_file(resumed.model / path.relative_to(whole.model))
        assert all(torch.equal(weight, others[name]) for name, weight in load_file(path).items()), path.name
