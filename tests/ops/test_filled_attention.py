"""Attention over buffers with room, against a float64 softmax over the visible slots of each row alone."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from fathom.ops import kernels
from fathom.ops.filled_attention import filled_attention
from tiny import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL = find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# rows, query heads, key heads, room, width, width of values
SHAPES = [(1, 4, 4, 64, 16, 16), (2, 8, 2, 200, 64, 64), (3, 6, 2, 77, 24, 40), (1, 14, 2, 3000, 80, 80)]


def expected(query, key, value, visible, scaling):
    """Softmax over the visible slots, a row and a head at a time."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for row in range(len(query)):
        slots = visible[row, 0, 0].nonzero()[:, 0]
        for head in range(query.shape[1]):
            held = head * key.shape[1] // query.shape[1]
            scores = key[row, held, slots].double() @ query[row, head, 0].double() * scaling
            out[row, head, 0] = scores.softmax(0) @ value[row, held, slots].double()
    return out


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.skipif(
    not KERNEL, reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)"))])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_visible_slots_count(shape, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "TRITON", kernel)
    rows, heads, groups, room, width, value_width = shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(size, generator=generator)
        for size in ((rows, heads, 1, width), (rows, groups, room, width), (rows, groups, room, value_width))
    )
    visible = torch.rand(rows, 1, 1, room, generator=generator) < 0.7
    visible[..., room - room // 8 :] = False  # room that is not filled
    visible[-1, ..., : room // 2] = False  # pads
    visible[..., room // 2] = True
    want = expected(query, key, value, visible, width**-0.5)
    half = torch.float16 if kernel and INTERPRETED else torch.bfloat16  # Triton's interpreter multiplies bf16 wrongly
    for dtype, tolerance in ((torch.float32, 2e-6), (half, 2e-2)):
        given = [x.to(DEVICE, dtype) for x in (query, key, value)]
        assert_close(filled_attention(*given, visible.to(DEVICE), width**-0.5).cpu().double(), want, tolerance)


@pytest.mark.skipif(not KERNEL, reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)")
def test_what_lies_in_hidden_slots_is_never_read():
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 96, 16), torch.randn(1, 2, 96, 16)
    visible = torch.arange(96).view(1, 1, 1, 96) < 50
    key[:, :, 50:], value[:, :, 50:] = float("nan"), float("nan")
    given = [x.to(DEVICE) for x in (query, key, value, visible)]
    assert_close(filled_attention(*given, 0.25).cpu().double(), expected(query, key, value, visible, 0.25), 2e-6)
