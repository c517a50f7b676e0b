"""`fathom cost --gpus`: against raw files of measurements, and against counts by hand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fathom import FathomConfig
from fathom.cost import parameter_counts, training_flops_per_token
from fathom.cost.measured import DEVICES, MEASURED, Measured, nearest
from fathom.cost.plan import USABLE, Layout, larger_batches, layer_bytes, layout_of, plan, require_fit
from tiny_checkpoint import run_cli

ROOT = Path(__file__).parents[2]
H200 = DEVICES["h200"]
SIZES = {  # of the models that were measured, by width
    896: {"intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 14, "num_key_value_heads": 14},
    2048: {"intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
    768: {"intermediate_size": 2064, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12},
    1024: {"intermediate_size": 2752, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4},
}
SECTIONS = {
    "vanilla": {}, "depth_attention": {"mixer": "depth_attention"}, "resformer": {"mixer": "resformer"},
    "pondering": {"depth": {"name": "pondering", "steps": 1}}, "pause": {"depth": "pause"},
    "ponderlm2": {"depth": {"name": "ponderlm2", "sweeps": 3, "random_sweeps": False, "checkpoint_passes": True}},
}  # fmt: skip


def config(width: int, method: str = "vanilla", vocab: int = 50304) -> FathomConfig:
    return FathomConfig(hidden_size=width, vocab_size=vocab, init="hf", **SIZES[width], **SECTIONS[method])


SEVERAL = json.loads((ROOT / "docs" / "results" / "several_gpus_h200x2.json").read_text())


def on_gpus(shape: str, wrap: str, checkpointing: bool = False) -> dict:
    """A row of the benchmark of several GPUs, in the words of the others."""
    wanted = (shape, wrap, checkpointing, "default")
    (found,) = [r for r in SEVERAL["rows"] if (r["shape"], r["wrap"], r["checkpointing"], r["kernel"]) == wanted]
    return {**found, "batch": found["sequences"], "median_s": found["step_s"], "vocab": 32768}


def measurement(row: Measured) -> dict:
    if row.source[1] in ("110M", "1.1B"):
        return on_gpus(row.source[1], "alone")
    raw = json.loads((ROOT / "docs" / "results" / row.source[0]).read_text())
    found = [
        r for r in raw["rows"] if r.get("kind") == "training" and r["contestant"] == row.source[1] and "median_s" in r
    ]
    return found[0]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.method}-{row.width}-{row.compile}")
def test_every_measured_figure_is_its_raw_files(row) -> None:
    """And a plan for that very step gives its time and memory back."""
    found = measurement(row)
    made = config(row.width, row.method, found["vocab"])
    tokens = found["batch"] * found["length"]
    flops = tokens * training_flops_per_token(made, found["length"])
    assert flops / found["median_s"] / H200.peak == pytest.approx(row.mfu, abs=0.001)
    layout = Layout(1, "ddp", found["batch"], 1, checkpointing=False, compile=row.compile)
    planned = plan(made, found["length"], layout)
    assert planned.mfu == row.mfu
    assert planned.step_s == pytest.approx(found["median_s"], rel=0.01)
    assert planned.peak_bytes == pytest.approx(found["peak_bytes"], rel=0.01)


def test_the_closed_form_of_activations_foresees_models_that_were_not_fitted() -> None:
    """The factors of compiled vanilla models are near 1: from one the other's peak follows within 15 %."""
    for width, other in ((768, 1024), (1024, 768)):
        row = next(row for row in MEASURED if (row.method, row.width, row.compile) == ("vanilla", width, "model"))
        found = measurement(next(r for r in MEASURED if (r.method, r.width, r.compile) == ("vanilla", other, "model")))
        made = config(other)
        activations = 8 * 2048 * made.num_hidden_layers * layer_bytes(made, sharded=False) * row.activations
        peak = 12 * parameter_counts(made).total + activations + 8 * 50304 * 8192
        assert peak == pytest.approx(found["peak_bytes"], rel=0.15)


