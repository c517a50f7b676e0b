"""Every RoPE type that transformers' Llama supports, inside and beyond the original length, against that class."""

from __future__ import annotations

import json
import math

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


# ---------------------------------------------------------------- float64


def exact_frequencies(name: str, length: int) -> list[float]:
    """Frequencies for a head of 8 channels, from each method's equation, in Python's double precision."""
    options, width, positions = ROPE[name], 8, ORIGINAL if name in ("dynamic", "default") else 4 * ORIGINAL
    theta = options.get("rope_theta", 1e4)
    if name == "dynamic" and length > positions:
        factor = options["factor"]
        theta *= (factor * length / positions - (factor - 1)) ** (width / (width - 2))
    frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    if name == "linear":
        return [f / options["factor"] for f in frequencies]
    if name == "longrope":
        divisors = options["long_factor" if length > ORIGINAL else "short_factor"]
        return [f / divisor for f, divisor in zip(frequencies, divisors)]
    if name == "llama3":
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        smooth = [min(max((ORIGINAL * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0) for f in frequencies]
        return [(1 - s) * f / options["factor"] + s * f for s, f in zip(smooth, frequencies)]
    if name == "yarn":
        turns = [width * math.log(ORIGINAL / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32.0, 1.0)]
        low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), width - 1)
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(width // 2)]
        return [r * f / options["factor"] + (1 - r) * f for r, f in zip(ramp, frequencies)]
    return frequencies


@pytest.mark.parametrize("name", [name for name in ROPE if name != "yarn-truncate-mscale"])
@pytest.mark.parametrize("made", ["loaded", "cast", "cast back and forth"])
def test_a_float64_model_has_float64_frequencies(name, made, tmp_path):
    stock_with(name).save_pretrained(tmp_path)
    if made == "loaded":
        model = FathomForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    else:
        model = FathomForCausalLM.from_pretrained(tmp_path)
        single = model.model.rotary_emb.inv_freq.clone()
        model = model.double() if made == "cast" else model.double().bfloat16().float()
        if made != "cast":
            assert torch.equal(model.model.rotary_emb.inv_freq, single)
            model = model.to(torch.float64)
    rotary, position_ids = model.model.rotary_emb, torch.arange(3 * ORIGINAL)[None]
    for length in (ORIGINAL // 2, 3 * ORIGINAL, ORIGINAL // 2):
        cos, _ = rotary(torch.zeros(1, dtype=torch.float64), position_ids[:, :length])
        expected = torch.tensor(exact_frequencies(name, length), dtype=torch.float64)
        assert rotary.inv_freq.dtype == cos.dtype == torch.float64
        torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-14, atol=0)
        angles = torch.cat(2 * [position_ids[0, :length, None] * expected], dim=-1)
        torch.testing.assert_close(cos[0], angles.cos() * rotary.attention_scaling, rtol=0, atol=1e-12)
