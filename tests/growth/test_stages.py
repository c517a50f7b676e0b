"""Innovator's four stages, one recipe after the other: branches, surgery, router alone, everything."""

import pytest
import torch

from fathom import FathomForCausalLM
from fathom.data import DataConfig, prepare
from fathom.data.config import NamedSource
from fathom.growth import methods
from fathom.growth.grow import grow
from fathom.train import Recipe, Training, train_run
from fathom.train.recipe import MethodConfig
from tiny import tiny_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_the_stages_chain(tmp_path):
    texts = {"sky": "star moon orbit comet planet. ", "sea": "wave fish salt reef tide. "}
    for name, words in texts.items():
        (tmp_path / f"{name}.txt").write_text(words * 60)
    (tmp_path / "all.txt").write_text("".join(texts.values()) * 60)

    def trained(name, train, model, fields, tokenizer=None, **training):
        data = DataConfig(
            train=train, validation=None, tokenizer=tokenizer or {"bpe": 280}, block_size=8, num_proc=1
        )  # fmt: skip
        recipe = Recipe("stages", Training(tokens=6 * 2 * 8, sequences=2, lr=1e-2, **training), model, data=data)
        method = MethodConfig(name, fields)
        return train_run(recipe, method, seed=0, folder=tmp_path / name, data=prepare(data, tmp_path / "cache")).model

    base = trained("base", str(tmp_path / "all.txt"), SIZES, {"feed_forward": {"name": "dense"}})
    branches = [
        trained(name, str(tmp_path / f"{name}.txt"), {"checkpoint": str(base)}, {"feed_forward": {"name": "dense"}},
                str(base), trains="feed_forward")
        for name in texts
    ]  # fmt: skip
    made = grow(base, methods()["innovator"](disciplines=2, slices=4), tmp_path / "grown", branches)
    assert made["active_parameters"] < made["parameters"] and (tmp_path / "grown" / "tokenizer.json").exists()

    mixture = {name: NamedSource(str(tmp_path / f"{name}.txt")) for name in texts}
    routed = trained(
        "warm-up", mixture, {"checkpoint": str(tmp_path / "grown")},
        {"feed_forward": {"name": "moe", "discipline": 0.1, "selection": "expert"}}, str(base), trains="router",
    )  # fmt: skip
    before, after = (FathomForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "grown", routed))
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) != (".mlp.gate." in name), name
    whole = trained("integrated", mixture, {"checkpoint": str(routed)}, {"feed_forward": {"name": "moe"}}, str(base))
    last = FathomForCausalLM.from_pretrained(whole)
    last.save_stock_pretrained(tmp_path / "stock")
    assert not torch.equal(last.model.layers[0].mlp.experts.down_proj, after["model.layers.0.mlp.experts.down_proj"])


@pytest.mark.parametrize("name", ["discipline", "slices"])
def test_options_of_a_grown_model_may_change_where_its_tensors_do_not(name, tmp_path):
    """A stage sets losses; another number of experts is another model."""
    tiny_model(feed_forward={"name": "moe", "experts": 4, "slices": 2, "width": 16}).save_pretrained(tmp_path)
    options = {"name": "moe", name: 0.5 if name == "discipline" else 4}
    model = FathomForCausalLM.from_pretrained(tmp_path, feed_forward=options)
    assert model.config.feed_forward[name] == options[name] and model.config.feed_forward["width"] == 16
    with pytest.raises(ValueError, match="tensors have other shapes"):
        FathomForCausalLM.from_pretrained(tmp_path, feed_forward={"name": "moe", "experts": 6})
