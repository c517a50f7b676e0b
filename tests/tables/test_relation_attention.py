"""The op against RASAT's equations with a vector for every pair, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.ops.relation_attention import relation_attention

B, H, T, D, N = 2, 3, 11, 8, 5


def inputs(dtype=torch.float64, length=T):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    query, key, value = (draw(B, H, length, D) for _ in range(3))
    tables = draw(N + 1, D), draw(N + 1, D)
    relations = torch.randint(0, N + 1, (B, length, length), generator=generator, dtype=torch.uint8)
    bias = draw(1, H, length, length)
    visible = (torch.arange(length) < torch.tensor([length, length - 4])[:, None])[:, None, None]
    return query, key, value, relations, *tables, bias, visible


def by_pairs(query, key, value, relations, key_table, value_table, bias, visible, scaling=1.0):
    """The equations, pair by pair: keys and values [B, T, T, D] of all relations."""
    keys, values = key_table[relations.long()], value_table[relations.long()]
    scores = torch.einsum("bhid,bhjd->bhij", query, key) + torch.einsum("bhid,bijd->bhij", query, keys)
    scores = (scores * scaling + bias).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value) + torch.einsum("bhij,bijd->bhid", weights, values), weights


@pytest.mark.parametrize("scaling", [1.0, 0.3])
def test_output_weights_and_gradients_are_those_of_pairs(scaling):
    given = inputs()
    wanted = [x for x in given if x.requires_grad]
    got, expected = relation_attention(*given, scaling=scaling), by_pairs(*given, scaling=scaling)
    seed = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((got[0] * seed).sum(), wanted), torch.autograd.grad((expected[0] * seed).sum(), wanted),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradients_are_finite_differences():
    given = [x[:1, :1, :4, :4] if x.ndim == 4 else x for x in inputs()]
    relations, visible = given[3][:1, :4, :4], torch.tensor([True, True, True, False])
    query, key, value, bias = (x.detach().requires_grad_() for x in (*given[:3], given[6]))
    tables = [given[i][:, :4].detach().requires_grad_() for i in (4, 5)]

    def output(query, key, value, key_table, value_table, bias):
        return relation_attention(query, key, value, relations, key_table, value_table, bias, visible)[0]

    assert torch.autograd.gradcheck(output, (query, key, value, *tables, bias))


def test_half_precision_is_near_and_has_its_dtype():
    expected = by_pairs(*inputs())[0]
    got = relation_attention(*inputs(torch.bfloat16))[0]
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() < 0.05 * expected.abs().max()


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_pairs_is_made():
    """Forward and backward: nothing larger than the scores of all heads (a vector of each pair is D / H times it)."""
    given = inputs(torch.float32, length=32)
    with Largest() as largest:
        relation_attention(*given)[0].sum().backward()
    assert largest.numbers == B * H * 32 * 32 < B * 32 * 32 * D