def test_bytes_by_hand() -> None:
    """Two GPUs, four sequences of 8 tokens each at a time in three batches; P parameters of a model without extras."""
    made = config(768, vocab=1000)
    total = parameter_counts(made).total
    ddp = plan(made, 8, Layout(2, "ddp", 4, 3, checkpointing=False))
    assert (ddp.weights, ddp.optimizer, ddp.gradients) == (4 * total, 8 * total, 8 * total)
    assert ddp.sent_bytes == 4 * total  # an all-reduce of n bytes on two ranks sends n
    eight = [plan(made, 8, Layout(8, kind, 4, 3, checkpointing=False)).sent_bytes for kind in ("ddp", "fsdp2")]
    assert eight == [2 * 7 / 8 * 4 * total, 3 * 7 / 8 * (2 * 2 + 4) * total]
    fsdp = plan(made, 8, Layout(2, "fsdp2", 4, 3, checkpointing=False))
    assert (fsdp.weights, fsdp.optimizer, fsdp.gradients) == (2 * total, 4 * total, 2 * total)
    assert fsdp.sent_bytes == 3 * (
        2 * total / 2 * 2 + 4 * total / 2
    )  # bf16 twice gathered, fp32 scattered, a half each
    layer = 12 * (4 * 768**2 + 3 * 768 * 2064)
    assert fsdp.gathered == 2 * (2 * 768 * 1000 + 2 * layer / 12)
    assert ddp.tokens_per_step == 2 * 3 * 4 * 8
    one = plan(made, 8, Layout(1, "fsdp2", 4, 3, checkpointing=False))
    assert one.sent_bytes == 0 and one.gathered == 0 and one.step_s == one.compute_s
    looped = FathomConfig(
        **{**made.to_diff_dict(), "depth": {"name": "loop", "passes": 3}}
    )  # fmt: skip
    again = plan(looped, 8, Layout(2, "fsdp2", 4, 3, checkpointing=False))
    assert again.sent_bytes == pytest.approx(3 * (2 * total / 2 * 6 + 4 * total / 2))  # every pass gathers the layers
    assert again.activations / again.layout.sequences == pytest.approx(3 * fsdp.activations / 4)
    masked, block = (
        plan(FathomConfig(**{**made.to_diff_dict(), "diffusion": {"name": name, "mask_token_id": 0, **more}}), 8,
             Layout(2, "ddp", 4, 3, checkpointing=False))
        for name, more in (("masked", {}), ("block", {"block_length": 4}))
    )  # fmt: skip
    assert (block.activations, block.loss) == (2 * masked.activations, masked.loss)  # rows run noisy and clean


@pytest.mark.parametrize(
    ("shape", "wrap", "checkpointing"), [("110M", "ddp", False), ("1.1B", "fsdp2", False), ("1.1B", "alone", True)]
)
def test_steps_on_two_gpus_are_foreseen_within_15_percent(shape, wrap, checkpointing) -> None:
    """From what one GPU measured of the model, and the bandwidth of the collectives alone."""
    found = on_gpus(shape, wrap, checkpointing)
    made = config({"110M": 896, "1.1B": 2048}[shape], vocab=32768)
    gpus = 1 if wrap == "alone" else 2
    layout = Layout(gpus, "fsdp2" if wrap == "fsdp2" else "ddp", found["batch"], 1, checkpointing, compile="layers")
    planned = plan(made, found["length"], layout)
    assert planned.step_s == pytest.approx(found["step_s"], rel=0.15)
    assert planned.peak_bytes == pytest.approx(found["peak_bytes"], rel=0.15)


def test_bandwidths_are_the_raw_files() -> None:
    seen = {row["op"]: row["bus_bytes_per_s"] for row in SEVERAL["collectives"]}
    assert seen["all_reduce"] == pytest.approx(H200.reduce, rel=0.005)
    assert min(seen["all_gather"], seen["reduce_scatter"]) == pytest.approx(H200.gather, rel=0.005)


def test_checkpointing_and_slower_links() -> None:
    made = config(1024)
    kept = plan(made, 2048, Layout(8, "fsdp2", 8, 1, checkpointing=False))
    again = plan(made, 2048, Layout(8, "fsdp2", 8, 1, checkpointing=True))
    assert again.activations < kept.activations / 4
    assert again.compute_s / kept.compute_s == pytest.approx(
        training_flops_per_token(made, 2048, True) / training_flops_per_token(made, 2048)
    )
    near = plan(made, 2048, Layout(16, "ddp", 1, 1, checkpointing=False, per_host=16))
    far = plan(made, 2048, Layout(16, "ddp", 1, 1, checkpointing=False, per_host=8), network=1e9)
    assert far.bandwidth == 1e9 and far.communication_s > near.communication_s
    assert far.step_s == far.compute_s + far.communication_s
    assert any("1 GB/s between hosts: as given" in line for line in far.stands_on)


def test_what_does_not_fit_names_what_does() -> None:
    made = FathomConfig(hidden_size=8192, intermediate_size=22016, num_hidden_layers=40, num_attention_heads=64,
                        num_key_value_heads=8, vocab_size=50304)  # fmt: skip
    layout = Layout(8, "ddp", 8, 1, checkpointing=False)
    with pytest.raises(ValueError, match=r"ddp on 8 × NVIDIA H200: \d+ GB on each, .* what would fit: ") as refused:
        require_fit(made, 2048, layout, H200)
    first = str(refused.value).split("what would fit: ")[1].split(" (")[0]
    changes = {"--strategy fsdp2": {"strategy": "fsdp2"}, "gradient_checkpointing: true": {"checkpointing": True}}
    changed = layout
    for said in first.split(" with "):
        if said.endswith("gradient_accumulation"):
            changed = dataclasses.replace(changed, sequences=int(said.split()[0]))
        elif said.startswith("--gpus"):
            changed = dataclasses.replace(changed, gpus=int(said.split()[1]))
        else:
            changed = dataclasses.replace(changed, **changes[said])
    assert require_fit(made, 2048, changed, H200).peak_bytes <= USABLE * H200.memory


