"""Rotary positions (RoPE, arXiv 2104.09864), the half-split layout of Llama and GPT-NeoX.

    y = x · cos + rotate_half(x) · sin,   rotate_half([a, b]) = [−b, a]

Only the first `cos.shape[-1]` channels turn (partial rotary of GPT-NeoX). The halves change places by a roll, and the
sign is the sine's: compiled, the backward pass is one kernel then. That of slices put together again needed a copy into
the layout that the projection's gradient wants, by itself 1 % of a training step (768 × 12, H100).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def signed(sin: Float[Tensor, "#B T *groups R"]) -> Float[Tensor, "#B T *groups R"]:
    """[−sin₁, sin₂]: what `turn` takes, made once for all that turn by the same positions."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def _turn(x: Tensor, cos: Tensor, signed_sin: Tensor, dtype: torch.dtype) -> Tensor:
    turned = torch.addcmul(x * cos, x.roll(cos.shape[-1] // 2, dims=-1), signed_sin)
    # not .to() where it changes nothing: of that, torch 2.11's compiler gives `_Turn` a gradient of zeros
    return turned if turned.dtype == dtype else turned.to(dtype)


class _Turn(torch.autograd.Function):
    """The same, with a backward pass that reads the gradient as it comes and leaves x's as a projection wants it: left
    to the compiler, a gradient that is a sum goes through memory in fp32, and x's is copied into another layout."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, signed_sin: Tensor, dtype: torch.dtype) -> Tensor:
        return _turn(x, cos, signed_sin, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, cos, signed_sin, _ = inputs
        ctx.save_for_backward(cos, signed_sin)
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, signed_sin = (x.transpose(1, 2) for x in ctx.saved_tensors)
        grad = grad.transpose(1, 2)  # [B, T, heads, D]
        turned = (grad * signed_sin).roll(cos.shape[-1] // 2, dims=-1)
        return (grad * cos + turned).to(ctx.dtype).transpose(1, 2), None, None, None


def by_head(table: Float[Tensor, "#B T *groups R"], heads: int) -> Float[Tensor, "#B n T R"]:
    """A table as heads read it: one for all, or one for every `heads`/G heads in a row."""
    if table.ndim == 3:
        return table.unsqueeze(1)
    return table.transpose(1, 2).repeat_interleave(heads // table.shape[2], dim=1)


def turn(
    x: Float[Tensor, "B heads T D"],
    cos: Float[Tensor, "#B T *groups R"],
    signed_sin: Float[Tensor, "#B T *groups R"],
    dtype: torch.dtype,
) -> Float[Tensor, "B heads T D"]:
    """`rotate` in `dtype`, given the signed sine."""
    width, heads = cos.shape[-1], x.shape[1]
    cos, signed_sin = by_head(cos, heads), by_head(signed_sin, heads)
    form = _Turn.apply if torch.is_grad_enabled() and x.requires_grad else _turn
    if width == x.shape[-1]:
        return form(x, cos, signed_sin, dtype)
    return torch.cat((form(x[..., :width], cos, signed_sin, dtype), x[..., width:].to(dtype)), dim=-1)


def rotate(
    x: Float[Tensor, "B heads T D"], cos: Float[Tensor, "#B T *groups R"], sin: Float[Tensor, "#B T *groups R"]
) -> Float[Tensor, "B heads T D"]:
    """Rotate queries or keys by their positions; R ≤ D channels turn, the rest passes through (cos and sin of batch 1
    serve every row, without `groups` every head)."""
    return turn(x, cos, signed(sin), torch.promote_types(x.dtype, cos.dtype))


def quarter_turn(x: Float[Tensor, "*batch D"], width: int, passthrough: str = "keep") -> Float[Tensor, "*batch D"]:
    """J: −π/2 in every plane of the first `width` channels, [a, b] → [b, −a], which is −rotate_half. It commutes with
    `rotate`. The other channels: "keep" or "zero"."""
    first, second = x[..., :width].chunk(2, dim=-1)
    if width == x.shape[-1]:
        return torch.cat((second, -first), dim=-1)
    rest = x[..., width:]
    return torch.cat((second, -first, rest if passthrough == "keep" else torch.zeros_like(rest)), dim=-1)
