"""The methods that CONTRIBUTING.md shows: their equations, a parameter on a stock checkpoint, its cost."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fathom import FathomForCausalLM
from fathom.models.registry import REGISTRIES
from fathom.tasks import base as tasks_base
from tiny import assert_close, tiny_model, tokens

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def registered(section: str, name: str, monkeypatch, tmp_path):
    """The class of the guide's example, in the registry for the time of a test."""
    monkeypatch.setitem(REGISTRIES, section, dict(REGISTRIES[section]))
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (example,) = (text for text in examples if f'@register("{section}", "{name}")' in text)
    (tmp_path / f"{name}_example.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    __import__(f"{name}_example")
    return REGISTRIES[section][name]


@pytest.fixture
def injected(monkeypatch, tmp_path):
    return registered("depth", "injected", monkeypatch, tmp_path)


def test_the_positions_method_of_the_guide(monkeypatch, tmp_path):
    """The guide's positions method equals transformers' linear RoPE scaling."""
    registered("positions", "interpolated", monkeypatch, tmp_path)
    model = tiny_model(positions={"name": "interpolated", "factor": 4.0})
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    oracle = tiny_model(rope_parameters=linear)
    ids = tokens(2, 9)
    assert_close(model(ids).logits, oracle(ids).logits)
    assert (model(ids).logits - tiny_model()(ids).logits).abs().max() > 1e-3


def test_the_task_of_the_guide(monkeypatch):
    """3 bits for each of 10 tokens, over 20 bytes."""
    monkeypatch.setattr(tasks_base, "_TASKS", dict(tasks_base.tasks()))
    (example,) = re.findall(r"```python\n(\"\"\"Next tokens.*?)```", GUIDE.read_text(), re.DOTALL)
    module = ModuleType("perplexity_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(example, vars(module))
    task = tasks_base.Task.from_yaml("perplexity", "task")
    data: Any = SimpleNamespace(validation_targets=10, validation_bytes=20, validation_parts=())
    assert task.score(data, 3 * math.log(2), Path()) == pytest.approx({"bits_per_byte": 1.5, "perplexity": 8.0})
    assert (
        [score.name for score in task.scores] == ["bits_per_byte", "perplexity"] == list(task.score(data, None, Path()))
    )


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
