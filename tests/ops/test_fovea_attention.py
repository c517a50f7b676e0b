"""The kernels of fine-to-coarse attention against the form that gathers nodes and writes out all scores."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from fathom.ops import fovea_attention as op
from fathom.ops.fovea_attention import plain
from tiny import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cpu" if INTERPRETED else "cuda"


def both(dtype, length, rows, farthest, block_len=16, heads=2, width=16, pool="count", mass=False, **options):
    """Outputs and gradients by the kernels in `dtype`, and by the plain form in float64."""
    from fathom.ops.fovea_attention import kernel

    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    given = [numbers(len(rows), length, heads, width) for _ in range(3)]
    bias, target = numbers(heads, 2 * farthest + 1), numbers(len(rows), length, heads, width)
    real = (torch.arange(length) < torch.tensor(rows)[:, None]).to(DEVICE)
    lists = op.reads(real, length, given[0].device, block_len=block_len, **options)
    target = target * real[..., None, None]  # what padding puts out is read by nobody
    if length % block_len:
        given = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -length % block_len)) for x in given]
        target = torch.nn.functional.pad(target, (0, 0, 0, 0, 0, -length % block_len))
    found = []
    for form, kind in ((kernel, dtype), (plain, torch.float64)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in given] + [bias.clone().requires_grad_()]
        more = {"block_len": block_len, "stop_level": options["stop_level"], "pool": pool, "preserve_mass": mass}
        out = form.fovea_attention(*leaves[:3], leaves[3].to(kind), lists, **more)
        (out * target.to(dtype).to(kind)).sum().backward()
        whole = torch.nn.functional.pad(real, (0, out.shape[1] - length))
        found.append([out[whole].double(), *(leaf.grad.double() for leaf in leaves)])
    return zip(*found, strict=True)


PLAIN = {"wing_size": 1, "stop_level": 20, "boundary": "drop", "steps": "gradual"}


@pytest.mark.parametrize(("length", "rows", "farthest", "changes"), [
    (16 * 11, [176], 16, {}),  # the bias is constant past the direct neighbours
    (16 * 11, [176], 40, {}),  # and here past the third
    (16 * 34, [544], 16, {"heads": 1, "stop_level": 20}),  # means of 32 tokens, longer than a block
    (16 * 7, [112], 9, {"steps": "two", "stop_level": 3}),
    (150, [150, 70, 33], 16, {"boundary": "fill", "wing_size": 2, "mass": True}),
    (100, [100, 20], 16, {"pool": "pairwise"}),
    (100, [100], 16, {"stop_level": 1}),
])  # fmt: skip
def test_kernels_are_the_plain_form(length, rows, farthest, changes):
    for ours, wanted in both(torch.float32, length, rows, farthest, **{**PLAIN, **changes}):
        assert_close(ours, wanted, 1e-4)


def test_in_half_precision():
    short = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no products in bf16
    for ours, wanted in both(short, 16 * 5, [80], 16, **PLAIN):
        assert (ours - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.skipif(INTERPRETED, reason="large tiles take minutes in the interpreter")
@pytest.mark.parametrize("farthest", [128, 300])
def test_the_papers_blocks(farthest):
    for ours, wanted in both(torch.bfloat16, 2000, [2000, 1111], farthest, block_len=128, width=64, **PLAIN):
        assert (ours - wanted).norm() < 0.02 * wanted.norm()
