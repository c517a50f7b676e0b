"""ACT and the exit gate, as methods, are Adaptive Latent CoT's model with that halting rule.

The rule itself is held against an oracle in test_adaptive_latent_cot.py."""

from __future__ import annotations

import pytest
import torch

from fathom import FathomConfig
from fathom.cost import forward_flops_per_token, training_flops_per_token
from tiny import SIZES, tiny_model, tokens

OPTIONS = {"steps": 2, "threshold": 0.3, "penalty": 0.2, "router_bias": 0.0}


@pytest.mark.parametrize("name", ["act", "exit_gate"])
def test_equals_the_halting_rule_of_that_name(name):
    named = tiny_model(depth={"name": name, **OPTIONS})
    option = tiny_model(depth={"name": "adaptive_latent_cot", "halting": name, **OPTIONS})
    option.load_state_dict(named.state_dict())  # strict: the same parameters
    ids = tokens(2, 9)
    assert torch.equal(named(ids).logits, option(ids).logits)
    assert torch.equal(named.train()(ids, labels=ids).loss, option.train()(ids, labels=ids).loss)
    for cost in (forward_flops_per_token, training_flops_per_token):
        assert cost(named.config, 32) == cost(option.config, 32)


@pytest.mark.parametrize("name", ["act", "exit_gate"])
def test_options_that_mean_nothing_here_are_refused(name):
    section = FathomConfig(**SIZES, depth={"name": name}).depth
    assert {"steps", "threshold", "penalty"} < set(section) and "halting" not in section
    for option in ("halting", "beta", "explore", "mean_passes"):
        with pytest.raises(ValueError, match=f"depth method '{name}' has no option '{option}'"):
            FathomConfig(**SIZES, depth={"name": name, option: 1})
    with pytest.raises(ValueError, match=f"^{name} option threshold=1"):
        FathomConfig(**SIZES, depth={"name": name, "threshold": 1.0})
