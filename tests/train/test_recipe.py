"""Recipes: what a YAML file becomes, and the message for every kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom import FathomForCausalLM
from fathom.train import Budget, MethodConfig, Recipe, Training, load_recipe, model_config

MINIMAL = "name: tiny\ntraining: {tokens: 1000}\n"


def load(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path)


def test_the_docstring_example(tmp_path: Path) -> None:
    import fathom.train.recipe

    recipe = load(tmp_path, fathom.train.recipe.__doc__.split("\n\n", 1)[1])
    assert recipe.methods == (
        MethodConfig("vanilla", {"depth": {"name": "vanilla"}}),
        MethodConfig("loop-3", {"depth": {"name": "loop", "passes": 3}}),
        MethodConfig("pondering", {"depth": {"name": "pondering"}}, lr=2e-3),
    )
    assert recipe.training == Training(tokens=2_000_000, sequences=16, lr=(1e-3, 2e-3))  # 2e6 and 1e-3 are text to YAML
    assert recipe.data.tokenizer == {"bpe": 2048} and recipe.data.block_size == 256
    assert recipe.seeds == (0, 1, 2)
    assert recipe.budgets == (Budget("tokens"), Budget("train_flops", 1e15))
    config = model_config(recipe, recipe.method("loop-3"))
    assert (config.vocab_size, config.max_position_embeddings, config.passes, config.init) == (2048, 256, 3, "scaled")


def test_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe == Recipe("tiny", Training(tokens=1000))
    assert model_config(recipe, recipe.methods[0]).is_vanilla


def test_special_tokens_are_the_tokenizers(recipe, data) -> None:
    config = model_config(recipe(), MethodConfig("vanilla"), data.tokenizer)
    assert config.eos_token_id == data.tokenizer.eos_token_id
    assert config.vocab_size == len(data.tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {tokens: 1000}", "name is missing"),
        ("name: tiny\ntraining: {}", "training.tokens is missing"),
        (MINIMAL + "trainnig: {}", r"unknown key trainnig \(did you mean 'training'\?\); known: name, training, model"),
        ("name: tiny\ntraining: {tokens: 1, wieght_decay: 0}", r"unknown key training.wieght_decay .*'weight_decay'"),
        (MINIMAL + "data: {blocksize: 64}", r"unknown key data.blocksize \(did you mean 'block_size'\?\)"),
        (MINIMAL + "model: {hiden_size: 64}", r"unknown key model.hiden_size \(did you mean 'hidden_size'\?\)"),
        (
            MINIMAL + "methods: [{name: loop, depht: loop}]",
            r"unknown key methods\[0\].depht \(did you mean 'depth'\?\)",
        ),
        (MINIMAL + "methods: [lop]", r"methods\[0\]='lop': no method has this name \(did you mean 'loop'\?\)"),
        (MINIMAL + "methods: [loop, loop]", r"methods=\['loop'\]: must not be given twice"),
        (MINIMAL + "methods: []", r"methods=\[\]: must not be empty"),
        (MINIMAL + "budgets: [train_flop]", r"budgets\[0\]='train_flop': .*\(did you mean 'train_flops'\?\)"),
        (MINIMAL + "budgets: [{inference_flops: 1}]", "inference_flops takes no amount"),
        (MINIMAL + "budgets: [tokens, {tokens: 1e6}]", r"budgets=\['tokens'\]: must not be given twice"),
        (MINIMAL + "seeds: 3", "seeds=3: must be a list"),
        (MINIMAL + "seeds: [0, 1.5]", r"seeds\[1\]=1.5: must be a whole number"),
        (MINIMAL + "seeds: [-1]", r"seeds=\[-1\]: must be between 0 and 2\*\*32 - 1"),
        (MINIMAL + "methods: [{name: loop, seeds: [1, 1]}]", r"methods.loop.seeds=\[1, 1\]: must be .* all distinct"),
        ("name: tiny\ntraining: {tokens: true}", "training.tokens=True: must be a whole number"),
        ("name: a/b\ntraining: {tokens: 1}", "name='a/b': must be letters"),
        ("name: tiny\ntraining: {tokens: -5}", "training.tokens=-5: must be at least 1"),
        ("name: tiny\ntraining: {tokens: lots}", "training.tokens='lots': must be a whole number"),
        ("name: tiny\ntraining: {tokens: 1, lr: fast}", "training.lr='fast': must be a number"),
        ("name: tiny\ntraining: {tokens: 1, lr: 0}", "training.lr=0.0: must be positive"),
        ("name: tiny\ntraining: {tokens: 1, lr: []}", r"training.lr=\(\): must be positive"),
        ("name: tiny\ntraining: {tokens: 1, lr: [1, x]}", r"training.lr\[1\]='x': must be a number"),
        ("name: tiny\ntraining: {tokens: 1, compile: 1}", "training.compile=1: must be true or false"),
        ("name: tiny\ntraining: {tokens: 1, precision: fp8}", "training.precision='fp8': use 'fp32' or 'bf16'"),
        ("name: tiny\ntraining: {tokens: 1, warmup_ratio: 2}", "training.warmup_ratio=2.0: must be between 0 and 1"),
        ("name: tiny\ntraining: {tokens: 1, betas: [0.9]}", "training.betas=.*must be a list of 2"),
        ("name: tiny\ntraining: {tokens: 1, decay_ratio: 0.1}", "training.decay_ratio=0.1: schedule='cosine' has no"),
        (
            "name: tiny\ntraining: {tokens: 1, schedule: constant, min_lr_ratio: 0}",
            "training.min_lr_ratio=0.0: schedule='constant' ends at the peak",
        ),
        (
            "name: tiny\ntraining: {tokens: 1, optimizer: adafactor, betas: [0.9, 0.9]}",
            r"training.betas=\(0.9, 0.9\): optimizer='adafactor' reads none",
        ),
        (
            "name: tiny\ntraining: {tokens: 1, optimizer: adafactor_scaled, eps: 1e-6}",
            "training.eps=1e-06: optimizer='ad",
        ),
        ("name: tiny\ntraining: {tokens: 1, lora: {rank: 4}}", "training.lora: nothing trains 'lora'"),
        ("name: tiny\ntraining: {tokens: 1, eval_every: 5}\ndata: {validation: null}", "eval_every=5: data.validation"),
        (MINIMAL + "data: {shuffle_buffer: 10}", "data.shuffle_buffer=10: blocks on disk are shuffled as a whole"),
        ("name: tiny\ntraining: {tokens: 1, keep: 0}", "training.keep=0: must be at least 1"),
        ("name: tiny\ntraining: 3", "training is 3: needs a mapping"),
        ("- 1", r"the recipe is \[1\]: needs a mapping"),
        ("name: tiny\nname: large\ntraining: {tokens: 1}", "key 'name' is given twice.*line 2"),
        ("name: [", "not valid YAML"),
        (
            "name: tiny\ntraining: {tokens: 1e5, lr: [1, 2], sweep_fraction: 0.01}",
            r"training.sweep_fraction=0.01: a trial .* would have 1000 tokens, less than one step of 4096 .*; use at "
            "least 0.041, or give one learning rate",
        ),
        (
            "name: tiny\ntraining: {tokens: 1000}\nmethods: [{name: loop, lr: [1, 2]}]",
            "training.sweep_fraction=0.25: .* 250 tokens, .*; use more training.tokens, or give one",
        ),
        (MINIMAL + "model: {checkpoint: x, hidden_size: 64}", "model.hidden_size cannot be given: model.checkpoint"),
        (MINIMAL + "model: {checkpoint: x}\ndata: {tokenizer: {bpe: 300}}", "data.tokenizer={'bpe': 300}: must be"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)recipe.yaml: .*{message}"):
        load(tmp_path, text)


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.yaml: 'utf-8' codec can't decode byte 0xe9 in position 9"):
        load_recipe(tmp_path / "latin.yaml")


def test_options_of_methods_are_checked_by_the_config(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL + "methods: [{name: deep, depth: {name: loop, passes: 0}}]")
    with pytest.raises(ValueError, match="passes=0"):
        model_config(recipe, recipe.methods[0])


def test_numbers_of_the_model_are_read_like_all_others(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL + "model: {norm_eps: 1e-5}\nmethods: [{name: vanilla, hidden_size: wide}]")
    assert model_config(recipe, MethodConfig("vanilla")).norm_eps == 1e-5  # text to YAML
    with pytest.raises(ValueError, match=r"methods\.vanilla\.hidden_size='wide': must be a whole number"):
        model_config(recipe, recipe.methods[0])


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    recipe = load(tmp_path, f"{MINIMAL}model: {{checkpoint: {tmp_path / 'absent'}}}")
    with pytest.raises(FileNotFoundError, match=r"model\.checkpoint='.*absent': no such folder"):
        model_config(recipe, recipe.methods[0])


def test_a_tokenizer_that_does_not_fit(recipe, data) -> None:
    with pytest.raises(ValueError, match="token ids do not fit the model, whose vocab_size is 100"):
        model_config(recipe(model={"vocab_size": 100}), MethodConfig("vanilla"), data.tokenizer)


def test_blocks_longer_than_learned_positions(recipe, data) -> None:
    short = recipe(model={"backbone": "gpt2", "max_position_embeddings": 8})
    with pytest.raises(ValueError, match="block_size=16: the model has max_position_embeddings=8 learned positions"):
        model_config(short, MethodConfig("vanilla"), data.tokenizer)


def test_a_checkpoint_brings_its_tokenizer_and_takes_a_method(tmp_path: Path, recipe, data) -> None:
    config = model_config(recipe(), MethodConfig("vanilla"), data.tokenizer)
    FathomForCausalLM(config).save_pretrained(tmp_path / "start")
    loaded = load(tmp_path, f"{MINIMAL}model: {{checkpoint: {tmp_path / 'start'}}}\nmethods: [vanilla, loop]\n")
    assert loaded.data.tokenizer == str(tmp_path / "start")
    looped = model_config(loaded, loaded.method("loop"), data.tokenizer)
    assert looped.passes == 4 and looped.hidden_size == 32 and looped.embed_scale == config.embed_scale


@pytest.mark.parametrize("option", [{"gradient_accumulation": 2}, {"gradient_checkpointing": True}])
def test_cuda_graphs_take_one_batch_a_step_and_no_checkpointing(option) -> None:
    with pytest.raises(ValueError, match=rf"training\.{next(iter(option))}=.*compile='graphs'.*'layers'"):
        Training(tokens=1000, compile="graphs", **option)
