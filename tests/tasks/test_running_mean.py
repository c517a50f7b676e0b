"""The running mean of the weights: by hand from every step's weights, and over an interruption."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from cases import recipe
from safetensors.torch import load_file
from transformers import TrainerCallback

from fathom.train import load_recipe, train_run
from fathom.train.recipe import Training

STEPS, DECAY = 5, 0.3


class Watching(TrainerCallback):
    """Notes the weights after every update, before the mean can take their place; stops after so many."""

    def __init__(self, stop=STEPS):
        self.seen, self.stop = [], stop

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop < STEPS:
            raise KeyboardInterrupt


@pytest.fixture
def made(tmp_path):
    task = {"name": "masked_diffusion", "draws": 1, "ema": DECAY}
    whole = recipe("masked_diffusion", tmp_path, name="mean", task=task)
    (tmp_path / "mean.json").write_text(json.dumps(whole))
    loaded = load_recipe(tmp_path / "mean.json")
    training = Training(tokens=STEPS * 2 * loaded.data.block_size, sequences=2, lr=1e-2, log_every=1, save_every=2)
    loaded = dataclasses.replace(loaded, training=training)
    return loaded, loaded.task.prepare(loaded.data, tmp_path / "cache")


def weights_of(result):
    return load_file(result.model / "model.safetensors")


def test_the_model_is_the_mean_of_its_steps_and_survives_a_stop(made, tmp_path):
    loaded, data = made
    run = {"recipe": loaded, "method": loaded.methods[0], "seed": 0, "data": data}
    watched = Watching()
    whole = train_run(folder=tmp_path / "whole", callbacks=[watched], **run)
    mean = watched.seen[0]
    for step, now in enumerate(watched.seen[1:], start=2):
        decay = min(DECAY, (1 + step) / (10 + step))
        mean = {name: decay * mean[name] + (1 - decay) * now[name] for name in mean}
    for name, weight in weights_of(whole).items():
        assert torch.allclose(weight, mean[name], atol=1e-6) and not torch.equal(weight, watched.seen[-1][name])

    with pytest.raises(KeyboardInterrupt):
        train_run(folder=tmp_path / "parts", callbacks=[Watching(stop=3)], **run)
    resumed = train_run(folder=tmp_path / "parts", **run)
    assert resumed.interruptions == 1
    for name, weight in weights_of(resumed).items():
        assert torch.allclose(weight, weights_of(whole)[name], atol=1e-7)
