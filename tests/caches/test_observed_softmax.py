"""Weights and received attention, both forms, against a loop over queries (kernel: CUDA, or Triton's interpreter)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import new_state, relative

from fathom.caches import H2O, TreeKV, WeightedKV
from fathom.ops import kernels
from fathom.ops.cached_attention import observed_attention
from fathom.ops.observed_softmax import weigh

needs_kernel = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(4, 1, 1), (1, 1, 33), (2, 5, 5), (4, 7, 40), (3, 8, 64), (8, 6, 130)]  # query heads of a group, m, n


def loop(scores, m, scaling, reduce):
    """One head and one query at a time, float64."""
    heads, n = scores.shape[0] // m, scores.shape[1]
    weights, received = torch.zeros(heads, m, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(m):
        seen = n - m + i + 1
        for h in range(heads):
            e = (scaling * scores[h * m + i, :seen].double()).exp()
            weights[h, i, :seen] = e / e.sum()
        of_heads = weights[:, i]
        received += of_heads.max(0).values if reduce == "max" else of_heads.sum(0) / (heads if reduce == "mean" else 1)
    return weights.flatten(0, 1), received


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("heads,m,n", SHAPES)
@pytest.mark.parametrize(
    "kernel,dtype,limit",
    [
        (False, torch.float64, 1e-12),
        pytest.param(True, torch.float32, 1e-5, marks=needs_kernel),
        pytest.param(True, torch.float16, 1e-3, marks=needs_kernel),
        pytest.param(True, torch.bfloat16, 8e-3, marks=needs_kernel),
    ],
)
def test_weights_and_sums_equal_a_loop(heads, m, n, reduce, kernel, dtype, limit):
    """In half precision the weights are rounded once, the sums are not."""
    scores = 3 * torch.randn(2, 2, heads * m, n, generator=torch.Generator().manual_seed(n))
    scores = scores.to(dtype)
    weights, received = weigh(scores.clone().to(DEVICE if kernel else "cpu"), m, 0.7, reduce)
    assert received.dtype == (torch.float32 if kernel else dtype)
    for b in range(2):
        for g in range(2):
            expected, total = loop(scores[b, g], m, 0.7, reduce)
            assert relative(weights[b, g].cpu().double(), expected) < limit
            assert relative(received[b, g].cpu().double(), total) < min(limit, 1e-5)


@needs_kernel
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    "method",
    [
        WeightedKV(budget=24, n_sink=2, n_recent=5, chunk=16, positions="original"),
        H2O(budget=24, n_recent=7, group_reduce="max", positions="original"),
        TreeKV(budget=24, n_sink=2, n_recent=9, block=2, positions="original"),
    ],
    ids=lambda method: method.name,
)
def test_a_prompt_equals_the_pytorch_form(method, dtype, limit, monkeypatch):
    """Output and statistics of a call that only grows the cache and of one that compresses it; in bf16, where rounding
    may choose another slot, the first one only."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, heads, 60, 16, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2)]

    def run(kernel, tokens):
        monkeypatch.setattr(kernels, "TRITON", kernel)
        state = new_state(method)
        with torch.no_grad():
            first, rest = ([x[:, :, part] for x in parts] for part in (slice(0, 20), slice(20, tokens)))
            return torch.cat([state.attend(*x, 0.25) for x in (first, rest)], 2), state

    for tokens in (24, 60) if dtype == torch.float32 else (24,):
        (expected, reference), (found, state) = run(False, tokens), run(True, tokens)
        assert relative(found.float(), expected.float()) < limit
        assert relative(state.received, reference.received) < limit
        assert torch.equal(state.key, reference.key)


@pytest.mark.parametrize("last", [3, 6])
def test_dropped_weights_do_not_count_as_less_attention_received(last):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    output, received = observed_attention(query, key, value, 0.3, last)
    dropped, same = observed_attention(query, key, value, 0.3, last, dropout=0.5)
    assert torch.equal(received, same) and not torch.allclose(output, dropped)
    drawn = torch.stack([observed_attention(query, key, value, 0.3, last, dropout=0.5)[0] for _ in range(2000)])
    assert relative(drawn.mean(0), output) < 0.1  # as 1 / (1 − p) makes up for what is dropped
