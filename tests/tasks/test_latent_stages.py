"""The stages of a latent diffusion model as tasks: what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from cases import recipe

from fathom.tasks import lookup
from fathom.train import load_recipe, train_run
from tiny_checkpoint import save_masked


def test_what_a_stage_refuses(tmp_path):
    made = recipe("contextual_decoder", tmp_path / "a", task={"corrupt": "denoiser"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / "cache")
    with pytest.raises(ValueError, match="corrupt='denoiser': the denoiser has not been trained; start from the check"):
        train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    other = save_masked(tmp_path / "other", "quite another text than that", hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2)  # fmt: skip
    made = recipe("latent_diffusion", tmp_path / "b")
    made["data"]["tokenizer"] = other
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / "cache")
    with pytest.raises(ValueError, match="its tokenizer is another one than that of the data"):
        train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    made["data"]["tokenizer"] = {"bpe": 280}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="encoder and decoder read one tokenizer; name"):
        loaded.task.model_config({**loaded.model}, loaded.data, None)


def test_documents_as_rows_teach_their_length(tmp_path):
    """A row is a document and its end, padded; padding has vectors of zeros, which the denoiser learns, and the decoder
    learns the first padding token."""
    made = recipe("latent_diffusion", tmp_path, task={"unwrapped": True})
    rows = ["the sea was calm", "old men", "in silence and the sea was calm by it", "sat by it in silence"]
    for name in ("train", "validation"):
        made["data"][name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows * 4))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / "cache")
    assert len(data.train) == 16
    tokenizer, eos = data.tokenizer, data.tokenizer.eos_token_id
    for index, row in enumerate(rows):
        ids = [*tokenizer(row)["input_ids"][:15], eos]
        assert data.train[index]["input_ids"].tolist() == ids + [eos] * (16 - len(ids))
        assert data.train[index]["labels"].tolist() == ids + [-100] * (16 - len(ids))
    result = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    model = loaded.task.model_class.from_pretrained(result.model)
    examples = [{**data.train[i], "draw": torch.tensor([0, i])} for i in range(2)]
    batch = loaded.task.collate(examples)
    assert batch["attention_mask"].sum(1).tolist() == (batch["labels"] != -100).sum(1).tolist()
    mask, noise = batch["attention_mask"].bool(), torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    given = {"t": torch.tensor([0.3, 0.6]), "noise": noise}
    with torch.no_grad():
        assert (model.space.encode(batch["input_ids"], mask)[~mask] == 0).all()
        each = model.diffusion_losses(batch["input_ids"], mask, **given)
        loss = model(batch["input_ids"], stage="latent_diffusion", attention_mask=mask, labels=batch["labels"],
                     **given).loss  # fmt: skip
        torch.testing.assert_close(loss, each.mean())
        model.options = model.config.options.__class__(**{**model.config.codar, "padding": "masked"})
        each = model.diffusion_losses(batch["input_ids"], mask, **given)
        loss = model(batch["input_ids"], stage="latent_diffusion", attention_mask=mask, labels=batch["labels"],
                     **given).loss  # fmt: skip
        torch.testing.assert_close(loss, each[mask].mean())
    for padding in ("targets", "masked"):
        labels = lookup("contextual_decoder")(padding=padding).collate(examples)["labels"]
        assert torch.equal((labels != -100).sum(1), mask.sum(1) + (padding == "targets"))
    made["task"] = {"name": "contextual_decoder", "unwrapped": True, "examples": 3}
    made["model"] = {"checkpoint": str(result.model)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    second = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "second", data=data)
    assert set(second.scores) == {score.name for score in loaded.task.scores}
    made["data"]["keep_remainder"] = True
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    with pytest.raises(ValueError, match=r"data\.keep_remainder=True: with unwrapped=True a row is one document"):
        load_recipe(tmp_path / "recipe.yaml")
