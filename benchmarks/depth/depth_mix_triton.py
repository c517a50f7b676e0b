"""Depth-Attention's mix as one Triton kernel, forward and backward: the compiled form's rival, kept to be measured.

    out = Σ_j α_j v_j,   α = softmax_j( <q̄, k_j> / √D )          ops/depth_mix.py, its default form

`benchmarks/depth/depth_methods.py --contestants vanilla depth_attention "depth_attention, Triton"` times it in a
training step. A program takes some tokens of a key/value head: it reads q̄'s query heads and every k_j and v_j once,
keeps α in registers, and recomputes it for the gradients

    dα_j = <G, v_j>,   ds_j = α_j (dα_j − Σ_m α_m dα_m) / √D,   dq̄ = Σ_j ds_j k_j,   dk_j = ds_j q̄,   dv_j = α_j G.

What it cannot do is what the compiler does beside the mix: rotate in the same kernel, and add a source's gradient to
those of its other readers while it is in registers.
"""

from __future__ import annotations

from types import MethodType

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

MOST = 3  # candidates: two sources and the layer itself, as the default schedule has
BLOCK = 32


@triton.jit
def _mean_query(query, q_b, q_h, q_t, batch, group, token, column, exists, GROUPS: tl.constexpr):
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for member in tl.static_range(GROUPS):
        at = query + batch * q_b + (group * GROUPS + member) * q_h + token[:, None].to(tl.int64) * q_t
        total += tl.load(at + column[None, :], mask=exists, other=0.0).to(tl.float32)
    return total / GROUPS


@triton.jit
def _weights(s0, s1, s2, COUNT: tl.constexpr):
    top = tl.maximum(s0, s1)
    if COUNT == 3:
        top = tl.maximum(top, s2)
    e0, e1 = tl.exp(s0 - top), tl.exp(s1 - top)
    e2 = tl.zeros_like(e0)
    if COUNT == 3:
        e2 = tl.exp(s2 - top)
    total = e0 + e1 + e2
    return e0 / total, e1 / total, e2 / total


