"""The mixture of input rows against a plain einsum; its gradients; which tokens the top k are."""

from __future__ import annotations

import pytest
import torch
from checked import mixture, top_k_indices

from tiny import assert_close

B, T, D, V = 2, 5, 6, 11
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def inputs(dtype=torch.float64, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, D), (V, D), (V, D))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad) for s in shapes
    ]


def plain(hidden, head, table, temperature=1.0):
    p = torch.exp(torch.einsum("btd,vd->btv", hidden, head) / temperature)
    return torch.einsum("btv,vd->btd", p / p.sum(-1, keepdim=True), table)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("chunk", [1, 3, 10, 4096])
@pytest.mark.parametrize("top_k", [None, V])
def test_equals_the_einsum_whatever_the_chunk(temperature, chunk, top_k):
    given = inputs(requires_grad=True)
    expected = plain(*given, temperature)
    actual = mixture(*given, temperature=temperature, chunk=chunk, top_k=top_k)
    assert_close(actual, expected, 1e-12)
    direction = torch.randn(B, T, D, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(actual, given, direction), torch.autograd.grad(expected, given, direction), strict=True
    ):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_top_k_renormalises_the_k_likeliest(k):
    hidden, head, table = inputs()
    actual = mixture(hidden, head, table, top_k=k, chunk=3)
    for b in range(B):
        for t in range(T):
            logits = head @ hidden[b, t]
            best = sorted(range(V), key=lambda v: -logits[v].item())[:k]
            weights = torch.exp(logits[best]) / torch.exp(logits[best]).sum()
            assert_close(actual[b, t], weights @ table[best], 1e-12)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 0.5}, {"chunk": 4}], ids=str)
def test_gradcheck(options):
    given = inputs(requires_grad=True)
    assert torch.autograd.gradcheck(lambda h, w, e: mixture(h, w, e, **options), given)


def test_a_one_hot_head_gives_the_argmax_row_exactly():
    hidden, head, table = inputs(torch.float32)
    likeliest = (hidden @ head.T).argmax(-1)
    for top_k in (None, 4):
        assert torch.equal(mixture(hidden * 1e6, head, table, top_k=top_k), table[likeliest])


def test_it_lies_in_the_convex_hull_of_the_rows():
    hidden, head, table = inputs()
    for top_k in (None, 4):
        mixed = mixture(hidden, head, table, top_k=top_k)
        for direction in torch.randn(200, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)):
            heights = table @ direction
            assert ((mixed @ direction) <= heights.max() + 1e-12).all()
            assert ((mixed @ direction) >= heights.min() - 1e-12).all()
        assert mixed.norm(dim=-1).max() <= table.norm(dim=-1).max() + 1e-12


def test_rows_of_absent_tokens_receive_gradient_from_the_full_mixture_only():
    hidden, head, table = inputs(requires_grad=True)
    full = torch.autograd.grad(mixture(hidden, head, table).sum(), table)[0]
    assert (full.abs().sum(-1) > 0).all()
    few = torch.autograd.grad(mixture(hidden, head, table, top_k=1).sum(), table)[0]
    assert (few.abs().sum(-1) == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [None, 4])
def test_half_precision_stays_near_the_exact_value(dtype, top_k):
    given = inputs(dtype)
    exact = mixture(*(x.double() for x in given), top_k=top_k)
    for wide in (True, False):
        mixed = mixture(*given, top_k=top_k, wide=wide)
        assert mixed.dtype == dtype
        assert_close(mixed.double(), exact, 8 * torch.finfo(dtype).eps)


def test_autocast_changes_precision_only():
    given = inputs(torch.float32, requires_grad=True)
    expected = mixture(*given)
    with torch.autocast("cpu", torch.bfloat16):
        actual = mixture(*given, chunk=3)
    assert_close(actual.float(), expected, 0.03)
    gradients = torch.autograd.grad(actual.float().sum(), given)
    for a, b in zip(gradients, torch.autograd.grad(expected.sum(), given), strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, 0.05)


# ---------------------------------------------------------------- which k


def stable_top_k(row, k):
    """Largest first; among equals the lower index: Python's sort is stable."""
    return set(sorted(range(len(row)), key=lambda i: -row[i])[:k])


TIES = [
    [1.0, 2.0, 2.0, 2.0, 0.0],
    [-1.0, -3.0, -1.0, -1.0, -2.0],
    [0.0, -0.0, 0.0, -0.0, -1.0],
    [-0.0, 0.0, -0.0, 1.0, 0.0],
    [3.0] * 5,
    [-float("inf"), -5.0, -float("inf"), -float("inf"), -5.0],
    [1e-45, 0.0, -1e-45, 1e-45, -0.0],
    [3.0e38, -3.0e38, float("inf"), 3.0e38, 1.0],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("row", TIES, ids=str)
def test_among_equal_logits_the_lower_index_wins(dtype, k, row):
    values = torch.tensor([row, row[::-1]], dtype=torch.float64).to(dtype)
    chosen = top_k_indices(values, k)
    for logits, indices in zip(values.tolist(), chosen.tolist(), strict=True):
        assert len(indices) == k
        assert set(indices) == stable_top_k(logits, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_ties_in_a_wide_vocabulary(dtype):
    values = torch.randint(-3, 3, (20, 301), generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (1, 10, 100, 301):
        for logits, indices in zip(values.tolist(), top_k_indices(values, k).tolist(), strict=True):
            assert set(indices) == stable_top_k(logits, k)
