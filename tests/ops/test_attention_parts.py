"""Rotation against transformers' own, written-out attention against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checked import eager, rotate
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation

from fathom.ops.cached_attention import _in_two_parts, causal_attention
from tiny import assert_close


def angles(batch, length, width, dtype=torch.float64):
    turns = torch.arange(length, dtype=dtype)[:, None] * 0.7 ** torch.arange(width // 2, dtype=dtype)
    turns = torch.cat((turns, turns), dim=-1).expand(batch, length, width) + torch.arange(batch)[:, None, None]
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rotation_equals_llamas(batch, dtype):
    query, key = torch.randn(3, 4, 5, 8, dtype=dtype), torch.randn(3, 2, 5, 8, dtype=dtype)
    cos, sin = angles(batch, 5, 8, dtype)
    expected = llama_rotation(query, key, cos, sin)
    for actual, wanted in zip((rotate(query, cos, sin), rotate(key, cos, sin)), expected, strict=True):
        assert_close(actual, wanted, 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_partial_rotation_equals_neox(width):
    query, key = torch.randn(3, 4, 5, 8, dtype=torch.float64), torch.randn(3, 4, 5, 8, dtype=torch.float64)
    cos, sin = angles(3, 5, width)
    expected = neox_rotation(query, key, cos, sin)
    for actual, wanted in zip((rotate(query, cos, sin), rotate(key, cos, sin)), expected, strict=True):
        assert_close(actual, wanted, 1e-12)
    assert torch.equal(rotate(query, cos, sin)[..., width:], query[..., width:])


def test_scores_depend_on_distance_only():
    """What rotation is for: ⟨R_a q, R_b k⟩ = ⟨R_{a+s} q, R_{b+s} k⟩."""
    cos, sin = angles(1, 9, 8)
    query, key = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    scores = rotate(query.expand(1, 1, 9, 8), cos, sin) @ rotate(key.expand(1, 1, 9, 8), cos, sin).transpose(2, 3)
    for distance in range(9):
        diagonal = scores[0, 0].diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-12


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("queries", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eager_attention_equals_sdpa(heads, groups, queries, dtype):
    query = torch.randn(2, heads, queries, 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, groups, 6, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    visible = torch.ones(queries, 6, dtype=torch.bool).tril(6 - queries)
    mask = torch.zeros(queries, 6, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None]
    module = torch.nn.Module().eval()
    out, weights = eager(module, query, key, value, mask, scaling=0.3)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=0.3, enable_gqa=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(out, expected.transpose(1, 2), tolerance)
    assert_close(weights.sum(-1), torch.ones(2, heads, queries, dtype=dtype), 1e-6)
    assert weights[..., ~visible].abs().sum() == 0
    given, direction = (query, key, value), torch.randn_like(out)
    theirs = torch.autograd.grad(expected.transpose(1, 2), given, direction)
    for a, b in zip(torch.autograd.grad(out, given, direction), theirs, strict=True):
        assert_close(a, b, tolerance)


def test_eager_attention_without_a_mask_sees_everything():
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    out, _ = eager(torch.nn.Module().eval(), query, key, value, None, scaling=1.0)
    assert_close(out, F.scaled_dot_product_attention(query, key, value, scale=1.0).transpose(1, 2), 1e-12)


def test_eager_attention_drops_weights_in_training_only():
    query, key, value = (torch.randn(1, 2, 50, 8) for _ in range(3))
    module = torch.nn.Module()
    _, kept = eager(module.eval(), query, key, value, None, scaling=0.3, dropout=0.5)
    _, dropped = eager(module.train(), query, key, value, None, scaling=0.3, dropout=0.5)
    assert (kept > 0).all()
    assert 0.4 < (dropped == 0).float().mean() < 0.6
    assert_close(dropped[dropped > 0], 2 * kept[dropped > 0], 1e-6)


@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2)])
def test_the_last_queries_of_a_text_meet_the_past_and_then_themselves(heads, groups):
    """Two fused kernels and a merge, as on Hopper, against a float64 softmax with the mask written out."""
    query, key, value = torch.randn(2, heads, 70, 16), torch.randn(2, groups, 150, 16), torch.randn(2, groups, 150, 16)
    visible = torch.ones(70, 150, dtype=torch.bool).tril(80)
    wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in (query, key, value)]
    scores = (wide[0] @ wide[1].transpose(2, 3) * 0.3).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ wide[2]
    assert_close(_in_two_parts(query, key, value, 0.3).double(), expected, 2e-6)
    assert_close(causal_attention(query, key, value, 0.3).double(), expected, 2e-6)
