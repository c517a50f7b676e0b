"""Stopped at any moment, a run goes on as if it had not been: the losses are those of the run that was left alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fathom.data import prepare
from fathom.train import MethodConfig, TrainResult, load_recipe, train_run
from fathom.train import complete_checkpoints as checkpoints
from fathom.train import trainer as trainer_module
from fathom.train.complete_checkpoints import MARKER
from fathom.train.metrics import read_metrics
from fathom.train.trainer import FathomTrainer

VANILLA = MethodConfig("vanilla")


class StopAt(TrainerCallback):
    """Ctrl-C during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def losses(result: TrainResult) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in result.history if "loss" in line]


def same_losses(a: TrainResult, b: TrainResult) -> bool:
    assert [step for step, _ in losses(a)] == [step for step, _ in losses(b)]
    return all(abs(x - y) <= 1e-6 for (_, x), (_, y) in zip(losses(a), losses(b), strict=True))


@pytest.fixture(scope="session")
def whole(recipe, data, tmp_path_factory) -> TrainResult:
    """The run that nothing disturbs."""
    return train_run(recipe(), VANILLA, seed=1, folder=tmp_path_factory.mktemp("whole"), data=data)


@pytest.mark.parametrize("step", [2, 5, 9])  # before the first checkpoint, between two, after the last
def test_losses_after_an_interrupt(recipe, data, folder, whole, step, capsys) -> None:
    arguments = {"seed": 1, "folder": folder, "data": data}
    with pytest.raises(KeyboardInterrupt):
        train_run(recipe(), VANILLA, **arguments, callbacks=[StopAt(step)])
    assert TrainResult.load(folder) is None
    saved = [checkpoints.step_of(path) for path in checkpoints.checkpoints(folder)]
    capsys.readouterr()
    resumed = train_run(recipe(), VANILLA, **arguments)
    said = [line.split("resumes ")[1] for line in capsys.readouterr().out.splitlines() if "resumes" in line]
    assert said == [f"after step {step}/10" for step in saved] and bool(said) == (step > 2)
    assert same_losses(resumed, whole) and len(losses(whole)) == 10
    assert resumed.interruptions == len(saved) and whole.interruptions == 0
    assert [line["step"] for line in resumed.history if "resumed" in line] == saved
    assert resumed.validation_loss == pytest.approx(whole.validation_loss, abs=1e-6)
    assert resumed.tokens == whole.tokens == 640
    for name, weight in load_file(whole.model / "model.safetensors").items():
        assert torch.allclose(weight, load_file(resumed.model / "model.safetensors")[name], atol=1e-6), name


@pytest.mark.slow  # the stages below are killed in the same way, but for the signal
def test_losses_after_kill_9(text, tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "killed",
                "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
                "data": {**text, "tokenizer": {"bpe": 270}, "block_size": 16, "num_proc": 1},
                "training": {"tokens": 60 * 64, "sequences": 4, "log_every": 1, "save_every": 4},
            }
        )
    )
    run = tmp_path / "runs" / "killed" / "vanilla-seed0"
    command = [sys.executable, "-m", "fathom", "train", str(path), "--output", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (checkpoints.checkpoints(run) and read_metrics(run)[-1]["step"] >= 10):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1].decode()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL and TrainResult.load(run) is None

    recipe = load_recipe(path)
    data = prepare(recipe.data, tmp_path / "runs" / ".data")
    resumed = train_run(recipe, VANILLA, seed=0, folder=run, data=data)
    whole = train_run(recipe, VANILLA, seed=0, folder=tmp_path / "whole", data=data)
    assert same_losses(resumed, whole) and len(losses(whole)) == 60


