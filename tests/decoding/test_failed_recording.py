"""A recording that fails leaves the device as it was: random numbers go on, and the next recording works."""

import pytest
import torch

from fathom.decoding.graphs import CudaGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def waits():
    torch.cuda.synchronize()


def has_no_memory():
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("fails", [waits, has_no_memory])
def test_a_failed_recording_breaks_nothing_after_it(fails):
    recorder = CudaGraphs()
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.manual_seed(0)
    first = torch.randn(4, device="cuda")
    expected = torch.randn(4, device="cuda")

    torch.cuda.manual_seed(0)
    assert torch.equal(torch.randn(4, device="cuda"), first)

    def broken():
        x.add_(torch.rand(8, device="cuda"))
        fails()

    with pytest.raises(RuntimeError):
        recorder.record(broken)
    assert torch.equal(torch.randn(4, device="cuda"), expected)  # as if nothing had been tried

    replay = recorder.record(lambda: y.copy_(x * 2))
    replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
