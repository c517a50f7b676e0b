"""One run: gradients, data order, weight decay, schedule, measurements, sweep, starting from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch._dynamo.testing
from filelock import FileLock
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost.flops import training_flops_per_token
from fathom.data import PreparedData, prepare
from fathom.feed_forward.dense import Dense
from fathom.models.registry import REGISTRIES
from fathom.tasks import lookup
from fathom.tasks.causal_lm import CausalLM
from fathom.train import MethodConfig, TrainResult, model_config, sweep_lr, train_run
from fathom.train.devices import check_version, why_not_sharded
from fathom.train.metrics import read_metrics
from fathom.train.order import ShuffledBlocks
from fathom.train.trainer import FathomTrainer, compile_layers

VANILLA = MethodConfig("vanilla")
PONDERING = MethodConfig("pondering", {"depth": {"name": "pondering", "steps": 1}})
MOE = {"feed_forward": {"name": "moe", "experts": 2}}


class Record(TrainerCallback):
    """Gradients before each step, and the blocks that went in."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.blocks: list[list[int]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_pre_hook(
            lambda module, arguments, keywords: self.blocks.extend(keywords["input_ids"].tolist()), with_kwargs=True
        )

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})


@pytest.fixture
def ragged(data: PreparedData) -> PreparedData:
    """Blocks of which between 1 and 15 labels count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 270, (16, 16), generator=generator)
    labels = tokens.clone()
    for row, length in enumerate(torch.randint(2, 17, (16,), generator=generator)):
        labels[row, length:] = -100
    blocks = datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()}).with_format("torch")
    targets = int((labels[:, 1:] != -100).sum())
    return dataclasses.replace(data, train=blocks, validation=blocks, validation_targets=targets, validation_bytes=1000)


def test_accumulated_gradients_are_those_of_one_batch(recipe, ragged, tmp_path) -> None:
    recorded = []
    for sequences, accumulation in ((8, 1), (2, 4)):
        record = Record()
        options: Any = {"model": {"residual_dropout": 0.0}, "tokens": 8 * 16, "grad_clip": 0.0}
        options |= {"sequences": sequences, "gradient_accumulation": accumulation}
        result = train_run(
            recipe(**options), VANILLA, seed=0, folder=tmp_path / f"{sequences}", data=ragged, callbacks=[record]
        )
        recorded.append((record.gradients[0], result))
    (one, whole), (four, split) = recorded
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-4, atol=1e-7)
    assert split.train_loss == pytest.approx(whole.train_loss, abs=1e-5)


class Reads(TorchDispatchMode):
    """Counts the values read back from tensors: on a GPU each read waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_steps_between_logs_do_not_wait_for_the_device(recipe, data, tmp_path) -> None:
    counts = []
    for steps in (2, 6):
        options: Any = {"tokens": steps * 8 * 16, "gradient_accumulation": 2, "log_every": steps, "save_every": None}
        prepared = dataclasses.replace(data, validation=None)
        with Reads() as reads:
            train_run(recipe(**options), VANILLA, seed=0, folder=tmp_path / f"{steps}", data=prepared)
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="a CUDA build of torch looks for the driver of a GPU that is only pretended",
)
def test_batches_reach_a_gpu_without_waiting(recipe, data, folder, monkeypatch) -> None:
    class Stop(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            raise InterruptedError(f"non_blocking={train_dataloader._non_blocking}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fathom.train.metrics._reset_peak_memory", lambda: None)
    with pytest.raises(InterruptedError, match="non_blocking=True"):
        train_run(recipe(), VANILLA, seed=0, folder=folder, data=data, callbacks=[Stop()])


@pytest.mark.parametrize(
    ("depth", "task", "reason"),
    [
        ({"name": "adaponderlm", "gate_only": 0.4}, "causal_lm", "gate_only=0.4 under FSDP: .*; use DDP"),
        ({"name": "ponderlm3", "prefill": "sequential"}, "sft", "prefill='sequential' under FSDP: .*; use prefill"),
        ({"name": "ponderlm3", "prefill": "sequential"}, "causal_lm", ""),
        ({"name": "adaptive_latent_cot"}, "sft", ""),
        ({"name": "ponderlm2"}, "sft", ""),
    ],
)
def test_what_is_not_sharded(depth, task, reason, recipe) -> None:
    method = MethodConfig("mine", {"depth": depth})
    given: Any = SimpleNamespace(task=lookup(task), training=recipe().training, trains=lambda method: "all")
    found = why_not_sharded(given, method, FathomConfig(depth=depth))
    assert re.search(reason, found) if reason else not found


def test_the_first_version_of_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fsdp_version=1: .*; set fsdp_version: 2"):
        check_version(SimpleNamespace(fsdp_version=1))
    check_version(SimpleNamespace(fsdp_version=2))


def test_held_out_loss_is_the_mean_over_targets(recipe, ragged, folder) -> None:
    result = train_run(recipe(sequences=6), VANILLA, seed=0, folder=folder, data=ragged)
    model = FathomForCausalLM.from_pretrained(result.model).eval()
    tokens, labels = ragged.validation["input_ids"][:], ragged.validation["labels"][:]
    with torch.no_grad():
        logits = model(torch.as_tensor(tokens)).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.as_tensor(labels)[:, 1:].flatten())
    assert result.validation_loss == pytest.approx(expected.item(), abs=1e-5)
    assert result.scores["bits_per_byte"] == pytest.approx(
        expected.item() * ragged.validation_targets / math.log(2) / 1000
    )


