"""The kernel that gathers slots of several banks against one gather along the banks joined."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(90,), (7, 1, 90)], ids=["one bank", "three"])
@pytest.mark.parametrize("rows, width", [(1, 16), (3, 12), (3, 64)])
def test_slots_of_banks(rows, width, sizes, dtype):
    from fathom.ops.gather_slots.kernel import addresses, gather_slots

    generator = torch.Generator().manual_seed(0)
    banks = [[torch.randn(rows, 2, n, width, generator=generator).to(DEVICE, dtype) for _ in range(4)] for n in sizes]
    banks[-1] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in banks[-1]]  # heads beside each other
    index = torch.randint(0, sum(sizes), (3, 77), generator=generator).to(DEVICE)
    found = gather_slots(addresses(banks), banks[0][0], index)
    assert found.dtype == dtype
    for number, x in enumerate(found):
        every = torch.cat([bank[number] for bank in banks], dim=2).expand(3, -1, -1, -1)
        assert torch.equal(x, every.gather(2, index[:, None, :, None].expand(-1, 2, -1, width)))


def test_what_it_does_not_serve():
    from fathom.ops.gather_slots.kernel import addresses

    x = torch.randn(1, 2, 5, 16, device=DEVICE)
    for alone in (x[..., ::2], x[..., 1:9], x[..., :3]):
        assert addresses([[alone]]) is None
    for banks in ([[x], [x[..., :8]]], [[x], [x[:, :1]]], [[x, x.double()]], [[x, x[:, :, :4]]]):
        assert addresses(banks) is None
    wanted = torch.randn(1, 2, 5, 16, device=DEVICE, requires_grad=True)
    assert addresses([[x, wanted]]) is None
    with torch.no_grad():
        assert addresses([[x, wanted]]) is not None


@pytest.mark.parametrize("together", [2, 8])
def test_layers_in_parts(together):
    """What fills the cache, against its form without the kernel."""
    from fathom.ops import kernels
    from fathom.ops.gather_slots import slots_of

    generator = torch.Generator().manual_seed(0)
    banks = [
        [tuple(torch.randn(1, 2, n, 16, generator=generator).to(DEVICE) for _ in range(2)) for _ in range(5)]
        for n in (9, 30)
    ]
    index = torch.randint(0, 39, (3, 21), generator=generator).to(DEVICE)
    found = [*slots_of(banks, together)(index)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TRITON", False)
        wanted = [*slots_of(banks)(index)]
    assert len(found) == len(wanted) == 5
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
