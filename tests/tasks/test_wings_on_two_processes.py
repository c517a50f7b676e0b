"""Every task trains on two processes (DDP over gloo) as on one: they share every batch of the recipe.

Where a task draws noise, masks or dropout, each process draws its own, and losses are near, not equal.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import recipe

from fathom.tasks import tasks
from fathom.train import TrainResult, load_recipe, train_run

TOLERANCE = 1e-4  # of losses: sums over ranks are rounded in another order
DRAWN = {"masked_diffusion": 0.3, "latent_diffusion": 0.5, "contextual_decoder": 0.2, "audiovideo": 0.3}  # of the mean


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> dict[str, Path]:
    """The recipe of every task, trained by two processes; one launch for all."""
    paths: dict[str, Path] = {}
    for task in tasks():
        folder = tmp_path_factory.mktemp(task)
        written = recipe(task, folder)
        written["training"] |= {"log_every": 1}
        paths[task] = folder / "recipe.yaml"
        paths[task].write_text(yaml.safe_dump(written))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("two_processes.py")), *map(str, paths.values())]
    environment: dict[str, Any] = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("task", tasks())
def test_two_processes_learn_what_one_learns(on_two, task, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    path = on_two[task]
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, path.parent / ".data")
    one = train_run(loaded, loaded.methods[0], seed=0, folder=path.parent / "one", data=data)
    two = TrainResult.load(path.parent / "two")
    assert two is not None and (two.steps, two.tokens) == (one.steps, one.tokens)
    losses = [[line["loss"] for line in run.history if "loss" in line] for run in (one, two)]
    assert len(losses[0]) == len(losses[1]) == one.steps
    if task in DRAWN:
        assert statistics.fmean(losses[1]) == pytest.approx(statistics.fmean(losses[0]), rel=DRAWN[task])
    else:
        assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
        assert two.validation_loss == pytest.approx(one.validation_loss, rel=TOLERANCE)
    assert {path.name for path in two.model.iterdir()} == {path.name for path in one.model.iterdir()}