def test_all_methods_read_the_same_blocks_in_every_pass_a_new_order(recipe, data, tmp_path) -> None:
    seen = []
    for method, training in (
        (VANILLA, {}),
        (PONDERING, {}),
        (VANILLA, {"sequences": 2, "gradient_accumulation": 2, "num_workers": 1}),
    ):
        record = Record()
        folder = tmp_path / str(len(seen))
        train_run(recipe(eval_every=100, **training), method, seed=3, folder=folder, data=data, callbacks=[record])
        seen.append(record.blocks[:40])  # 10 steps of 4; the evaluation comes after
    assert seen[0] == seen[1] == seen[2]
    first, second = seen[0][:16], seen[0][16:32]
    assert sorted(first) == sorted(second) == sorted(block["input_ids"].tolist() for block in data.train)
    assert first != second


def test_order_depends_on_the_seed_alone(data) -> None:
    orders = [[ShuffledBlocks(data.train, seed, 100).position(i) for i in range(40)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_stopped(recipe, tmp_path, data_config, workers) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 8:
                raise KeyboardInterrupt

    streaming = recipe(data={"streaming": True, "max_tokens": None}, num_workers=workers)
    lines = Path(data_config.train).read_text().splitlines(keepends=True)
    for n in range(4):  # a folder of documents, fewer blocks than a run
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{n}.txt").write_text("".join(lines[15 * n : 15 * n + 4]))
    config = dataclasses.replace(streaming.data, train=str(tmp_path / "text"))
    streaming = dataclasses.replace(streaming, data=config)
    prepared = prepare(config, tmp_path / "data")
    whole, before, after = Record(), Record(), Record()
    result = train_run(streaming, VANILLA, seed=0, folder=tmp_path / "a", data=prepared, callbacks=[whole])
    with pytest.raises(KeyboardInterrupt):
        train_run(streaming, VANILLA, seed=0, folder=tmp_path / "b", data=prepared, callbacks=[before, Stop()])
    resumed = train_run(streaming, VANILLA, seed=0, folder=tmp_path / "b", data=prepared, callbacks=[after])
    assert before.blocks == whole.blocks[:32]
    assert after.blocks == whole.blocks[24:]  # from checkpoint 6
    assert resumed.train_loss == pytest.approx(result.train_loss, abs=1e-6)


def test_weight_decay_is_for_matrices_that_are_not_tables(recipe, data) -> None:
    config = model_config(recipe(model={"backbone": "gpt2"}), VANILLA, data.tokenizer)
    model = FathomForCausalLM(config)
    decayed = set(FathomTrainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert "lm_head.weight" in decayed and "model.layers.0.mlp.up_proj.weight" in decayed
    for name, weight in model.named_parameters():
        assert (name in decayed) == (weight.ndim == 2 and "embed" not in name), name
    tied = FathomForCausalLM(FathomConfig(**{**config.to_dict(), "tie_word_embeddings": True, "init": "hf"}))
    assert not any("embed" in n or "lm_head" in n for n in FathomTrainer.get_decay_parameter_names(None, tied))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.0, 0.5, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * t / 8)) for t in range(1, 8))]),
        ("linear", [0.0, 0.5, *(1 - t / 8 for t in range(8))]),
        ("constant", [0.0, 0.5, *[1.0] * 8]),
    ],
)
def test_schedules(recipe, data, folder, schedule, expected) -> None:
    rates = learning_rates(
        train_run(recipe(schedule=schedule, lr=1.0, warmup_ratio=0.2), VANILLA, seed=0, folder=folder, data=data)
    )
    assert rates == pytest.approx(expected, abs=1e-9)


