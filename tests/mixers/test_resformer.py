"""ResFormer against its equation, in one pass and in several, and its costs."""

import pytest
import torch

from fathom import FathomConfig
from fathom.cost import mixing_per_token
from reference import ReferenceDecoder, fresh_models
from tiny import assert_close, tiny_model, tokens


def value_residual(model):
    """v_ℓ ← λ1 v_0 + λ2 v_ℓ with the raw v_0 of the same pass."""
    layers, mixer = model.config.num_hidden_layers, model.model.mixer

    def mix(query, key, value, index, memory):
        r, layer = divmod(index, layers)
        if layer == 0:
            memory[r] = value
            return key, value
        first, own = mixer.options.first_weight, mixer.options.own_weight
        if mixer.options.learned:
            first, own = mixer.first_weights[layer - 1].item(), mixer.own_weights[layer - 1].item()
        return key, first * memory[r] + own * value

    return mix


@pytest.mark.parametrize("depth", [None, {"name": "loop", "passes": 2}, {"name": "pondering", "steps": 1}], ids=str)
@pytest.mark.parametrize("options", [{}, {"first_weight": 0.3, "own_weight": 0.9}, {"learned": True}], ids=str)
def test_logits_equal_the_equation(options, depth):
    mixer = {"name": "resformer", **options}
    model = tiny_model("llama", num_hidden_layers=3, mixer=mixer, depth=depth).double()
    ids = tokens(1, 5)
    with torch.no_grad():
        reference = ReferenceDecoder(model, value_residual(model))
        assert_close(model(ids).logits[0], reference.logits(ids[0].tolist()), 1e-8)


def test_initial_values(tmp_path):
    mixer = {"name": "resformer", "learned": True, "first_weight": 0.25}
    for model in fresh_models(tmp_path, num_hidden_layers=4, mixer=mixer):
        assert model.model.mixer.first_weights.tolist() == [0.25] * 3
        assert model.model.mixer.own_weights.tolist() == [0.5] * 3


def test_cost():
    config = FathomConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, mixer={"name": "resformer"})
    cost = mixing_per_token(config)
    assert (cost.flops, cost.bytes) == (3 * 4 * 64, 3 * 3 * 64 * 2)


def test_errors_name_the_option():
    with pytest.raises(ValueError, match="resformer option own_weight=nan"):
        FathomConfig(mixer={"name": "resformer", "own_weight": float("nan")})
    with pytest.raises(ValueError, match="learned=True needs at least 2 layers"):
        FathomConfig(num_hidden_layers=1, mixer={"name": "resformer", "learned": True})
