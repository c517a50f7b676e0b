"""The stages of a latent diffusion model as tasks: what they refuse."""

from __future__ import annotations

import pytest
import yaml
from cases import recipe

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