def test_wsd(recipe, data, folder) -> None:
    training = {"schedule": "wsd", "lr": 1.0, "warmup_ratio": 0.2, "decay_ratio": 0.4}
    rates = learning_rates(train_run(recipe(**training), VANILLA, seed=0, folder=folder, data=data))
    assert rates[:7] == pytest.approx([0.1, 0.55, 1, 1, 1, 1, 1])
    assert all(a > b for a, b in pairwise(rates[6:])) and 0.1 < rates[-1] < 0.3


def learning_rates(result) -> list[float]:
    """The learning rate of each step. The Trainer reports the rate that the step used."""
    return [line["learning_rate"] for line in result.history if "loss" in line]


def test_measurements(recipe, data, folder) -> None:
    result = train_run(recipe(eval_every=4, log_every=5), PONDERING, seed=0, folder=folder, data=data)
    config = model_config(recipe(), PONDERING, data.tokenizer)
    assert result.train_flops == pytest.approx(640 * training_flops_per_token(config, 16))
    assert [line["step"] for line in result.history if "validation_loss" in line] == [4, 8, 10]
    # with every evaluation and checkpoint a training loss is logged too
    assert [line["step"] for line in result.history if "loss" in line] == [3, 4, 5, 6, 8, 9, 10]
    assert result.tokens_per_second > 0 and result.interruptions == 0
    assert result.parameters == sum(p.numel() for p in FathomForCausalLM(config).parameters())


def test_plain_progress_lines(recipe, data, folder, capsys) -> None:
    train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
    last = out.splitlines()[-1]
    assert last.startswith("vanilla seed 0 lr 0.003  step 10/10  loss ")
    assert "tokens/s" in last and "FLOPs" in last and "00:00:00 left" in last and "validation" in last


@pytest.mark.parametrize(
    "training",
    [
        {"gradient_checkpointing": True},
        {"fused": False},
        {"compile": True},
        {"compile": "layers"},
        {"compile": "graphs"},
    ],
    ids=lambda t: "-".join(str(word) for item in t.items() for word in item),
)
def test_what_only_changes_speed_does_not_change_the_loss(recipe, data, tmp_path, training, monkeypatch) -> None:
    method = VANILLA if training.get("compile") is True else PONDERING
    real, backends = torch.compile, []

    def traced_only(model: Any = None, **options: Any) -> Any:  # inductor takes a minute; the models floor tests it
        backends.append(options["backend"])
        return real(model, backend="eager")

    monkeypatch.setattr(torch, "compile", traced_only)
    results = [
        train_run(
            recipe(model={"residual_dropout": 0.0, "num_hidden_layers": 1}, tokens=2 * 64, **options),
            method,
            seed=0,
            folder=tmp_path / str(len(options)),
            data=dataclasses.replace(data, validation=None),
        )
        for options in ({}, training)
    ]
    assert results[1].train_loss == pytest.approx(results[0].train_loss, rel=1e-5)
    # the layer, and three functions of the vocabulary
    assert backends == ["inductor"] * {True: 1, "layers": 4, "graphs": 4}.get(training.get("compile"), 0)