# where a process dies, in this order: a function of the run, and whether it is called from step 10 on alone
STAGES = {
    "in the first step": (FathomTrainer, "training_step", False),
    "when a checkpoint has its weights": (FathomTrainer, "_save_optimizer_and_scheduler", False),
    "before a checkpoint is marked": (checkpoints, "mark_complete", False),
    "while an incomplete one is deleted": (checkpoints.shutil, "rmtree", False),
    "before older ones are deleted": (checkpoints, "rotate", False),
    "while held-out text is scored": (FathomTrainer, "prediction_step", False),
    "before the model has its name": (trainer_module.os, "replace", True),
    "before the last checkpoint is marked": (checkpoints, "mark_complete", True),
    "before the model has its card": (trainer_module, "describe", False),
    "before the result is written": (TrainResult, "save", False),
}


def test_a_run_that_is_killed_at_every_stage_is_the_run_that_is_not(recipe, data, folder, whole) -> None:
    arguments = {"seed": 1, "folder": folder, "data": data}
    for stage, (owner, name, at_the_end) in STAGES.items():
        child = os.fork()
        if child == 0:
            at, real = [0], getattr(owner, name)

            def die(*given, at=at, real=real, late=at_the_end, **options):
                return real(*given, **options) if late and at[0] < 10 else os._exit(9)

            class Step(TrainerCallback):
                def on_step_end(self, args, state, control, at=at, **kwargs):
                    at[0] = state.global_step

            setattr(owner, name, die)
            train_run(recipe(), VANILLA, **arguments, callbacks=[Step()])
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, f"{stage}: not reached"
        assert TrainResult.load(folder) is None, stage
    result = train_run(recipe(), VANILLA, **arguments)
    assert same_losses(result, whole) and result.interruptions == 4
    assert result.validation_loss == pytest.approx(whole.validation_loss, abs=1e-6)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.folder.iterdir()}
    assert {path.name for path in result.model.iterdir()} == {path.name for path in whole.model.iterdir()}


def test_a_finished_run_is_not_repeated(recipe, data, folder) -> None:
    result = train_run(recipe(), VANILLA, seed=1, folder=folder, data=data)
    assert train_run(recipe(), VANILLA, seed=1, folder=folder, data=data, callbacks=[StopAt(1)]) == result


def test_a_folder_of_another_run_is_refused(recipe, data, folder) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_run(recipe(), VANILLA, seed=1, folder=folder, data=data, callbacks=[StopAt(2)])
    with pytest.raises(ValueError, match=r"holds another run: its training\.weight_decay is 0\.1, now 0\.2; delete"):
        train_run(recipe(weight_decay=0.2), VANILLA, seed=1, folder=folder, data=data)
    # what does not change the weights may change
    train_run(recipe(save_every=5, keep=2, log_every=5), VANILLA, seed=1, folder=folder, data=data)
    said = (folder / "run.json").read_text().replace('"name": "causal_lm"', '"name": "of_my_own"')
    (folder / "run.json").write_text(said)  # a task that is not registered here
    with pytest.raises(ValueError, match=r"holds another run: its task\.name is 'of_my_own', now 'causal_lm'"):
        train_run(recipe(), VANILLA, seed=1, folder=folder, data=data)


def test_a_folder_of_the_same_files_with_another_content_is_refused(recipe, data, folder) -> None:
    before = train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)
    for name in ("train", "validation"):
        rows = getattr(data, name)
        other = dataclasses.replace(data, **{name: rows.select(range(len(rows) - 1, -1, -1))})
        with pytest.raises(ValueError, match=r"holds another run: its data\.content is .*; delete the folder"):
            train_run(recipe(), VANILLA, seed=0, folder=folder, data=other)
    spec = json.loads((folder / "run.json").read_text())
    assert len(spec["data"].pop("content")) == 2
    (folder / "run.json").write_text(json.dumps(spec))  # of a version that did not note it
    assert train_run(recipe(), VANILLA, seed=0, folder=folder, data=data) == before


