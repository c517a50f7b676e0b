"""The initialisation rules: the statistics of every parameter group are those of the table in initialization.py."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import set_seed

from fathom import FathomConfig, FathomForCausalLM

WIDTH, LAYERS = 64, 3
CUT = 0.98658  # standard deviation of N(0, 1) cut at ±3


@pytest.fixture(params=["llama", "gpt2"])
def backbone(request) -> str:
    return request.param


@pytest.mark.parametrize(
    ("depth", "steps"),
    [
        ({"name": "vanilla"}, 1),
        ({"name": "loop", "passes": 4}, 4),
        ({"name": "pondering", "steps": 2, "feedback": "hidden_linear"}, 3),
        ({"name": "adaponderlm", "steps": 2}, 3),
        ({"name": "ponderlm2", "thoughts": 1}, 2),  # slots one on the other; Jacobi sweeps do not count
        ({"name": "ponderlm3", "thoughts": 2}, 3),
        ({"name": "adaptive_latent_cot", "steps": 3}, 4),
        ({"name": "pause", "pauses": 3}, 1),  # slots beside each other
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("init", ["scaled", "hf"])
def test_statistics(backbone, depth, steps, init) -> None:
    set_seed(0)
    config = FathomConfig(
        backbone=backbone,
        init=init,
        depth=depth,
        vocab_size=500,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = FathomForCausalLM(config)
    groups: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if name.startswith("depth.") and depth["name"] != "pondering":
            continue  # a method's own rule for its own parameters
        groups.setdefault(name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1], []).append(weight.detach().flatten())
    plain = math.sqrt(2 / (5 * WIDTH))
    for name, weights in groups.items():
        module, kind = name.split(".")
        values = torch.cat(weights)
        if "norm" in module or kind == "bias":
            assert (values == (1 if kind == "weight" else 0)).all(), name
            continue
        sigma = 0.02 if init == "hf" else plain
        if init == "scaled" and module in ("o_proj", "down_proj"):
            sigma /= math.sqrt(2 * LAYERS * steps)
        measured = values.std().item()
        expected = sigma * (CUT if init == "scaled" else 1)
        # the standard error of a standard deviation is σ/√(2n)
        assert abs(measured - expected) < 5 * sigma / math.sqrt(2 * len(values)), name
        assert abs(values.mean().item()) < 5 * sigma / math.sqrt(len(values)), name
        if init == "scaled":
            assert values.abs().max() <= 3 * sigma * (1 + 1e-6), name
    assert {"embed_tokens.weight", "lm_head.weight", "o_proj.weight", "down_proj.weight"} <= set(groups)
    assert ("feedback_proj.weight" in groups) == (depth["name"] == "pondering")
    assert config.embed_scale == pytest.approx(math.sqrt(WIDTH) if init == "scaled" else 1.0)


def test_the_same_seed_gives_the_same_weights() -> None:
    models = []
    for seed in (0, 0, 1):
        set_seed(seed)
        models.append(FathomForCausalLM(FathomConfig(vocab_size=50, hidden_size=16, num_attention_heads=2)).lm_head)
    assert torch.equal(models[0].weight, models[1].weight) and not torch.equal(models[0].weight, models[2].weight)
