"""A depth method that trains in phases, through whole runs: continued pretraining of AdaPonderLM, gates first."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import TrainerCallback

from fathom import FathomForCausalLM
from fathom.cost import training_flops_per_token
from fathom.train import MethodConfig, model_config, train_run

PONDERING = MethodConfig("pondering", {"depth": {"name": "pondering", "steps": 2}})


def ada(**options):
    section = {"name": "adaponderlm", "steps": 2, "gate_bias": 5.0, **options}
    return MethodConfig("adaponderlm", {"depth": section})


@pytest.fixture(scope="module")
def pondering(recipe, data, tmp_path_factory):
    return train_run(recipe(), PONDERING, seed=0, folder=tmp_path_factory.mktemp("pondering"), data=data).model


class Weights(TrainerCallback):
    """The weights after every step, and what was seen on the way."""

    def __init__(self):
        self.after, self.progress, self.norms = [], [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
        self.progress.append(model.depth.progress)


def test_gates_train_alone_first(recipe, data, pondering, tmp_path):
    start = dataclasses.replace(recipe(), model={"checkpoint": str(pondering)})
    seen = Weights()
    train_run(start, ada(gate_only=0.4), seed=0, folder=tmp_path / "run", data=data, callbacks=[seen])
    before = FathomForCausalLM.from_pretrained(pondering).state_dict()
    assert seen.progress == pytest.approx([i / 10 for i in range(10)])
    for step, weights in enumerate(seen.after):
        for name, weight in weights.items():
            if not name.startswith("depth."):
                assert torch.equal(weight, before[name]) == (step < 4), (step, name)
        moved = [not torch.equal(weights[n], seen.after[step - 1][n]) for n in weights if n.startswith("depth.")]
        assert step == 0 or any(moved)


def test_a_run_stopped_in_the_gates_phase_ends_with_the_same_weights(recipe, data, pondering, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    start = dataclasses.replace(recipe(), model={"checkpoint": str(pondering)})
    method = ada(gate_only=0.5, prune_from=0.2, prune_full=0.8, prune=0.5)
    whole = train_run(start, method, seed=0, folder=tmp_path / "whole", data=data)
    with pytest.raises(KeyboardInterrupt):
        train_run(start, method, seed=0, folder=tmp_path / "run", data=data, callbacks=[Stop()])
    resumed = train_run(start, method, seed=0, folder=tmp_path / "run", data=data)
    a, b = (FathomForCausalLM.from_pretrained(run.model).state_dict() for run in (whole, resumed))
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_another_number_of_passes_is_refused(recipe, data, pondering, tmp_path):
    start = dataclasses.replace(recipe(), model={"checkpoint": str(pondering)})
    with pytest.raises(ValueError, match=r"steps=2, not 3; set steps=2"):
        train_run(start, ada(steps=3), seed=0, folder=tmp_path / "run", data=data)


def test_clipping_counts_the_gates_alone(recipe, data, pondering, tmp_path):
    """A large gradient of the frozen weights must not shrink the gates' update."""

    class Norm(TrainerCallback):
        seen: list[float] = []  # noqa: RUF012

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            own = [p.grad for p in model.depth.parameters()]
            self.seen.append(torch.stack([g.norm() for g in own]).norm().item())

    start = dataclasses.replace(recipe(grad_clip=1e-5), model={"checkpoint": str(pondering)})
    train_run(start, ada(gate_only=1.0), seed=0, folder=tmp_path / "run", data=data, callbacks=[Norm()])
    assert Norm.seen == pytest.approx([1e-5] * 10, rel=1e-2)


def test_training_flops_count_the_steps_that_ran(recipe, data, tmp_path):
    depth = {"name": "adaptive_latent_cot", "steps": 2, "threshold": 0.45, "router_bias": 0.0, "penalty": 0.5}
    method = MethodConfig("cot", {"depth": depth})
    result = train_run(recipe(lr=3e-2), method, seed=0, folder=tmp_path / "run", data=data)
    lines = [line for line in result.history if "mean_steps" in line]
    assert len(lines) == 10 and 1 <= min(line["mean_steps"] for line in lines) < 3
    config = model_config(recipe(), method, data.tokenizer)
    total = 0.0
    for line, before in zip(lines, [0.0, *(line["train_flops"] for line in lines)], strict=False):
        steps = line["mean_steps"]
        low = training_flops_per_token(config, 16, ran=(1.0, min(steps - 1, 1.0), max(steps - 2, 0.0)))
        high = training_flops_per_token(config, 16, ran=(1.0, (steps - 1) / 2, (steps - 1) / 2))
        total += line["train_flops"] - before
        assert min(low, high) * 0.999 <= (line["train_flops"] - before) / 64 <= max(low, high) * 1.001
    assert result.train_flops == pytest.approx(total)
    assert result.train_flops < 640 * training_flops_per_token(config, 16)


def test_measured_flops_go_on_after_a_stop(recipe, data, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    depth = {"name": "adaptive_latent_cot", "steps": 2, "threshold": 0.45, "router_bias": 0.0}
    method = MethodConfig("cot", {"depth": depth})
    whole = train_run(recipe(), method, seed=0, folder=tmp_path / "whole", data=data)
    with pytest.raises(KeyboardInterrupt):
        train_run(recipe(), method, seed=0, folder=tmp_path / "run", data=data, callbacks=[Stop()])
    resumed = train_run(recipe(), method, seed=0, folder=tmp_path / "run", data=data)
    assert resumed.train_flops == pytest.approx(whole.train_flops)
    assert [line.get("mean_steps") for line in resumed.history if "resumed" not in line] == [
        line.get("mean_steps") for line in whole.history
    ]


@pytest.mark.parametrize(
    ("depth", "weight", "high"),
    [
        ({"name": "ponderlm3", "thoughts": 2}, "penalty_weight", 2.0),  # the mean number of thoughts
        ({"name": "adaponderlm", "steps": 2, "gate_bias": 1.0, "prune_from": 0.0, "prune_full": 0.01}, "penalty", 5.0),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_logged_loss_is_without_the_penalty(recipe, data, tmp_path, depth, weight, high, accumulation):
    """At a learning rate of nothing the weights, and so the cross-entropy, are the same with and without a penalty."""
    runs = [
        train_run(
            recipe(gradient_accumulation=accumulation, lr=1e-9, log_every=3),
            MethodConfig("m", {"depth": {**depth, weight: value}}),
            seed=0,
            folder=tmp_path / str(value),
            data=data,
        )
        for value in (0.0, 1.0)
    ]
    plain, penalised = ([line for line in run.history if "loss" in line] for run in runs)
    assert [line["loss"] for line in penalised] == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    assert all(not line.get("penalty") for line in plain)
    assert any(0.01 < abs(line["penalty"]) < high for line in penalised)
    assert runs[1].train_loss == penalised[-1]["loss"]
