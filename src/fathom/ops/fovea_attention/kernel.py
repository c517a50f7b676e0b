"""Fine-to-coarse attention that reads every node where it lies: Triton kernels, both ways.

Nodes overlap, and a mean of 2^p tokens is the same in all that hold it. So level p is kept once, as the means

    x_p[i] = mean of tokens i·u … i·u + 2^p − 1,   u = min(2^p, L);   node j: rows x_p[j·L/u + r·2^p/u],  r < L

which makes about 2N vectors of all levels together, where whole nodes would be N a level. A program takes the queries
of a block and one head, and walks over their nodes, of which those around the own block have a bias by distance, and
the others one number a side. Scores and sums are in fp32. Gradients of the means are added up in fp32 by atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from fathom.ops.fovea_attention.nodes import Reads, addresses, levels_of

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite, so that a query may have seen nothing yet
TILE = 64  # keys that a program takes at a time


def means(
    key: Float[Tensor, "B N h d"], value: Float[Tensor, "B N h d"], reads: Reads, size: int, levels: int, pool: str
) -> tuple[Float[Tensor, "B V 2 h d"], Float[Tensor, "#B V"]]:
    """Keys and values of all levels, one after the other, and how many real tokens each stands for."""
    x = torch.stack((key, value), dim=2)
    real = torch.ones(1, x.shape[1], device=x.device) if reads.real is None else reads.real.float()
    if reads.real is not None and pool == "count":
        x = x * real[..., None, None, None].to(x.dtype)
    count, parts, counts = real, [x], [real]
    wide = torch.promote_types(x.dtype, torch.float32)
    for level in range(1, levels):
        first, second = halves(x, level, size)
        count = torch.add(*halves(count, level, size))
        x = first.to(wide) + second
        if pool == "pairwise":
            one = (first[..., 0, 0] == 0) != (second[..., 0, 0] == 0)
            x = x / (2 - one.to(wide))[..., None, None]
            parts.append(x.to(key.dtype))
        else:
            parts.append((x / count.clamp(min=1)[..., None, None, None]).to(key.dtype))
        counts.append(count)
    return torch.cat(parts, dim=1), torch.cat(counts, dim=1)


def means_of_all(key: Float[Tensor, "B N h d"], value: Float[Tensor, "B N h d"], size: int, levels: int) -> Tensor:
    """`means` for rows without padding: each mean is that of two halves, which takes a few launches for each level."""
    x = torch.stack((key, value), dim=2)
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [x]
    for level in range(1, levels):
        if 2**level <= size:
            x = x.unflatten(1, (-1, 2)).mean(2, dtype=wide)
        else:
            x = torch.lerp(*halves(x.to(wide), level, size), 0.5)
        parts.append(x.to(key.dtype))
    return torch.cat(parts, dim=1)


def halves(x: Tensor, level: int, size: int) -> tuple[Tensor, Tensor]:
    """The two vectors of the level below that each vector of a level is made of. A level has half as many as the one
    below, or one a block as before."""
    if 2**level <= size:
        return x[:, ::2], x[:, 1::2]
    shift = 2 ** (level - 1) // size
    return x[:, :-shift], x[:, shift:]


def fovea_attention(
    query: Float[Tensor, "B N h d"],
    key: Float[Tensor, "B N h d"],
    value: Float[Tensor, "B N h d"],
    bias: Float[Tensor, "h 2*D+1"],
    reads: Reads,
    *,
    block_len: int,
    stop_level: int,
    pool: str,
    preserve_mass: bool,
) -> Float[Tensor, "B N h d"]:
    """The equation, over N tokens in whole blocks."""
    levels = levels_of(query.shape[1] // block_len, stop_level)
    counts = None
    if reads.real is None and not preserve_mass and pool == "count":
        vectors = means_of_all(key, value, block_len, levels)
    else:
        vectors, counts = means(key, value, reads, block_len, levels, pool)
    places, ends = addresses(reads, query.shape[1] // block_len, block_len, levels)
    return _Attention.apply(query, vectors, bias, counts, places, ends, block_len, preserve_mass)


@triton.jit
def _scores(q, k, counts, bias, first, stride, slot, j, row, at, k_v, COUNTED: tl.constexpr, MASS: tl.constexpr,
            FARTHEST: tl.constexpr, SIZE: tl.constexpr, NEAR: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Where keys `j` and on of a node lie, the keys as columns, and their scores in base 2."""
    step = j + tl.arange(0, KEYS)
    place = (first + step * stride).to(tl.int64)
    columns = tl.load(k + place[None, :] * k_v + at[:, None])
    s = tl.dot(q, columns, input_precision="ieee")
    if NEAR:
        distance = slot * SIZE + step[None, :] - row[:, None]
        s += tl.load(bias + FARTHEST + tl.minimum(tl.maximum(distance, -FARTHEST), FARTHEST))
    else:
        s += tl.load(bias + tl.where(slot > 0, 2 * FARTHEST, 0))
    s *= LOG2_E
    if COUNTED:
        number = tl.load(counts + place)
        if MASS:
            s += tl.log2(tl.maximum(number, 1.0))[None, :]
        s = tl.where(number[None, :] > 0, s, LOWEST)
    return place, columns, s


