"""The rotation kernel against complex numbers (CUDA, or Triton's interpreter)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from cache_cases import relative

from fathom.caches.rope import SlotRope

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rotary(torch.nn.Module):
    """Stand-in for a model's rotary module: `turned` channels, of which pairs are half of that apart."""

    def __init__(self, turned):
        super().__init__()
        self.frequency = 100.0 ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)

    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.frequency.to(x.device)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("width,turned", [(64, 64), (128, 128), (80, 80), (20, 12), (64, 16)])
@pytest.mark.parametrize("tokens,start,contiguous", [(1, 0, True), (1, 290, False), (16, 3, False), (45, 100, True)])
def test_kernel_turns_complex_numbers(tokens, start, contiguous, width, turned, dtype, limit, monkeypatch):
    """In half precision the table and the result are rounded (bf16 is cut off in the interpreter)."""
    from fathom.ops.rotary_slots import kernel as rotary_slots

    served, kernel = [], rotary_slots.rotate_slots
    monkeypatch.setattr(rotary_slots, "rotate_slots", lambda *args: served.append(True) or kernel(*args))
    x = torch.randn(2, tokens, 3, width, generator=torch.Generator().manual_seed(0)).transpose(1, 2).to(DEVICE, dtype)
    x = x.contiguous() if contiguous else x
    rotary = Rotary(turned)
    found = SlotRope(rotary)(x, start)
    assert served and found.dtype == dtype and found.is_contiguous()
    wide, half = x.double().cpu(), turned // 2
    angle = torch.arange(start, start + tokens)[:, None] * rotary.frequency
    z = torch.complex(wide[..., :half], wide[..., half:turned]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((z.real, z.imag, wide[..., turned:]), dim=-1)
    assert relative(found.double().cpu(), expected) < limit


def test_wide_numbers_and_gradients_take_the_plain_form():
    from fathom.ops.rotary_slots.kernel import serves

    cos = torch.ones(1, 4, 8)
    x = torch.ones(1, 2, 4, 8)
    assert serves(x, cos) and serves(x[..., :8], cos)
    assert not serves(x.double(), cos.double()) and not serves(x.requires_grad_(), cos)
    assert not serves(torch.ones(1, 2, 4, 16)[..., ::2], cos) and not serves(x.detach(), cos.expand(2, -1, -1))