@triton.jit
def _forward(
    query, k0, k1, k2, v0, v1, v2, out,
    q_b, q_h, q_t, k0_b, k0_h, k0_t, k1_b, k1_h, k1_t, k2_b, k2_h, k2_t,
    v0_b, v0_h, v0_t, v1_b, v1_h, v1_t, v2_b, v2_h, v2_t, o_b, o_h, o_t,
    tokens, heads, scale,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, group = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    token, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    exists = (token < tokens)[:, None]
    row = token[:, None].to(tl.int64)
    q = _mean_query(query, q_b, q_h, q_t, batch, group, token, column, exists, GROUPS)
    a = tl.load(k0 + batch * k0_b + group * k0_h + row * k0_t + column[None, :], mask=exists, other=0.0)
    b = tl.load(k1 + batch * k1_b + group * k1_h + row * k1_t + column[None, :], mask=exists, other=0.0)
    s0 = tl.sum(q * a.to(tl.float32), 1) * scale
    s1 = tl.sum(q * b.to(tl.float32), 1) * scale
    s2 = tl.zeros_like(s0)
    if COUNT == 3:
        c = tl.load(k2 + batch * k2_b + group * k2_h + row * k2_t + column[None, :], mask=exists, other=0.0)
        s2 = tl.sum(q * c.to(tl.float32), 1) * scale
    w0, w1, w2 = _weights(s0, s1, s2, COUNT)
    x = tl.load(v0 + batch * v0_b + group * v0_h + row * v0_t + column[None, :], mask=exists, other=0.0)
    y = tl.load(v1 + batch * v1_b + group * v1_h + row * v1_t + column[None, :], mask=exists, other=0.0)
    mixed = w0[:, None] * x.to(tl.float32) + w1[:, None] * y.to(tl.float32)
    if COUNT == 3:
        z = tl.load(v2 + batch * v2_b + group * v2_h + row * v2_t + column[None, :], mask=exists, other=0.0)
        mixed += w2[:, None] * z.to(tl.float32)
    tl.store(out + batch * o_b + group * o_h + row * o_t + column[None, :], mixed.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _backward(
    query, k0, k1, k2, v0, v1, v2, grad, dq, dk0, dk1, dk2, dv0, dv1, dv2,
    q_b, q_h, q_t, k0_b, k0_h, k0_t, k1_b, k1_h, k1_t, k2_b, k2_h, k2_t,
    v0_b, v0_h, v0_t, v1_b, v1_h, v1_t, v2_b, v2_h, v2_t, g_b, g_h, g_t,
    tokens, heads, scale,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, group = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    token, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    exists = (token < tokens)[:, None]
    row = token[:, None].to(tl.int64)
    q = _mean_query(query, q_b, q_h, q_t, batch, group, token, column, exists, GROUPS)
    g = tl.load(grad + batch * g_b + group * g_h + row * g_t + column[None, :], mask=exists, other=0.0).to(tl.float32)
    at_k0 = batch * k0_b + group * k0_h + row * k0_t + column[None, :]
    at_k1 = batch * k1_b + group * k1_h + row * k1_t + column[None, :]
    at_k2 = batch * k2_b + group * k2_h + row * k2_t + column[None, :]
    at_v0 = batch * v0_b + group * v0_h + row * v0_t + column[None, :]
    at_v1 = batch * v1_b + group * v1_h + row * v1_t + column[None, :]
    at_v2 = batch * v2_b + group * v2_h + row * v2_t + column[None, :]
    a = tl.load(k0 + at_k0, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(k1 + at_k1, mask=exists, other=0.0).to(tl.float32)
    x = tl.load(v0 + at_v0, mask=exists, other=0.0).to(tl.float32)
    y = tl.load(v1 + at_v1, mask=exists, other=0.0).to(tl.float32)
    s0, s1, d0, d1 = tl.sum(q * a, 1) * scale, tl.sum(q * b, 1) * scale, tl.sum(g * x, 1), tl.sum(g * y, 1)
    s2, d2 = tl.zeros_like(s0), tl.zeros_like(s0)
    if COUNT == 3:
        c = tl.load(k2 + at_k2, mask=exists, other=0.0).to(tl.float32)
        z = tl.load(v2 + at_v2, mask=exists, other=0.0).to(tl.float32)
        s2, d2 = tl.sum(q * c, 1) * scale, tl.sum(g * z, 1)
    w0, w1, w2 = _weights(s0, s1, s2, COUNT)
    mean = w0 * d0 + w1 * d1 + w2 * d2
    t0, t1, t2 = w0 * (d0 - mean) * scale, w1 * (d1 - mean) * scale, w2 * (d2 - mean) * scale
    kind = dq.dtype.element_ty
    dmean = t0[:, None] * a + t1[:, None] * b
    tl.store(dk0 + at_k0, (t0[:, None] * q).to(kind), mask=exists)
    tl.store(dk1 + at_k1, (t1[:, None] * q).to(kind), mask=exists)
    tl.store(dv0 + at_v0, (w0[:, None] * g).to(kind), mask=exists)
    tl.store(dv1 + at_v1, (w1[:, None] * g).to(kind), mask=exists)
    if COUNT == 3:
        dmean += t2[:, None] * c
        tl.store(dk2 + at_k2, (t2[:, None] * q).to(kind), mask=exists)
        tl.store(dv2 + at_v2, (w2[:, None] * g).to(kind), mask=exists)
    for member in tl.static_range(GROUPS):
        at = batch * q_b + (group * GROUPS + member) * q_h + row * q_t + column[None, :]
        tl.store(dq + at, (dmean / GROUPS).to(kind), mask=exists)


def _launch(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple:
    """(grid, candidates padded to MOST, their strides, constants)."""
    batch, heads, tokens, width = query.shape
    groups = keys[0].shape[1]
    for tensor in (query, *keys, *values):  # gradients get the layout of their tensors
        assert torch.empty_like(tensor).stride() == tensor.stride()
    padded = [*keys, *keys[:1] * (MOST - len(keys))], [*values, *values[:1] * (MOST - len(values))]
    strides = [s for tensor in (query, *padded[0], *padded[1]) for s in tensor.stride()[:3]]
    constants = {"COUNT": len(keys), "GROUPS": heads // groups, "WIDTH": width, "BLOCK": BLOCK}
    return (triton.cdiv(tokens, BLOCK), batch * groups), padded, strides, (tokens, groups, width**-0.5), constants


@triton_op("fathom_benchmarks::depth_mix", mutates_args={})
def depth_mix(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """`query` [B, H, T, D]; two or three candidates [B, G, T, D], the layer itself last. Returns [B, G, T, D]."""
    grid, (k, v), strides, sizes, constants = _launch(query, keys, values)
    out = torch.empty_like(values[-1])
    wrap_triton(_forward)[grid](query, *k, *v, out, *strides, *out.stride()[:3], *sizes, **constants)
    return out


@triton_op("fathom_benchmarks::depth_mix_backward", mutates_args={})
def depth_mix_backward(query: Tensor, keys: list[Tensor], values: list[Tensor], grad: Tensor) -> list[Tensor]:
    """dq, then dk and dv of every candidate."""
    grid, (k, v), strides, sizes, constants = _launch(query, keys, values)
    dq, dk, dv = torch.empty_like(query), [torch.empty_like(x) for x in keys], [torch.empty_like(x) for x in values]
    empty = dk[:1] * (MOST - len(dk))
    more = (*dk, *empty, *dv, *empty)
    wrap_triton(_backward)[grid](query, *k, *v, grad, dq, *more, *strides, *grad.stride()[:3], *sizes, **constants)
    return [dq, *dk, *dv]


def _save(ctx, inputs, output) -> None:
    query, keys, values = inputs
    ctx.save_for_backward(query, *keys, *values)


def _gradients(ctx, grad: Tensor):
    query, *rest = ctx.saved_tensors
    count = len(rest) // 2
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    dq, *gradients = depth_mix_backward(query, rest[:count], rest[count:], grad)
    return dq, gradients[:count], gradients[count:]


depth_mix.register_autograd(_gradients, setup_context=_save)


def use(model: torch.nn.Module) -> torch.nn.Module:
    """The model with this kernel in its Depth-Attention mixer (softmax weights, values mixed, at most two sources)."""

    def forward(self, query, key, value, sources, layer):
        if not sources:
            return key, value, (key, value)
        mixed = depth_mix(query, [*(s[0] for s in sources), key], [*(s[1] for s in sources), value])
        return key, mixed, (key, mixed)

    mixer = model.model.mixer
    mixer.forward = MethodType(forward, mixer)
    return model


def check(device: str) -> float:
    """Largest difference from ops/depth_mix.py in fp32, output and gradients, relative to the largest entry."""
    from fathom.ops import depth_mix as reference

    worst = 0.0
    for heads, groups, count in ((8, 2, 2), (4, 4, 3)):
        make = lambda h: torch.randn(2, 77, h, 64, device=device).transpose(1, 2).requires_grad_()  # noqa: E731
        query, keys, values = (
            make(heads),
            [make(groups) for _ in range(count)],
            [make(groups) for _ in range(count)],
        )
        out = depth_mix(query, keys, values)
        wanted = reference.depth_mix(reference.depth_weights(query, keys), values)
        grad, inputs = torch.randn_like(out), [query, *keys, *values]
        pairs = [(out, wanted), *zip(*(torch.autograd.grad(x, inputs, grad) for x in (out, wanted)), strict=True)]
        worst = max(worst, *(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    return worst