@triton.jit
def _sweep(acc, top, total, q, k, v, counts, bias, places, begin, end, own, row, at, k_v,
           COUNTED: tl.constexpr, MASS: tl.constexpr, FARTHEST: tl.constexpr, SIZE: tl.constexpr, NEAR: tl.constexpr,
           KEYS: tl.constexpr):  # fmt: skip
    """Online softmax over the nodes `begin` to `end` of the list."""
    PARTS: tl.constexpr = SIZE // KEYS
    for t in range(begin * PARTS, end * PARTS):
        node = t // PARTS
        first, stride = tl.load(places + 2 * node), tl.load(places + 2 * node + 1)
        place, _, s = _scores(q, k, counts, bias, first, stride, node - own, t % PARTS * KEYS, row, at, k_v,
                              COUNTED, MASS, FARTHEST, SIZE, NEAR, KEYS)  # fmt: skip
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(p, 1)
        values = tl.load(v + place[:, None] * k_v + at[None, :])
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit
def _forward(q, k, v, counts, bias, places, ends, o, lse, blocks, heads, most, q_b, q_n, k_b, k_v, count_b, list_b,
             COUNTED: tl.constexpr, MASS: tl.constexpr, FARTHEST: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
             WIDTH: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    row, at = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    token = (block * SIZE + row).to(tl.int64)
    entry = batch.to(tl.int64) * q_b + token[:, None] * q_n + head * WIDTH + at[None, :]
    query = tl.load(q + entry)
    k += batch.to(tl.int64) * k_b + head * WIDTH
    v += batch.to(tl.int64) * k_b + head * WIDTH
    counts += batch.to(tl.int64) * count_b
    bias += head * (2 * FARTHEST + 1)
    places += 2 * (batch * list_b + block * most)
    ends += 2 * (batch * list_b // most + block)
    own, number = tl.load(ends), tl.load(ends + 1)
    low, high = tl.minimum(tl.maximum(own - WIDE, 0), number), tl.minimum(own + WIDE + 1, number)
    acc = tl.zeros([SIZE, WIDTH], tl.float32)
    top, total = tl.full([SIZE], LOWEST, tl.float32), tl.zeros([SIZE], tl.float32)
    acc, top, total = _sweep(acc, top, total, query, k, v, counts, bias, places, 0, low, own, row, at, k_v,
                             COUNTED, MASS, FARTHEST, SIZE, False, KEYS)  # fmt: skip
    acc, top, total = _sweep(acc, top, total, query, k, v, counts, bias, places, low, high, own, row, at, k_v,
                             COUNTED, MASS, FARTHEST, SIZE, True, KEYS)  # fmt: skip
    acc, top, total = _sweep(acc, top, total, query, k, v, counts, bias, places, high, number, own, row, at, k_v,
                             COUNTED, MASS, FARTHEST, SIZE, False, KEYS)  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    tl.store(o + entry, (acc / total[:, None]).to(o.dtype.element_ty))
    tl.store(lse + tl.program_id(1).to(tl.int64) * blocks * SIZE + token, top + tl.log2(total))


@triton.jit
def _sweep_back(dq, q, do, mass, drift, k, v, dk, dv, counts, bias, near, far, places, begin, end, own, row, at, k_v,
                COUNTED: tl.constexpr, MASS: tl.constexpr, WITH_BIAS: tl.constexpr, FARTHEST: tl.constexpr,
                SIZE: tl.constexpr, WIDE: tl.constexpr, NEAR: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Σ_s ds_s k_s over the nodes `begin` to `end`; what keys, values and the bias get is added where they lie."""
    PARTS: tl.constexpr = SIZE // KEYS
    for t in range(begin * PARTS, end * PARTS):
        node, j = t // PARTS, t % PARTS * KEYS
        first, stride = tl.load(places + 2 * node), tl.load(places + 2 * node + 1)
        place, columns, s = _scores(q, k, counts, bias, first, stride, node - own, j, row, at, k_v,
                                    COUNTED, MASS, FARTHEST, SIZE, NEAR, KEYS)  # fmt: skip
        p = tl.exp2(s - mass[:, None])
        values = tl.load(v + place[None, :] * k_v + at[:, None])
        ds = p * (tl.dot(do, values, input_precision="ieee") - drift[:, None])
        if WITH_BIAS:
            if NEAR:
                tile = (node - own + WIDE) * SIZE + row
                tl.atomic_add(near + tile[:, None] * SIZE + j + tl.arange(0, KEYS)[None, :], ds, sem="relaxed")
            else:
                tl.atomic_add(far + tl.where(node > own, 1, 0), tl.sum(tl.sum(ds, 1), 0), sem="relaxed")
        here = place[:, None] * k_v + at[None, :]
        tl.atomic_add(dv + here, tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee"), sem="relaxed")
        ds = ds.to(q.dtype)
        tl.atomic_add(dk + here, tl.dot(tl.trans(ds), q, input_precision="ieee"), sem="relaxed")
        dq = tl.dot(ds, tl.trans(columns), dq, input_precision="ieee")
    return dq


@triton.jit
def _backward(q, k, v, counts, bias, places, ends, o, lse, do, dq, dk, dv, near, far, blocks, heads, most,
              q_b, q_n, k_b, k_v, count_b, list_b, COUNTED: tl.constexpr, MASS: tl.constexpr, WITH_BIAS: tl.constexpr,
              FARTHEST: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
              KEYS: tl.constexpr):  # fmt: skip
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    row, at = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    token = (block * SIZE + row).to(tl.int64)
    entry = batch.to(tl.int64) * q_b + token[:, None] * q_n + head * WIDTH + at[None, :]
    query, grad = tl.load(q + entry), tl.load(do + entry)
    drift = tl.sum(tl.load(o + entry).to(tl.float32) * grad.to(tl.float32), 1)
    mass = tl.load(lse + tl.program_id(1).to(tl.int64) * blocks * SIZE + token)
    start = batch.to(tl.int64) * k_b + head * WIDTH
    k += start
    v += start
    dk += start
    dv += start
    counts += batch.to(tl.int64) * count_b
    bias += head * (2 * FARTHEST + 1)
    near += head * (2 * WIDE + 1) * SIZE * SIZE
    far += head * 2
    places += 2 * (batch * list_b + block * most)
    ends += 2 * (batch * list_b // most + block)
    own, number = tl.load(ends), tl.load(ends + 1)
    low, high = tl.minimum(tl.maximum(own - WIDE, 0), number), tl.minimum(own + WIDE + 1, number)
    acc = tl.zeros([SIZE, WIDTH], tl.float32)
    acc = _sweep_back(acc, query, grad, mass, drift, k, v, dk, dv, counts, bias, near, far, places, 0, low, own, row,
                      at, k_v, COUNTED, MASS, WITH_BIAS, FARTHEST, SIZE, WIDE, False, KEYS)  # fmt: skip
    acc = _sweep_back(acc, query, grad, mass, drift, k, v, dk, dv, counts, bias, near, far, places, low, high, own, row,
                      at, k_v, COUNTED, MASS, WITH_BIAS, FARTHEST, SIZE, WIDE, True, KEYS)  # fmt: skip
    acc = _sweep_back(acc, query, grad, mass, drift, k, v, dk, dv, counts, bias, near, far, places, high, number, own,
                      row, at, k_v, COUNTED, MASS, WITH_BIAS, FARTHEST, SIZE, WIDE, False, KEYS)  # fmt: skip
    tl.store(dq + entry, acc.to(dq.dtype.element_ty))


class _Attention(torch.autograd.Function):
    """Attention of queries [B, N, h, d] over `vectors` [B, V, 2, h, d] by lists of (first row, stride)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        vectors: Tensor,
        bias: Tensor,
        counts: Tensor | None,
        places: Int[Tensor, "R S n 2"],
        ends: Int[Tensor, "R S 2"],
        size: int,
        mass: bool,
    ) -> Tensor:
        query, wide = query.contiguous(), bias.float().contiguous()
        batch, length, heads, _ = query.shape
        out = torch.empty_like(query)
        lse = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
        ctx.size, ctx.mass, ctx.bias_dtype = size, mass, bias.dtype
        ctx.save_for_backward(query, vectors, wide, counts, places, ends, out, lse)
        grid = length // size, batch * heads
        _forward[grid](*_inputs(query, vectors, wide, counts, places, ends), out, lse,
                       *_sizes(query, vectors, counts, places, size), **_constants(query, wide, counts, size, mass),
                       num_warps=8 if size == 128 else 4, num_stages=2)  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        query, vectors, bias, counts, places, ends, out, lse = ctx.saved_tensors
        size, heads, farthest = ctx.size, query.shape[2], bias.shape[1] // 2
        dq = torch.empty_like(query)
        d_vectors = torch.zeros_like(vectors, dtype=torch.float32)
        around = _around(size, farthest)
        near = bias.new_zeros(heads, 2 * around + 1, size, size)
        far = bias.new_zeros(heads, 2)
        with_bias = ctx.needs_input_grad[2]
        grid = query.shape[1] // size, query.shape[0] * heads
        _backward[grid](*_inputs(query, vectors, bias, counts, places, ends), out, lse, do.contiguous(), dq,
                        d_vectors, d_vectors[:, :, 1], near, far, *_sizes(query, vectors, counts, places, size),
                        **_constants(query, bias, counts, size, ctx.mass), WITH_BIAS=with_bias,
                        num_warps=8 if size == 128 else 4, num_stages=1)  # fmt: skip
        d_bias = None
        if with_bias:
            within = torch.arange(size, device=query.device)
            slot = torch.arange(-around, around + 1, device=query.device)[:, None, None]
            distance = (slot * size + within - within[:, None]).clamp(-farthest, farthest) + farthest
            d_bias = torch.zeros_like(bias).index_add_(1, distance.flatten(), near.flatten(1))
            d_bias[:, 0] += far[:, 0]
            d_bias[:, -1] += far[:, 1]
            d_bias = d_bias.to(ctx.bias_dtype)
        return dq, d_vectors.to(vectors.dtype), d_bias, None, None, None, None, None


def _around(size: int, farthest: int) -> int:
    """Slots on either side within which the bias is not that of the farthest distance for all pairs."""
    return -(-(farthest + size - 1) // size) - 1


def _inputs(query: Tensor, vectors: Tensor, bias: Tensor, counts: Tensor | None, places: Tensor, ends: Tensor) -> Any:
    return query, vectors, vectors[:, :, 1], bias if counts is None else counts, bias, places, ends


def _sizes(query: Tensor, vectors: Tensor, counts: Tensor | None, places: Tensor, size: int) -> Any:
    """Blocks, heads, the longest list, and strides; a stride of 0 where rows share."""
    blocks, most = places.shape[1:3]
    each = counts is not None and len(counts) > 1
    return (
        blocks, query.shape[2], most, query.stride(0), query.stride(1), vectors.stride(0), vectors.stride(1),
        vectors.shape[1] if each else 0, blocks * most if len(places) > 1 else 0,
    )  # fmt: skip


def _constants(query: Tensor, bias: Tensor, counts: Tensor | None, size: int, mass: bool) -> dict[str, Any]:
    farthest = bias.shape[1] // 2
    return {
        "COUNTED": counts is not None, "MASS": mass, "FARTHEST": farthest, "SIZE": size,
        "WIDE": _around(size, farthest), "WIDTH": query.shape[3], "KEYS": min(size, TILE),
    }  # fmt: skip
