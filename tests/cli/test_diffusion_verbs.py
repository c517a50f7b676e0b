"""`fathom generate` and `fathom evaluate` of a diffusion checkpoint."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.data import train_bpe
from fathom.diffusion import Fourier, SparseDLLM
from fathom.evaluate import evaluate_text, load_checkpoint, text_loss
from tiny import SIZES, perturb
from tiny_checkpoint import TEXT, run_cli, save_fathom


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("diffusion")
    tokenizer = train_bpe([TEXT], 299)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    sizes = {**SIZES, "vocab_size": 300, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = FathomForMaskedDiffusion(
        FathomConfig(**sizes, diffusion={"name": "masked", "mask_token_id": tokenizer.mask_token_id})
    )
    perturb(model)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_generate(folder, monkeypatch, capsys):
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    assert tokenizer.mask_token_id == model.config.diffusion["mask_token_id"]
    ids = tokenizer("The sea", return_tensors="pt")["input_ids"]
    given = {"max_new_tokens": 12, "block_length": 6, "steps": 4, "policy": "margin", "block_cache": "dual"}
    expected = tokenizer.decode(model.generate(ids, **given, temperature=0.8)[0], skip_special_tokens=True)
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    for stream in ((), ("--stream",)):
        code, out, _ = run_cli(monkeypatch, capsys, "generate", folder, "--prompt", "The sea", *options, *stream)
        assert code == 0 and (stream or out == expected + "\n") and out.startswith("The sea")
    code, _, err = run_cli(monkeypatch, capsys, "generate", folder, "--prompt", "The sea", "--policy", "margn")
    assert code == 2 and "policy='margn': no such method (did you mean 'margin'?)" in err


def test_options_of_policy_and_cache(folder, monkeypatch, capsys):
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    ids = tokenizer("The sea", return_tensors="pt")["input_ids"]
    asked = ("generate", folder, "--prompt", "The sea", "--max-new-tokens", 12, "--block-length", 6)
    asked += ("--policy", "fourier_sampler", "--block-cache", "sparse_dllm")
    given = {"policy": Fourier(rho=0.9, phi="low"), "block_cache": SparseDLLM(keep_ratio=0.1)}
    out = model.generate(ids, max_new_tokens=12, block_length=6, temperature=0.8, **given)
    options = ("--set", "rho=0.9", "--set", "phi=low", "--set", "keep_ratio=0.1")
    code, said, _ = run_cli(monkeypatch, capsys, *asked, *options)
    assert code == 0 and said == tokenizer.decode(out[0], skip_special_tokens=True) + "\n"
    for wrong, message in (("keep=1", "options of policy and block_cache: rho"), ("rho=2", "option rho=2: must be")):
        code, _, err = run_cli(monkeypatch, capsys, *asked, "--set", wrong)
        assert code == 2 and message in err


def test_a_model_of_block_diffusion(tmp_path, monkeypatch, capsys):
    """Its own blocks by default, a bound on texts, costs with its own cache, tasks in whole blocks."""
    tokenizer = train_bpe([TEXT], 299)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    sizes = {**SIZES, "vocab_size": 300, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    section = {"name": "block", "mask_token_id": tokenizer.mask_token_id, "block_length": 5}
    FathomForMaskedDiffusion(FathomConfig(**sizes, diffusion=section)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT[:90])
    for arguments, said in (
        (("generate", tmp_path, "--prompt", "The sea"), "The sea"),
        (("evaluate", tmp_path, "--text", tmp_path / "text.txt"), "upper bound"),
        (
            ("cost", tmp_path, "--prompt", 7, "--new-tokens", 10),
            "blocks of 5\n  exact            1 full passes    12 of blocks",
        ),
    ):
        code, out, err = run_cli(monkeypatch, capsys, *arguments)
        assert code == 0 and said in out, err
    code, _, err = run_cli(monkeypatch, capsys, "generate", tmp_path, "--prompt", "The sea", "--block-length", 4)
    assert code == 2 and "block_length=4: the model fills blocks of 5; give 5" in err


def test_diffusion_options_on_an_autoregressive_checkpoint(tmp_path, monkeypatch, capsys):
    save_fathom(tmp_path)
    code, _, err = run_cli(monkeypatch, capsys, "generate", tmp_path, "--prompt", "The sea", "--steps", 4)
    assert code == 2 and f"--steps: {tmp_path} is no diffusion model" in err


def test_evaluate_prints_a_bound(folder, tmp_path, monkeypatch, capsys):
    """A model that knows nothing has log of the vocabulary without the mask token, for every draw."""
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    torch.nn.init.zeros_(model.lm_head.weight)
    score = evaluate_text(model, tokenizer, TEXT[:150], window=16, stride=8)
    assert score.nats == pytest.approx(score.tokens * math.log(299), rel=1e-5) and score.nats_error < 1e-3
    with pytest.raises(ValueError, match="has no exact loss of a text; evaluate_text gives an upper bound"):
        text_loss(model, [1, 2, 3], 4, 2)
    (tmp_path / "text.txt").write_text(TEXT[:150])
    arguments = ("evaluate", folder, "--text", tmp_path / "text.txt", "--window", 16)
    code, out, _ = run_cli(monkeypatch, capsys, *arguments)
    assert code == 0 and out.count("upper bound") == 2 and "(16 draws)" in out
    said = json.loads(run_cli(monkeypatch, capsys, *arguments, "--json")[1])
    assert said["upper_bound"] and said["bits_per_byte_error"] > 0 and said["draws"] == 16
