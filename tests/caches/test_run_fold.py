"""WeightedKV's folds, both forms, against the recurrence written as a loop (kernel: CUDA, or Triton's interpreter)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import new_state, relative

from fathom.caches import WeightedKV
from fathom.ops import kernels
from fathom.ops.run_merge import SMALLEST, fold_runs, run_merge

kernel = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loop(value, weight, discarded):
    """for i = 0, 1, …: a discarded slot i goes into i + 1, weighted by a_i and a_{i+1}. One head, float64."""
    value, weight = value.double().clone(), weight.double()
    for i in range(len(value) - 1):
        if discarded[i]:
            a, b = weight[i], weight[i + 1]
            share = a / max(a + b, SMALLEST)
            value[i + 1] = share * value[i] + (1 - share) * value[i + 1]
    return value


# slots that are discarded, of how many: none, one, runs at both ends, all before the last, around the kernel's tile
CASES = {
    "one slot": (1, []),
    "nothing": (9, []),
    "one": (9, [4]),
    "both ends": (40, [*range(3), 7, *range(30, 39)]),
    "longest": (129, [*range(128)]),
    "no successor": (20, [5, 6, 18, 19]),
    "a tile": (60, [*range(2, 17), *range(20, 36), *range(37, 54)]),
    "every second": (33, [*range(0, 32, 2)]),
}


def case(name, dtype, width, batch=2, groups=2):
    slots, gone = CASES[name]
    generator = torch.Generator().manual_seed(slots)
    value = torch.randn(batch, groups, slots, width, generator=generator).to(dtype)
    weight = torch.rand(batch, groups, slots, generator=generator) ** 4  # over many orders of magnitude
    weight[0, 0, ::3] = 0
    weight[1] *= 1e-14  # below SMALLEST
    weight[0, 1, slots // 2 :] = 0
    discarded = torch.zeros(batch, groups, slots, dtype=torch.bool)
    discarded[..., gone] = True
    if slots > 2:  # heads differ
        discarded[1, 1] = discarded[1, 1].flip(0)
    return value, weight, discarded


def check(found, value, weight, discarded, limit):
    for b, g in ((0, 0), (0, 1), (1, 0), (1, 1)):
        stay = ~discarded[b, g]
        expected = loop(value[b, g], weight[b, g], discarded[b, g])
        assert relative(found[b, g].double(), expected[stay]) < limit


@pytest.mark.parametrize("name", CASES)
def test_doubling_equals_the_loop(name):
    value, weight, discarded = case(name, torch.float64, 5)
    merged = run_merge(value, weight, discarded, max(1, int(discarded.sum(-1).max())))
    found = [[merged[b, g][~discarded[b, g]] for g in (0, 1)] for b in (0, 1)]
    for b, g in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = loop(value[b, g], weight[b, g], discarded[b, g])[~discarded[b, g]]
        assert relative(found[b][g], expected) < 1e-12


@kernel
@pytest.mark.parametrize("width", [1, 80, 128])
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_loop(name, dtype, limit, width):
    """Half precision: one rounding of the result: 2⁻¹¹ of it in fp16, 2⁻⁷ in bf16 (the interpreter cuts off)."""
    value, weight, discarded = case(name, dtype, width)
    kept = (~discarded).nonzero()[:, 2].view(2, 2, -1)
    held = value.clone().to(DEVICE)
    fold_runs(held, weight.to(DEVICE), kept.to(DEVICE))
    check(held.cpu().gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, width)), value, weight, discarded, limit)
    assert torch.equal(held.cpu()[discarded], value[discarded])


@kernel
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("options", [{}, {"granularity": "layer"}, {"prefill": "once"}, {"positions": "original"}])
def test_a_prompt_equals_the_pytorch_form(options, dtype, limit, monkeypatch):
    """Several internal chunks of a prompt: outputs and what is held."""
    served = []
    from fathom.ops.run_merge import kernel as run_fold

    fold = run_fold.fold_runs_
    monkeypatch.setattr(run_fold, "fold_runs_", lambda *args: served.append(True) or fold(*args))
    method = WeightedKV(**{"budget": 24, "n_sink": 2, "n_recent": 5, "chunk": 16, "positions": "original", **options})
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, heads, 90, 16, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2)]

    def run(kernel):
        monkeypatch.setattr(kernels, "TRITON", kernel)
        state = new_state(method)
        with torch.no_grad():
            return state.attend(*parts, 0.25), state

    expected, reference = run(False)
    assert not served
    found, state = run(True)
    assert len(served) == (1 if method.prefill == "once" else 5)
    assert torch.equal(state.key, reference.key)
    for left, right in ((found, expected), (state.value, reference.value), (state.received, reference.received)):
        assert relative(left.float(), right.float()) < limit