def test_latent_thoughts_train_compiled(recipe, data, folder, monkeypatch) -> None:
    """Their tokens stop on their own, but not step by step: what is read of a method there they once did not have."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model=None, **options: real(model, backend="eager"))
    options = recipe(model={"num_hidden_layers": 1}, tokens=64, compile="layers")
    data = dataclasses.replace(data, validation=None)
    method = MethodConfig("ponderlm3", {"depth": {"name": "ponderlm3", "thoughts": 1}})
    result = train_run(options, method, seed=0, folder=folder, data=data)
    assert result.steps == 1 and math.isfinite(result.train_loss)


def test_compiled_layers_share_their_graphs(recipe, data) -> None:
    model = FathomForCausalLM(model_config(recipe(model={"num_hidden_layers": 3}), PONDERING, data.tokenizer))
    counter = torch._dynamo.testing.CompileCounter()
    compile_layers(model, counter)
    ids = torch.arange(40).view(2, 20)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    # the first layer may know less of its input's layout than the others; then the mixture and the loss
    assert counter.frame_count <= 4 and len(model.compiled) == 3


def test_bf16_trains_fp32_weights(recipe, data, folder) -> None:
    result = train_run(recipe(precision="bf16"), VANILLA, seed=0, folder=folder, data=data)
    assert result.history[0]["loss"] > result.train_loss
    assert FathomForCausalLM.from_pretrained(result.model).dtype == torch.float32


@pytest.mark.parametrize("optimizer", ["adafactor", "adafactor_scaled"])
def test_adafactors_first_step_is_its_papers(optimizer, recipe, data, folder) -> None:
    """Algorithm 4 of arXiv 1804.04235: g / sqrt(R Cᵀ / mean R) for a matrix, g / |g| for a vector, then clipped; with
    scaling times the RMS of the tensor (algorithm 5)."""
    lr = 1e-2
    made = recipe(
        optimizer=optimizer, lr=lr, schedule="constant", warmup_ratio=0, weight_decay=0, grad_clip=0, tokens=64
    )
    record = Record()
    before: dict[str, torch.Tensor] = {}

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            before.update({name: weight.detach().clone() for name, weight in model.named_parameters()})

    result = train_run(made, VANILLA, seed=0, folder=folder, data=data, lr=lr, callbacks=[record, Begin()])
    after = dict(FathomForCausalLM.from_pretrained(result.model).named_parameters())
    checked = 0
    for name, gradient in record.gradients[0].items():
        g = gradient.double()
        square = g.square() + 1e-30
        second = square if g.ndim == 1 else square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
        update = g / second.sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        size = max(1e-3, float(before[name].double().square().mean().sqrt())) if "scaled" in optimizer else 1.0
        expected = before[name].double() - lr * size * update
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-4, atol=1e-6)
        checked += g.ndim == 2
    assert checked


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest(recipe, data, folder) -> None:
    """Two steps by their papers' equations, the singular values by an SVD in fp64; and a state that is resumed."""
    lr, decay = 1e-2, 0.5
    made = recipe(
        optimizer="muon", lr=lr, schedule="constant", warmup_ratio=0, weight_decay=decay, grad_clip=0, tokens=128,
        save_every=1, eps=1e-3,
    )  # fmt: skip
    record = Record()
    before: dict[str, torch.Tensor] = {}

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            before.update({name: weight.detach().double() for name, weight in model.named_parameters()})

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train_run(made, VANILLA, seed=0, folder=folder, data=data, lr=lr, callbacks=[record, Begin(), Stop()])
    result = train_run(made, VANILLA, seed=0, folder=folder, data=data, lr=lr, callbacks=[record])
    assert (result.steps, result.interruptions, len(record.gradients)) == (2, 1, 2)
    after = dict(FathomForCausalLM.from_pretrained(result.model).named_parameters())
    by_muon = 0
    for name, weight in before.items():
        gradients = [step[name].double() for step in record.gradients]
        is_table = "embed" in name or "lm_head" in name
        if weight.ndim == 2 and not is_table:
            by_muon += 1
            momentum = torch.zeros_like(weight)
            for g in gradients:
                momentum = 0.95 * momentum + 0.05 * g
                u, s, v = torch.linalg.svd(0.05 * g + 0.95 * momentum, full_matrices=False)
                s = s / s.norm()
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                weight = (1 - lr * decay) * weight - lr * 0.2 * max(weight.shape) ** 0.5 * (u * s) @ v
            error = (after[name].detach().double() - weight).norm() / (weight - before[name]).norm()
            assert float(error) < 0.1, name  # the iterations run in bf16; without momentum it is above 0.3
        else:
            first, second = torch.zeros_like(weight), torch.zeros_like(weight)
            for step, g in enumerate(gradients, 1):
                first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g**2
                weight = weight * (1 - lr * decay * (name == "lm_head.weight"))  # not of the table, nor of vectors
                weight = weight - lr * first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-3)
            torch.testing.assert_close(after[name].double(), weight, rtol=1e-4, atol=1e-5)
    assert by_muon == 2 * 7 and len(before) > by_muon


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (MethodConfig("moe", MOE), "has 3 dimensions, and Muon takes"),
        (MethodConfig("moe", MOE, trains="router"), "no matrices of blocks"),
    ],
)
def test_muon_refuses_what_it_does_not_serve(recipe, data, folder, method, message) -> None:
    with pytest.raises(ValueError, match=message):
        train_run(recipe(optimizer="muon"), method, seed=0, folder=folder, data=data)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adafactor_scaled"])
