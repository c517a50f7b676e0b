"""`fathom cost`."""

import json

import pytest
import torch

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token, training_flops_per_token
from tiny_checkpoint import run_cli, save_fathom, save_stock

RECIPE = """
name: example
model: {backbone: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
methods: [vanilla, {name: twice, depth: {name: loop, passes: 2}}]
data: {train: embedded, tokenizer: {bpe: 512}, block_size: 128}
training: {tokens: 1000000, precision: bf16}
"""


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "cost", *arguments)


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", 8, "--sequence-length", 64), "--sequence-length 64: --gpus plans the recipe's training"),
        (("--gpus", 8, "--hours", 2), "--hours 2: --gpus plans"),
        (("--gpus", 8, "--prompt", 9), "--prompt 9: --gpus plans"),
        (("--prompt", 9, "--hours", 2), "--hours 2: --prompt prices an answer"),
        (("--gpus", 8, "--new-tokens", 9), "--new-tokens, --steps and --block-length go with --prompt"),
        (("--gpus", 8, "--pue", 1.2), "go with --hours"),
    ],
)
def test_options_that_would_not_be_read_are_refused(run, recipe, options, said):
    code, _, err = run(recipe, *options)
    assert code == 2 and said in err


def test_recipe_has_a_row_a_method(run, recipe):
    code, out, _ = run(recipe, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["sequence_length"], found["kv_dtype"]) == (128, "bfloat16")
    vanilla, twice = found["models"]
    assert (vanilla["name"], twice["name"]) == ("vanilla", "twice")
    config = FathomConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128
    )
    assert vanilla["parameters"] == sum(p.numel() for p in FathomForCausalLM(config).parameters())
    assert vanilla["forward_flops_per_token"]["total"] == forward_flops_per_token(config, 128).total
    assert vanilla["training_flops_per_token"] == training_flops_per_token(config, 128)
    assert vanilla["kv_bytes_per_token"] == 2 * 2 * 64 * 2
    assert twice["forward_flops_per_token"]["linear"] == 2 * vanilla["forward_flops_per_token"]["linear"]
    assert twice["kv_bytes_per_token"] == 2 * vanilla["kv_bytes_per_token"]


def test_sequence_length_changes_attention_alone(run, recipe):
    short, long = (json.loads(run(recipe, "--sequence-length", n, "--json")[1])["models"][0] for n in (1, 99))
    assert long["forward_flops_per_token"]["attention"] == 50 * short["forward_flops_per_token"]["attention"]
    assert long["forward_flops_per_token"]["linear"] == short["forward_flops_per_token"]["linear"]


def test_recipes_gradient_checkpointing_costs_training(run, recipe):
    plain = json.loads(run(recipe, "--json")[1])["models"][0]
    recipe.write_text(RECIPE.replace("precision: bf16", "gradient_checkpointing: true"))
    found = json.loads(run(recipe, "--json")[1])
    assert found["gradient_checkpointing"] and found["kv_dtype"] == "float32"
    assert found["models"][0]["training_flops_per_token"] > plain["training_flops_per_token"]


def test_table(run, recipe):
    lines = run(recipe)[1].splitlines()
    assert lines[1].startswith("vanilla") and lines[2].startswith("twice")
    assert len(lines[0]) == len(lines[1]) == len(lines[2])
    assert lines[4].startswith("The vocabulary has the 512 tokens of data.tokenizer")
    assert "sequence length 128" in lines[5] and "bfloat16" in lines[-1]
    assert "mixing" not in lines[0]


def test_mixing_columns_where_layers_are_mixed(run, recipe):
    recipe.write_text(RECIPE.replace("methods: [vanilla,", "methods: [resformer,"))
    out = run(recipe)[1]
    assert "mixing bytes" in out.splitlines()[0] and out.splitlines()[-1].startswith("mixing:")


def test_says_that_no_token_is_taken_to_stop_early(run, recipe):
    assert "all its steps" not in run(recipe)[1]
    recipe.write_text(RECIPE.replace("name: loop, passes: 2", "name: adaponderlm"))
    assert "every token ran all its steps: twice." in run(recipe)[1]


@pytest.mark.parametrize("save", [save_fathom, save_stock], ids=["fathom", "stock"])
def test_checkpoint_needs_its_config_only(run, tmp_path, save):
    from transformers import AutoModelForCausalLM

    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(save(tmp_path)).parameters())
    (tmp_path / "model.safetensors").unlink()
    found = json.loads(run(tmp_path, "--json")[1])
    assert found["models"][0]["parameters"] == parameters
    assert (found["sequence_length"], found["kv_dtype"]) == (64, str(torch.float32).removeprefix("torch."))


def test_refusals(run, tmp_path, recipe):
    code, _, err = run(tmp_path / "absent")
    assert code == 2 and err.endswith("absent: no such folder\n")
    code, _, err = run(tmp_path / "absent.yaml")
    assert code == 2 and err.endswith("absent.yaml: No such file or directory\n")
    recipe.write_text(RECIPE.replace("hidden_size", "hiden_size"))
    code, _, err = run(recipe)
    assert code == 2 and "hiden_size" in err and "did you mean 'hidden_size'" in err
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    code, _, err = run(tmp_path)
    assert code == 2 and "family 'mamba' is not supported; supported families: llama, qwen3, gpt_neox, gpt2" in err
    code, _, err = run(recipe, "--sequence-length", 0)
    assert code == 2 and "--sequence-length" in err


def test_sweeps_whose_number_nobody_knows_are_named(run, tmp_path):
    file, wanted = tmp_path / "recipe.yaml", "Texts that are read at once: ponderlm2, by Jacobi sweeps"
    for method, said in (("ponderlm2", True), ("{name: ponderlm2, depth: {name: ponderlm2, sweeps: 3}}", False)):
        file.write_text(RECIPE.replace("[vanilla, ", f"[vanilla, {method}, "))
        assert (wanted in run(file)[1]) == said


def test_help_has_an_example(run):
    assert "fathom cost recipes/demo.yaml" in run("--help")[1]


@pytest.mark.parametrize(
    ("changed", "strategy", "said"),
    [
        ({"depth": {"name": "adaponderlm", "gate_only": 0.2}}, "fsdp2", "--strategy fsdp2: twice: adaponderlm option"),
        ({"depth": {"name": "adaponderlm", "gate_only": 0.2}}, "ddp", ""),
        ({"depth": {"name": "adaponderlm", "gate_only": 0.2}}, None, ""),
        ({"depth": {"name": "adaponderlm"}}, "fsdp2", ""),
    ],
)
def test_what_train_refuses_on_several_devices_is_not_planned(run, recipe, changed, strategy, said):
    text = RECIPE.replace("{name: twice, depth: {name: loop, passes: 2}}", json.dumps({"name": "twice", **changed}))
    recipe.write_text(text)
    code, out, err = run(recipe, "--gpus", 2, *(["--strategy", strategy] if strategy else []))
    assert (code == 2 and said in err) if said else (code == 0 and (strategy or "ddp") in out)
    recipe.write_text(text.replace("precision: bf16", "precision: bf16, compile: graphs"))
    code, _, err = run(recipe, "--gpus", 2)
    assert code == 2 and "training.compile='graphs' on 2 devices" in err