def test_a_recipes_step_is_shared() -> None:
    others = {"checkpointing": False}
    assert layout_of(128, 8, 8, "ddp", **others) == Layout(8, "ddp", 16, 8, **others)
    assert layout_of(128, 8, 512, "fsdp2", **others) == Layout(512, "fsdp2", 1, 2, **others)
    with pytest.raises(ValueError, match="--gpus 3: they cannot share a step of 1024 sequences"):
        layout_of(128, 8, 3, "ddp", **others)
    made = config(1024)
    slow = plan(made, 2048, layout_of(128, 8, 64, "fsdp2", **others), network=5e9)
    better = larger_batches(made, 2048, slow, H200, network=5e9)
    assert better is not None and better.tokens_per_step == slow.tokens_per_step and better.step_s < slow.step_s


def test_the_nearest_measurement_is_taken_and_named() -> None:
    assert nearest("depth_attention", 1500, "model").width == 1024
    assert nearest("mhc", 700, "model") == nearest("vanilla", 700, "model")
    made = FathomConfig(**{**config(768).to_diff_dict(), "residual": "mhc"})
    said = plan(made, 64, Layout(16, "ddp", 1, 1, checkpointing=False)).stands_on
    assert any("no step of mhc was measured" in line for line in said) and any("assumed" in line for line in said)
    moe = FathomConfig(**{**config(768).to_diff_dict(), "feed_forward": "moe"})
    with pytest.raises(ValueError, match="plans for several GPUs cover dense networks only"):
        plan(moe, 64, Layout(2, "ddp", 1, 1, checkpointing=False))


def test_the_page_is_what_its_command_writes() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs/site/plans.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command(monkeypatch, capsys, tmp_path) -> None:
    recipe = {
        "name": "planned", "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "methods": ["vanilla", "pondering"], "data": {"tokenizer": {"bpe": 512}, "block_size": 64},
        "training": {"tokens": 1_000_000, "sequences": 16, "precision": "bf16", "compile": True},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    code, out, _ = run_cli(monkeypatch, capsys, "cost", path, "--gpus", 4)
    assert (
        code == 0 and "4 × NVIDIA H200" in out and "ddp" in out and "docs/results/speed_training_mha_h200.json" in out
    )
    assert "a GPU has 256 tokens at a time; steps were measured with 16,384" in out
    recipe["data"]["block_size"] = 4096  # 4 sequences a GPU
    path.write_text(yaml.safe_dump(recipe))
    assert "tokens at a time" not in run_cli(monkeypatch, capsys, "cost", path, "--gpus", 4)[1]
    recipe["data"]["block_size"] = 64
    path.write_text(yaml.safe_dump(recipe))
    code, out, _ = run_cli(monkeypatch, capsys, "cost", path, "--gpus", 4, "--strategy", "fsdp2", "--json")
    assert code == 0 and json.loads(out)["plans"][1]["layout"]["strategy"] == "fsdp2"
    for arguments, message in (
        (("--gpus", 4, "--device", "h300"), "--device h300: no step was measured on it; there are h200"),
        (("--gpus", 4, "--strategy", "fsdp"), "--strategy fsdp: must be ddp or fsdp2"),
        (("--network", 4), "go with --gpus"),
        (("--gpus", 16, "--network", 0), "--network 0: must be above 0 GB/s"),
    ):
        code, _, err = run_cli(monkeypatch, capsys, "cost", path, *arguments)
        assert code == 2 and message in err


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"precision": "fp32"}, "training.precision='fp32': --gpus plans precision: bf16 alone"),
        ({"optimizer": "adafactor"}, "training.optimizer='adafactor': --gpus plans optimizer: adamw alone"),
        ({"trains": "lora"}, "vanilla trains 'lora': --gpus plans trainings of all weights"),
        ({"gradient_accumulation": 3}, ""),
        ({"tokens": None, "examples": 5000}, ""),
    ],
)
def test_a_plan_is_of_the_training_that_the_recipe_names(monkeypatch, capsys, tmp_path, training, message) -> None:
    recipe = {
        "name": "planned", "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "methods": ["vanilla"], "data": {"tokenizer": {"bpe": 512}, "block_size": 64},
        "training": {"tokens": 1_000_000, "sequences": 16, "precision": "bf16", **training},
    }  # fmt: skip
    path = tmp_path / "a recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    code, out, err = run_cli(monkeypatch, capsys, "cost", path, "--gpus", 3)
    if message:
        assert code == 2 and message in err
    elif "examples" in training:
        code, out, _ = run_cli(monkeypatch, capsys, "cost", path, "--gpus", 4)
        assert code == 0 and "training.examples=5,000: how many tokens they have, the data say" in out
        code, out, _ = run_cli(monkeypatch, capsys, "cost", path, "--gpus", 4, "--json")
        assert code == 0 and json.loads(out)["plans"][0]["hours"] is None
    else:  # 48 sequences a step
        assert code == 0 and "cannot share training.sequences=16; planned with sequences: 12" in out
        assert "gradient_accumulation: 4, the same step" in out
