"""Every RoPE type that transformers' Llama supports, inside and beyond the original length, against that class."""

from __future__ import annotations

import json

import pytest
import torch
from stock import GROUPED, random_stock
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from fathom import FathomForCausalLM
from tiny import tokens

ORIGINAL = 16  # positions of the original training
ROPE = {
    "default": {"rope_theta": 500.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-truncate-mscale": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip
every_type = pytest.mark.parametrize("name", ROPE)


def stock_with(name: str, config_class=LlamaConfig):
    rope = {"rope_type": name.split("-")[0], "rope_theta": 1e4, **ROPE[name]}
    # "dynamic" grows from max_position_embeddings; the others state their original length themselves
    length = ORIGINAL if name in ("dynamic", "default") else 4 * ORIGINAL
    sizes = {**GROUPED, "max_position_embeddings": length}
    if config_class is GPTNeoXConfig:
        sizes.pop("num_key_value_heads")
        rope["partial_rotary_factor"] = 1.0
    return random_stock(config_class(**sizes, rope_parameters=rope))


@every_type
@pytest.mark.parametrize("config_class", [LlamaConfig, GPTNeoXConfig])
def test_logits_and_generation_equal_the_stock_class(name, config_class, tmp_path):
    stock = stock_with(name, config_class)
    stock.save_pretrained(tmp_path)
    ours = FathomForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for length in (ORIGINAL // 2, ORIGINAL, 3 * ORIGINAL, ORIGINAL // 2):  # back again: "dynamic" keeps state
            ids = tokens(2, length)
            assert (ours(ids).logits - stock(ids).logits).abs().max() <= 1e-5
    ids = tokens(2, ORIGINAL - 3)  # decoding crosses the original length
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()


@every_type
def test_it_saves_back(name, tmp_path):
    stock = stock_with(name)
    stock.save_pretrained(tmp_path / "stock")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "fathom")
    ours.save_stock_pretrained(tmp_path / "back")
    ids = tokens(2, 3 * ORIGINAL)
    with torch.no_grad():
        expected = stock(ids).logits
        for folder in ("fathom", "back"):
            again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert (again(ids).logits - expected).abs().max() <= 1e-5


def test_the_types_differ_beyond_the_original_length():
    """Without this the tests above could compare defaults with defaults."""
    ids = tokens(1, 3 * ORIGINAL)
    with torch.no_grad():
        logits = [stock_with(name)(ids).logits for name in ROPE]
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert (a - b).abs().max() > 1e-3


def test_the_old_spelling_of_rope_scaling_is_read(tmp_path):
    stock = stock_with("llama3")
    stock.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    file.write_text(json.dumps(config))
    ids = tokens(1, 3 * ORIGINAL)
    with torch.no_grad():
        assert (FathomForCausalLM.from_pretrained(tmp_path)(ids).logits - stock(ids).logits).abs().max() <= 1e-5