def test_what_needs_whole_matrices_refuses_shards(optimizer, recipe, data, folder, monkeypatch) -> None:
    plain = FathomTrainer.__init__

    def sharded(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(FathomTrainer, "__init__", sharded)
    with pytest.raises(ValueError, match=rf"'{optimizer}' under FSDP: it needs whole matrices; use DDP"):
        train_run(recipe(optimizer=optimizer), VANILLA, seed=0, folder=folder, data=data)


def test_muon_refuses_low_rank(recipe) -> None:
    with pytest.raises(ValueError, match="'muon' with trains='lora'"):
        dataclasses.replace(recipe(optimizer="muon"), methods=(MethodConfig("vanilla", trains="lora"),))


def test_tensorboard(recipe, data, folder) -> None:
    pytest.importorskip("tensorboard")
    train_run(recipe(tensorboard=True), VANILLA, seed=0, folder=folder, data=data)
    assert list((folder / "tensorboard").glob("events.out*"))


class StandIn:
    """What the Trainer's integration asks of the wandb package, noted down."""

    def __init__(self):
        self.run, self.calls, self.logged, self.summary = None, [], [], {}
        self.config = type("Config", (dict,), {"update": lambda self, *_, **__: None})()

    def init(self, **given):
        self.run, given["dir"] = SimpleNamespace(_label=lambda **_: None, summary=self.summary), Path(given["dir"]).name
        self.calls.append(given)

    def finish(self):
        self.run = None
        self.calls.append("finish")

    def log(self, values):
        self.logged.append(values)


def test_report_to_wandb_has_a_run_for_each_run(recipe, data, folder, monkeypatch) -> None:
    from fathom.train import tracking

    package = StandIn()
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", SimpleNamespace(ConfigError=ValueError))
    monkeypatch.setattr(tracking._Wandb.__mro__[1], "__init__", lambda self: None)
    for name, value in {
        "_wandb": package,
        "_initialized": False,
        "_log_model": SimpleNamespace(is_enabled=False),
    }.items():
        monkeypatch.setattr(tracking._Wandb, name, value, raising=False)
    monkeypatch.setattr("fathom.train.trainer.check_trackers", lambda names: None)
    tracked = recipe(report_to=("wandb",), eval_every=5)
    train_run(tracked, VANILLA, seed=0, folder=folder, data=data)
    name = f"vanilla seed 0 lr 0.003 ({folder.name})"
    begun = {"project": "tiny", "name": name, "dir": folder.name}
    assert tracking.place(Path("runs/tiny/vanilla/sweep/lr-0.01"), "tiny") == "vanilla/sweep/lr-0.01"
    assert package.calls == [begun, "finish"]
    losses = [line["train/loss"] for line in package.logged if "train/loss" in line]
    history = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    assert losses == pytest.approx(history, abs=1e-3) and any("eval/loss" in line for line in package.logged)

    class Stop(TrainerCallback):
        def on_step_end(self, *_, **__):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(tracked, VANILLA, seed=1, folder=folder.with_name("other"), data=data, callbacks=[Stop()])
    assert package.calls[-1] == "finish"  # or the next run would go on in this one's


def test_sweep_takes_the_best_and_keeps_all(recipe, data, folder) -> None:
    swept = recipe(lr=(1e-6, 1e-2, 1e4), sweep_fraction=0.5)
    sweep = sweep_lr(swept, VANILLA, seed=0, folder=folder, data=data)
    assert sweep.best == 1e-2 and not sweep.at_edge
    assert [(trial.lr, trial.tokens) for trial in sweep.trials] == [(1e-6, 320), (1e-2, 320), (1e4, 320)]
    assert all((folder / f"lr-{trial.lr:g}" / "metrics.jsonl").exists() for trial in sweep.trials)
    assert sweep_lr(swept, VANILLA, seed=0, folder=folder, data=data) == sweep  # nothing is trained again
    own = dataclasses.replace(VANILLA, lr=5e-3)
    assert sweep_lr(swept, own, seed=0, folder=folder, data=data).best == 5e-3  # a method's own rate: no sweep
    with pytest.raises(ValueError, match="one run needs one learning rate"):
        train_run(swept, VANILLA, seed=0, folder=folder / "run", data=data)
    with pytest.raises(ValueError, match="a sweep needs held-out text"):
        sweep_lr(swept, VANILLA, seed=0, folder=folder, data=dataclasses.replace(data, validation=None))


def test_a_cpus_peak_memory_is_not_said_to_be_the_models(recipe, data, folder) -> None:
    result = train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)
    known = torch.cuda.is_available()
    assert (result.peak_memory_bytes is not None) == known
    assert all(("peak_memory_bytes" in line) == known for line in result.history if "loss" in line)


