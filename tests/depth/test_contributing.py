"""The method that CONTRIBUTING.md shows: its equation, its parameter on a stock checkpoint, its cost."""

import re
from pathlib import Path

import pytest
import torch

from fathom import FathomForCausalLM
from fathom.models.registry import REGISTRIES
from tiny import assert_close, tiny_model, tokens

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def injected(monkeypatch, tmp_path):
    monkeypatch.setitem(REGISTRIES, "depth", dict(REGISTRIES["depth"]))
    example = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL).group(1)
    (tmp_path / "injected_example.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("injected_example")
    return REGISTRIES["depth"]["injected"]


def test_the_example_of_the_guide(injected, tmp_path):
    tiny_model(init="hf").save_stock_pretrained(tmp_path)
    model, ids = FathomForCausalLM.from_pretrained(tmp_path, depth={"name": "injected", "passes": 3}), tokens(2, 7)
    assert torch.equal(model.depth.gain, torch.ones(32))
    counts = injected.counts(model.config, model.depth.options)
    assert counts.parameters == sum(p.numel() for p in model.depth.parameters()) == 32
    with torch.no_grad():
        model.depth.gain.normal_()
        embeddings = model.model.embed_tokens(ids)
        h = None
        for _ in range(3):  # a forward of the vanilla model is F
            inputs = embeddings if h is None else model.depth.gain * embeddings + h
            plain = FathomForCausalLM.from_pretrained(tmp_path)
            h = plain(inputs_embeds=inputs, output_hidden_states=True).hidden_states[-1]
        assert_close(model(ids).logits, model.lm_head(h))
