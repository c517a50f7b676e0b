"""The kernel that moves the kept slots, against one slot at a time (CUDA, or Triton's interpreter)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import new_state

from fathom.caches import H2O, TOVA, StreamingLLM, TreeKV
from fathom.ops import kernels

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("statistics", [[], [torch.float32], [torch.float32, torch.int32]])
@pytest.mark.parametrize("index_shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("widths,held,stays", [((16, 16), 33, 17), ((80, 24), 20, 16), ((4, 64), 5, 1)])
def test_kernel_takes_the_slots(widths, held, stays, index_shape, statistics, dtype):
    from fathom.ops.take_slots.kernel import serves, take_slots

    generator = torch.Generator().manual_seed(held)
    sources = [torch.randn(2, 3, held, width, generator=generator).to(DEVICE, dtype) for width in widths]
    sources += [(100 * torch.rand(2, 3, held, generator=generator)).to(DEVICE, kind) for kind in statistics]
    index = torch.stack(
        [torch.randperm(held, generator=generator)[:stays] for _ in range(index_shape[0] * index_shape[1])]
    )
    index = index.view(*index_shape, stays).to(DEVICE)
    targets = [source.new_zeros(2, 3, stays, *source.shape[3:]) for source in sources]
    assert serves(sources, index)
    take_slots(sources, index, targets)
    for source, target in zip(sources, targets):
        for b in range(2):
            for g in range(3):
                for place in range(stays):
                    slot = index[b % index_shape[0], g % index_shape[1], place]
                    assert torch.equal(target[b, g, place], source[b, g, slot])


@pytest.mark.parametrize(
    "method",
    [
        StreamingLLM(budget=24, n_sink=3, positions="original"),
        TOVA(budget=24),
        H2O(budget=24, n_recent=7, granularity="layer", positions="original"),
        TreeKV(budget=24, n_sink=2, n_recent=9, block=2, positions="original"),
    ],
    ids=lambda method: method.name,
)
def test_calls_keep_the_same_slots_at_the_same_place(method, monkeypatch):
    """Calls of several tokens: what is held is that of the PyTorch form, and a full cache stays where it is."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, heads, 80, 16, generator=generator).to(DEVICE) for heads in (4, 2, 2)]

    def run(kernel):
        monkeypatch.setattr(kernels, "TRITON", kernel)
        state, places = new_state(method), []
        with torch.no_grad():
            for part in zip(*(x.split([40, 9, 9, 22], 2) for x in parts)):
                state.attend(*part, 0.25)
                places.append([x.data_ptr() for name, x in state.tensors() if name in ("key", "value", "received")])
        assert places[2] == places[3]
        return state

    reference, state = run(False), run(True)
    for (name, found), (_, expected) in zip(state.tensors(), reference.tensors(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