def test_speed_is_told_with_its_spread_and_without_warming_up(recipe, data, folder) -> None:
    """Metrics as a run leaves them that went on after step 6: of 10 stretches the first and the seventh warm up."""
    train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)
    speeds = [1, 100, 101, 102, 103, 104, 2, 105, 106, 107]
    lines = [line for line in read_metrics(folder) if "loss" in line]
    for line, speed in zip(lines, speeds, strict=True):
        line.update(tokens_per_second=speed, busy=speed / 200)
    at = {name: lines[5][name] for name in ("step", "tokens", "train_flops")}
    lines.insert(6, {**at, "resumed": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").unlink()
    result = train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)  # trains no step
    assert result.tokens_per_second == 103.5 and result.busy == pytest.approx(0.5175)
    assert result.tokens_per_second_interval == pytest.approx([100.7, 106.3])  # between the 1st and 2nd of 8
    assert result.interruptions == 1
    assert TrainResult.load(folder) == result


def test_time_off_the_core_is_noticed(recipe, data, folder) -> None:
    class Sleep(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            time.sleep(2.0 * (state.global_step == 1))

    result = train_run(recipe(tokens=128), VANILLA, seed=0, folder=folder, data=data, callbacks=[Sleep()])
    assert torch.cuda.is_available() or result.busy < 0.5


def test_a_second_process_waits_for_the_sweep_of_the_first(recipe, data, folder) -> None:
    swept = recipe(lr=(1e-3, 1e-2))
    done = sweep_lr(swept, VANILLA, seed=0, folder=folder, data=data)
    found: list[Any] = []
    second = threading.Thread(
        target=lambda: found.append(sweep_lr(swept, VANILLA, seed=0, folder=folder, data=data)), daemon=True
    )
    with FileLock(folder / "lr-0.001.lock"):
        second.start()
        second.join(1.0)
        assert second.is_alive() and not found
    second.join(30.0)
    assert found == [done]


def test_fewer_tokens_than_a_step(recipe, data, folder) -> None:
    with pytest.raises(ValueError, match=r"training\.tokens=63: less than one step of 64 tokens"):
        train_run(recipe(), VANILLA, seed=0, folder=folder, data=data, tokens=63)


def test_a_damaged_checkpoint_to_start_from_is_named(recipe, data, tmp_path) -> None:
    FathomForCausalLM(model_config(recipe(), VANILLA, data.tokenizer)).save_pretrained(tmp_path / "start")
    file = tmp_path / "start" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    further = dataclasses.replace(recipe(), model={"checkpoint": str(file.parent)})
    with pytest.raises(ValueError, match=r"start/model\.safetensors: truncated or corrupt safetensors file"):
        train_run(further, VANILLA, seed=0, folder=tmp_path / "run", data=data, tokens=64)


def test_start_from_a_stock_checkpoint(recipe, data, tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=270, **sizes)).save_pretrained(tmp_path / "stock")
    start = dataclasses.replace(recipe(lr=1e-12), model={"checkpoint": str(tmp_path / "stock")})
    result = train_run(start, PONDERING, seed=0, folder=tmp_path / "run", data=data)
    model = FathomForCausalLM.from_pretrained(result.model)
    assert model.config.depth["name"] == "pondering"
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "stock")
    torch.testing.assert_close(model.lm_head.weight, stock.lm_head.weight)


