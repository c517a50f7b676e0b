"""A masked model and its autoregressive twin in one comparison, and masked models made of autoregressive ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from fathom import FathomForCausalLM, FathomForMaskedDiffusion
from fathom.evaluate import load_checkpoint
from fathom.report.compare import compare
from fathom.tasks import masked_diffusion
from fathom.tasks.masked_diffusion import opening
from fathom.train import load_recipe, model_config, train_run
from tiny_checkpoint import save_fathom

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "sat", "by", "it", "in", "silence"]


def write(folder, **sections):
    words = random.Random(0).choices(WORDS, k=1500)
    (folder / "train.txt").write_text(" ".join(words[:1200]))
    (folder / "held-out.txt").write_text(" ".join(words[1200:]))
    whole = {
        "name": "twins",
        "task": {"name": "masked_diffusion", "draws": 2, "random_length": 0.5},
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "methods": ["masked", {"name": "autoregressive", "diffusion": {"name": "none"}}],
        "data": {"train": f"{folder}/train.txt", "validation": f"{folder}/held-out.txt", "tokenizer": {"bpe": 270},
                 "block_size": 32, "num_proc": 1},
        "training": {"tokens": 256, "sequences": 4, "lr": 1e-2, "log_every": 1},
        **sections,
    }  # fmt: skip
    (folder / "twins.json").write_text(json.dumps(whole))
    return folder / "twins.json"


def test_one_report_has_the_exact_score_beside_the_bound(tmp_path):
    path = write(tmp_path)
    lines: list[str] = []
    results = compare(path, tmp_path, say=lines.append)
    masked, twin = results.runs
    assert not results.failures
    for one, kind in ((masked, "upper bound"), (twin, "exact")):
        said = f"{one.scores['bits_per_byte_bound']:.3f} bits per byte ({kind})"
        assert any(line.startswith(f"{one.folder}: {said}") for line in lines), lines
        assert f"name: bits per byte ({kind})" in (tmp_path / "twins" / one.folder / "model" / "README.md").read_text()
    assert (masked.exact, twin.exact, twin.error) == (False, True, None) and masked.error > 0
    assert masked.params == twin.params and masked.train_flops > twin.train_flops  # attention over all of a row
    page = (tmp_path / "twins" / "report.html").read_text()
    assert "upper bound, standard error" in page and "exact" in page

    recipe = load_recipe(path)
    data = recipe.task.prepare(recipe.data, tmp_path / ".data")
    model, _ = load_checkpoint(str(tmp_path / "twins" / twin.folder / "model"), "cpu")
    assert type(model) is FathomForCausalLM
    nats = 0.0
    for row in data.validation:
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None]).logits[0, :-1].double()
        nats += float(F.cross_entropy(logits, row["input_ids"][1:], reduction="sum"))
    exact = nats / math.log(2) / data.validation_bytes
    assert twin.scores["bits_per_byte_bound"] == pytest.approx(exact, rel=1e-5)


def test_what_cannot_stand_side_by_side_is_refused(tmp_path):
    for task, sections, said in (
        ({"denominator": "batch"}, {}, "denominator='batch' beside diffusion: none"),
        ({}, {"budgets": ["inference_flops"]}, "what a diffusion model's answer costs"),
    ):
        path = write(tmp_path, task={"name": "masked_diffusion", "draws": 2, **task}, **sections)
        with pytest.raises(ValueError, match=said):
            compare(path, tmp_path, say=lambda line: None)


def test_a_checkpoint_without_a_mask_token_gets_one(tmp_path):
    base = save_fathom(tmp_path / "base")
    shifted = {"name": "masked", "diffusion": {"name": "masked", "shift": True}}
    path = write(
        tmp_path, model={"checkpoint": str(base)}, methods=[shifted],
        data={"train": f"{tmp_path}/train.txt", "validation": f"{tmp_path}/held-out.txt", "block_size": 32},
    )  # fmt: skip
    recipe = load_recipe(path)
    assert model_config(recipe, recipe.methods[0]).vocab_size == 301  # before the text is read
    data = recipe.task.prepare(recipe.data, tmp_path / ".data")
    result = train_run(recipe, recipe.methods[0], seed=0, folder=tmp_path / "run", data=data)
    model = FathomForMaskedDiffusion.from_pretrained(result.model)
    before = FathomForCausalLM.from_pretrained(base)
    old, new = before.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert model.diffusion.shift and model.diffusion.mask_token_id == data.tokenizer.mask_token_id == len(old)
    assert len(new) == len(old) + 1 and (new[: len(old)] - old).abs().max() < 0.1 < old.abs().max()


def test_later_tokens_come_into_sight_step_by_step(tmp_path, monkeypatch):
    seen = opening(64, 0.25, "cpu")[0, 0]
    assert seen.tril().equal(torch.ones(64, 64, dtype=torch.bool).tril())
    assert float(seen.triu(1).sum() / (64 * 63 / 2)) == pytest.approx(0.25, abs=0.04)

    path = write(tmp_path, task={"name": "masked_diffusion", "draws": 2, "anneal": 0.75}, methods=["masked"])
    recipe = load_recipe(path)
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, tokens=512))  # 4 steps
    shares = []
    monkeypatch.setattr(masked_diffusion, "opening", lambda *given: shares.append(given[1]) or opening(*given))
    data = recipe.task.prepare(recipe.data, tmp_path / ".data")
    train_run(recipe, recipe.methods[0], seed=0, folder=tmp_path / "run", data=data)
    assert shares == pytest.approx([0, 1 / 3, 2 / 3])  # and then all is seen

    torch.manual_seed(0)
    model = recipe.task.class_of(model_config(recipe, recipe.methods[0], data.tokenizer))(
        model_config(recipe, recipe.methods[0], data.tokenizer)
    ).eval()
    ids = torch.randint(1, 200, (1, 16))
    changed = ids.clone()
    changed[0, -1] = 201
    for sight, same in ((0.0, True), (1.0, False)):  # without any sight of later tokens it is causal
        mask = opening(16, sight, "cpu")
        with torch.no_grad():
            first, second = (model(input_ids=x, attention_mask=mask).logits[0, :-1] for x in (ids, changed))
        assert torch.allclose(first, second, atol=1e-6) == same
    with pytest.raises(ValueError, match="document_mask=True with anneal"):
        recipe.task.check(dataclasses.replace(recipe.data, document_mask=True))
