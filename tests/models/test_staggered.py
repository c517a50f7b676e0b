"""Staggered decoding writes what generate() writes."""

from __future__ import annotations

import pytest
import torch

from fathom.models.staggered import generate_staggered
from tiny import tiny_model, tokens

DEPTHS = (
    {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.25, "router_bias": 0.0},
    {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.25, "router_bias": 0.0, "router_per_step": True},
    {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.3, "router_bias": -0.7, "halting": "act"},
    {"name": "adaponderlm", "steps": 3, "threshold": 0.45},
    {"name": "adaponderlm", "steps": 3, "threshold": 0.45, "accumulate": False, "premultiply_steps": True},
)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@torch.no_grad()
def test_staggered_decoding_equals_generate(depth, family, padded, form):
    model, ids = tiny_model(family, depth=depth).double(), tokens(3, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 0, 1]]) if padded else torch.ones_like(ids)
    passes = []
    hook = model.depth.register_forward_hook(lambda module, args, out: passes.append(out.trace["passes"]))
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, 7:]
    hook.remove()
    assert len(torch.unique(torch.cat(passes[1:], dim=1))) > 1  # rows stop at different steps
    assert any(len(step.unique()) > 1 for step in passes[1:])
    actual = generate_staggered(model, ids, 20, mask if padded else None)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@torch.no_grad()
def test_attention_implementations_write_the_same(depth):
    model, ids = tiny_model(depth=depth).double(), tokens(3, 7)
    expected = generate_staggered(model, ids, 12)
    model.set_attn_implementation("eager")
    assert generate_staggered(model, ids, 12).tolist() == expected.tolist()
    model.generation_config.eos_token_id = None
    assert model.generate(ids, max_new_tokens=12, do_sample=False)[:, 7:].tolist() == expected.tolist()


@pytest.mark.parametrize("depth", DEPTHS[:1] + DEPTHS[3:4], ids=str)
@torch.no_grad()
def test_rows_that_are_done_stay_within_the_positions(depth):
    """Up to the last position there is, while others still think."""
    model = tiny_model("gpt2", depth=depth, max_position_embeddings=24).double()
    model.generation_config.eos_token_id = None
    for seed in range(3):
        ids = tokens(3, 8, seed=seed)
        expected = model.generate(ids, max_new_tokens=16, do_sample=False)[:, 8:]
        assert generate_staggered(model, ids, 16).tolist() == expected.tolist()


def test_flash_attention_is_refused():
    model = tiny_model(depth=DEPTHS[0])
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2'.*set_attn_implementation"):
        generate_staggered(model, tokens(1, 3), 2)


def test_methods_without_turns_are_refused():
    for depth in ({"name": "vanilla"}, {"name": "adaponderlm", "halting": "fixed"}):
        with pytest.raises(ValueError, match=rf"{depth['name']}.*use generate"):
            generate_staggered(tiny_model(depth=depth), tokens(1, 3), 2)