class Watched(Dense):
    """A dense network that is punished for the size of its output, and says how large it is."""

    losses = ("size",)
    said = "largest"

    def forward(self, x):
        out = super().forward(x)
        return out, {"size": 0.01 * out.square().mean(), self.said: out.detach().abs().amax((1, 2))}


@pytest.fixture
def watched(monkeypatch) -> MethodConfig:
    for name, value in (("name", "watched"), ("registry", "feed_forward")):
        monkeypatch.setattr(Watched, name, value, raising=False)
    monkeypatch.setitem(REGISTRIES["feed_forward"], "watched", Watched)
    return MethodConfig("watched", {"feed_forward": {"name": "watched"}})


@pytest.mark.parametrize("training", [{}, {"gradient_checkpointing": True}, {"precision": "bf16"}], ids=str)
def test_what_methods_say_has_its_mean_in_the_metrics(recipe, data, folder, watched, training) -> None:
    """Over the micro-batches since the last line; losses are not in `loss`."""
    heard: dict[str, list[float]] = {"size": [], "largest": []}

    class Listen(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            def hear(module: Any, inputs: Any, output: Any) -> None:
                if module.training and torch.is_grad_enabled():
                    heard["size"].append(output[1]["size"].item())
                    heard["largest"].append(output[1]["largest"].float().mean().item())

            for layer in model.model.layers:
                layer.mlp.register_forward_hook(hear)

    if "gradient_checkpointing" in training:  # layers run again in the backward pass, and would be heard twice
        listeners: list[TrainerCallback] = []
    else:
        listeners = [Listen()]
    options: Any = {"sequences": 2, "gradient_accumulation": 2, "log_every": 2, "save_every": None, "tokens": 4 * 64}
    result = train_run(recipe(**options, **training), watched, seed=0, folder=folder, data=data, callbacks=listeners)
    lines = [line for line in result.history if "loss" in line]
    assert len(lines) == 2 and all({"size", "largest", "penalty"} <= line.keys() for line in lines)
    for index, line in enumerate(lines):
        assert line["penalty"] == line["size"] > 0
        if listeners:
            some = slice(8 * index, 8 * index + 8)  # 2 layers, 2 micro-batches, 2 steps
            assert line["size"] == pytest.approx(sum(heard["size"][some]) / 4, rel=1e-2 if training else 1e-5)
            assert line["largest"] == pytest.approx(sum(heard["largest"][some]) / 8, rel=1e-2 if training else 1e-5)
    assert lines[-1]["loss"] < math.log(300)


def test_what_methods_say_is_read_at_log_lines_alone(recipe, data, tmp_path, watched) -> None:
    counts = []
    for steps in (2, 6):
        options: Any = {"tokens": steps * 8 * 16, "gradient_accumulation": 2, "log_every": steps, "save_every": None}
        prepared = dataclasses.replace(data, validation=None)
        with Reads() as reads:
            train_run(recipe(**options), watched, seed=0, folder=tmp_path / f"{steps}", data=prepared)
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


def test_what_methods_say_cannot_take_the_name_of_a_metric(recipe, data, folder, watched, monkeypatch) -> None:
    monkeypatch.setattr(Watched, "said", "loss")
    with pytest.raises(ValueError, match=r"a method says 'loss', which is a quantity of metrics\.jsonl"):
        train_run(recipe(), watched, seed=0, folder=folder, data=data)


def test_results_of_runs_before_there_were_tasks_are_read(recipe, data, folder) -> None:
    result = train_run(recipe(), VANILLA, seed=0, folder=folder, data=data)
    for name in ("result.json", "run.json"):
        values = json.loads((folder / name).read_text())
        for key in ("scores", "notes", "task"):
            values.pop(key, None)
        values.get("training", {}).pop("examples", None)
        (folder / name).write_text(json.dumps(values))
    assert TrainResult.load(folder) == result
    assert train_run(recipe(), VANILLA, seed=0, folder=folder, data=data) == result


def test_scores_of_a_diverged_model_are_none_and_its_run_is_saved(recipe, data, folder, monkeypatch) -> None:
    monkeypatch.setattr(CausalLM, "score", lambda *arguments: {"bits_per_byte": float("nan"), "other": float("inf")})
    result = train_run(recipe(), MethodConfig("vanilla"), seed=0, folder=folder, data=data)
    assert result.scores == {"bits_per_byte": None, "other": None}
    assert TrainResult.load(folder) == result