def test_a_run_that_failed_before_training_does_not_claim_its_folder(recipe, data, folder) -> None:
    class Fail(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train_run(recipe(weight_decay=0.2), VANILLA, seed=1, folder=folder, data=data, callbacks=[Fail()])
    assert '"weight_decay": 0.2' in (folder / "run.json").read_text()
    result = train_run(recipe(), VANILLA, seed=1, folder=folder, data=data)
    assert result.steps == 10 and '"weight_decay": 0.1' in (folder / "run.json").read_text()
    with pytest.raises(ValueError, match="holds another run"):  # now it has trained
        train_run(recipe(weight_decay=0.2), VANILLA, seed=1, folder=folder, data=data)


def test_the_model_is_an_ordinary_checkpoint(whole, data) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole.model)
    assert sum(p.numel() for p in model.parameters()) == whole.parameters
    tokenizer = AutoTokenizer.from_pretrained(whole.model)
    assert tokenizer.get_vocab() == data.tokenizer.get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert sorted(path.name for path in whole.model.iterdir()) == [
        "README.md",
        "config.json",
        "fathom.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_fathom.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


class TestIncompleteCheckpoints:
    @pytest.fixture
    def run(self, recipe, data, folder) -> Path:
        """A run stopped in step 8, with complete checkpoints 3 and 6."""
        with pytest.raises(KeyboardInterrupt):
            train_run(recipe(keep=5), VANILLA, seed=1, folder=folder, data=data, callbacks=[StopAt(8)])
        assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-3", "checkpoint-6"]
        return folder

    @pytest.mark.parametrize(
        "damage",
        [
            lambda checkpoint: (checkpoint / MARKER).unlink(),
            lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
            lambda checkpoint: os.truncate(checkpoint / "model.safetensors", 1000),
            lambda checkpoint: (checkpoint / MARKER).write_text('{"files": {'),
        ],
        ids=["no marker", "a file missing", "a file short", "half a marker"],
    )
    def test_are_ignored(self, recipe, data, run, whole, damage) -> None:
        damage(run / "checkpoint-6")
        assert [path.name for path in checkpoints.checkpoints(run)] == ["checkpoint-3"]
        resumed = train_run(recipe(keep=5), VANILLA, seed=1, folder=run, data=data)
        assert same_losses(resumed, whole)
        names = [path.name for path in checkpoints.checkpoints(run)]
        assert names == ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-10"]

    def test_interrupt_before_the_marker(self, recipe, data, folder, whole, monkeypatch) -> None:
        mark = checkpoints.mark_complete

        def interrupted(checkpoint: Path) -> None:
            if checkpoint.name == "checkpoint-6":
                raise KeyboardInterrupt
            mark(checkpoint)

        monkeypatch.setattr(checkpoints, "mark_complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_run(recipe(), VANILLA, seed=1, folder=folder, data=data)
        assert (folder / "checkpoint-6" / "optimizer.pt").exists()
        assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-3"]  # not rotated away
        monkeypatch.undo()
        assert same_losses(train_run(recipe(), VANILLA, seed=1, folder=folder, data=data), whole)


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_keeps_the_newest_complete_ones(recipe, data, folder, keep) -> None:
    present: list[list[str]] = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            present.append(sorted(path.name for path in folder.glob("checkpoint-*")))

    train_run(recipe(keep=keep), VANILLA, seed=1, folder=folder, data=data, callbacks=[Look()])
    steps = [[f"checkpoint-{step}"] for step in (3, 6, 9, 10)]
    assert present == ([*steps] if keep == 1 else [steps[0], *(sorted(a + b) for a, b in pairwise(steps))])


def test_a_full_disk_leaves_the_complete_checkpoint(recipe, data, folder, whole, monkeypatch) -> None:
    save = torch.save

    def full(value, path, *arguments, **options):
        if "checkpoint-6" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, path, *arguments, **options)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"checkpoint-6 could not be written .*No space left.*checkpoint-3 before it is"):
        train_run(recipe(), VANILLA, seed=1, folder=folder, data=data)
    AutoModelForCausalLM.from_pretrained(folder / "checkpoint-3")
    monkeypatch.undo()
    assert same_losses(train_run(recipe(), VANILLA, seed=1, folder=folder, data=data), whole)
    assert not (folder / "checkpoint-6").exists()
