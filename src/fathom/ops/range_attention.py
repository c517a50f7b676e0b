"""Attention in which every query sees one range of keys in each of a few segments: Triton kernels, both ways.

    o_q = Σ_s p_qs v_s,   p_qs = softmax_s(scaling · q·k_s)   over   s ∈ ∪_i [start_iq, stop_iq)

Both ends of segment i's range must not fall from one query to the next, as with queries and each segment's keys in the
order of their tokens. Then the keys that some queries in a row may see are again a range, and so are the queries that
read some keys in a row: nothing is looked up per score, and what nobody sees is not visited. A query that sees no key
gives 0.

A program takes a few queries of all heads of a key/value head, or some keys of one; scores and sums in fp32. Needs the
package `triton`; 16 or 32 bits, heads of 16 to 256 channels, a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.library import triton_op, wrap_triton

from fathom.ops.kernels import FLOATS
from fathom.ops.token_blocks import RUN, TokenRanges

ROWS = 128  # queries times heads of a program
KEYS = 64  # that it reads at a time
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # finite, so that a query may have seen nothing yet


@triton.jit
def _sweep(acc, top, total, q, k, v, begin, end, low, high, scale, k_n, v_n, last, at,
           MASKED: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Online softmax over the keys `begin` to `end`; masked, over those of them in [low, high)."""
    for j in range(begin, end, KEYS):
        key = j + tl.arange(0, KEYS)
        place = tl.minimum(key, last).to(tl.int64)
        s = tl.dot(q, tl.load(k + place[None, :] * k_n + at[:, None]), input_precision="ieee") * scale
        if MASKED:
            s = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(p, 1)
        values = tl.load(v + place[:, None] * v_n + at[None, :])
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit
def _ends(low, high, KEYS: tl.constexpr):
    """Of the keys that the rows see: the first, where all see from, where all see to, and the last, the first three in
    whole blocks."""
    begin = tl.min(low, 0) // KEYS * KEYS
    full = tl.cdiv(tl.max(low, 0), KEYS) * KEYS
    return begin, full, tl.maximum(full, tl.min(high, 0) // KEYS * KEYS), tl.max(high, 0)


@triton.jit
def _forward(q, k, v, o, lse, start, stop, scale, queries, keys, q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n,
             HEADS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
             KEYS: tl.constexpr):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    given = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS + row // HEADS  # the longest first
    token = tl.minimum(given, queries - 1)
    group = tl.program_id(1)
    head = (group * HEADS + row % HEADS).to(tl.int64)
    far = token.to(tl.int64)
    query = tl.load(q + (head * q_h + far * q_n)[:, None] + at[None, :])
    k += group.to(tl.int64) * k_g
    v += group.to(tl.int64) * v_g
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    for i in range(SEGMENTS):
        low, high = tl.load(start + i * queries + token), tl.load(stop + i * queries + token)
        begin, full, full_end, end = _ends(low, high, KEYS)
        acc, top, total = _sweep(acc, top, total, query, k, v, begin, tl.minimum(full, end), low, high, scale, k_n, v_n,
                                 keys - 1, at, True, KEYS)  # fmt: skip
        acc, top, total = _sweep(acc, top, total, query, k, v, full, full_end, low, high, scale, k_n, v_n,
                                 keys - 1, at, False, KEYS)  # fmt: skip
        acc, top, total = _sweep(acc, top, total, query, k, v, full_end, end, low, high, scale, k_n, v_n,
                                 keys - 1, at, True, KEYS)  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    real = given < queries
    tl.store(o + (head * o_h + far * o_n)[:, None] + at[None, :], (acc / total[:, None]).to(o.dtype.element_ty),
             mask=real[:, None])  # fmt: skip
    tl.store(lse + head * queries + token, top + tl.log2(total), mask=real)


@triton.jit
def _sweep_back(dq, q, do, lse, delta, k, v, begin, end, low, high, scale, k_n, v_n, last, at,
                MASKED: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Σ_s p_s (do·v_s − δ) k_s over the keys `begin` to `end`."""
    for j in range(begin, end, KEYS):
        key = j + tl.arange(0, KEYS)
        place = tl.minimum(key, last).to(tl.int64)
        columns = tl.load(k + place[None, :] * k_n + at[:, None])
        p = tl.exp2(tl.dot(q, columns, input_precision="ieee") * scale - lse[:, None])
        if MASKED:
            p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), p, 0.0)
        dp = tl.dot(do, tl.load(v + place[None, :] * v_n + at[:, None]), input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(columns.dtype)
        dq = tl.dot(ds, tl.trans(columns), dq, input_precision="ieee")
    return dq


@triton.jit
def _backward_queries(q, k, v, do, lse, delta, dq, start, stop, scale, scaling, queries, keys,
                      q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n, d_h, d_n,
                      HEADS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                      KEYS: tl.constexpr):  # fmt: skip
    scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    given = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS + row // HEADS
    token = tl.minimum(given, queries - 1)
    group = tl.program_id(1)
    head = (group * HEADS + row % HEADS).to(tl.int64)
    far = token.to(tl.int64)
    query = tl.load(q + (head * q_h + far * q_n)[:, None] + at[None, :])
    grad = tl.load(do + (head * o_h + far * o_n)[:, None] + at[None, :])
    mass, drift = tl.load(lse + head * queries + token), tl.load(delta + head * queries + token)
    k += group.to(tl.int64) * k_g
    v += group.to(tl.int64) * v_g
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(SEGMENTS):
        low, high = tl.load(start + i * queries + token), tl.load(stop + i * queries + token)
        begin, full, full_end, end = _ends(low, high, KEYS)
        acc = _sweep_back(acc, query, grad, mass, drift, k, v, begin, tl.minimum(full, end), low, high, scale, k_n, v_n,
                          keys - 1, at, True, KEYS)  # fmt: skip
        acc = _sweep_back(acc, query, grad, mass, drift, k, v, full, full_end, low, high, scale, k_n, v_n,
                          keys - 1, at, False, KEYS)  # fmt: skip
        acc = _sweep_back(acc, query, grad, mass, drift, k, v, full_end, end, low, high, scale, k_n, v_n,
                          keys - 1, at, True, KEYS)  # fmt: skip
    tl.store(dq + (head * d_h + far * d_n)[:, None] + at[None, :], (acc * scaling).to(dq.dtype.element_ty),
             mask=(given < queries)[:, None])  # fmt: skip


@triton.jit
def _backward_keys(q, k, v, do, lse, delta, dk, dv, start, stop, readers, scale, scaling, queries, keys,
                   q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n, d_g, d_n,
                   HEADS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                   KEYS: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    block, group = tl.program_id(0), tl.program_id(1)
    key = block * KEYS + tl.arange(0, KEYS)
    place = tl.minimum(key, keys - 1).to(tl.int64)
    columns = tl.load(k + group.to(tl.int64) * k_g + place[:, None] * k_n + at[None, :])
    values = tl.load(v + group.to(tl.int64) * v_g + place[:, None] * v_n + at[None, :])
    head = (group * HEADS + row % HEADS).to(tl.int64)
    sum_k, sum_v = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    runs = tl.cdiv(keys, RUN)
    here = block * (KEYS // RUN)
    for i in range(SEGMENTS):
        begin = tl.load(readers + i * runs + here)
        end = tl.load(readers + (SEGMENTS + i) * runs + tl.minimum(here + KEYS // RUN, runs) - 1)
        for first in range(begin, end, TOKENS):
            given = first + row // HEADS
            token = tl.minimum(given, queries - 1)
            far = token.to(tl.int64)
            query = tl.load(q + (head * q_h + far * q_n)[:, None] + at[None, :])
            grad = tl.load(do + (head * o_h + far * o_n)[:, None] + at[None, :])
            low, high = tl.load(start + i * queries + token), tl.load(stop + i * queries + token)
            mass, drift = tl.load(lse + head * queries + token), tl.load(delta + head * queries + token)
            s = tl.dot(columns, tl.trans(query), input_precision="ieee") * scale
            seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]) & (given < end)[None, :]
            p = tl.where(seen, tl.exp2(s - mass[None, :]), 0.0)
            sum_v = tl.dot(p.to(grad.dtype), grad, sum_v, input_precision="ieee")
            dp = tl.dot(values, tl.trans(grad), input_precision="ieee")
            sum_k = tl.dot((p * (dp - drift[None, :])).to(query.dtype), query, sum_k, input_precision="ieee")
    to = (group.to(tl.int64) * d_g + place * d_n)[:, None] + at[None, :]
    real = (key < keys)[:, None]
    tl.store(dk + to, (sum_k * scaling).to(dk.dtype.element_ty), mask=real)
    tl.store(dv + to, sum_v.to(dv.dtype.element_ty), mask=real)


def serves(width: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take heads of so many channels, so many of a key/value head, of this precision."""
    powers = width & (width - 1) == 0 and heads & (heads - 1) == 0
    return dtype in FLOATS and powers and 16 <= width <= 256 and heads <= ROWS // 4


def _constants(query: Tensor, key: Tensor, segments: int) -> dict[str, Any]:
    return {
        "HEADS": query.shape[1] // key.shape[1], "SEGMENTS": segments, "WIDTH": query.shape[3],
        "ROWS": ROWS if query.shape[3] <= 64 and query.element_size() == 2 else ROWS // 2,
        "KEYS": KEYS if query.shape[3] <= 128 and query.element_size() == 2 else KEYS // 2,
    }  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[1:3]]


@triton_op("fathom::range_attention", mutates_args={})
def _attend(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, readers: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """The output [1, H, N, D], and log₂ of Σ_s 2^(score/ln 2) of every head and query. `readers` is
    kept for the backward pass."""
    _, heads, queries, width = query.shape
    constants = _constants(query, key, start.shape[0])
    output = query.new_empty(1, queries, heads, width).transpose(1, 2)
    lse = query.new_empty(heads, queries, dtype=torch.float32)
    grid = (triton.cdiv(queries, constants["ROWS"] // constants["HEADS"]), key.shape[1])
    wrap_triton(_forward)[grid](
        query, key, value, output, lse, start, stop, scaling * LOG2_E, queries, key.shape[2],
        *_strides(query, key, value, output), **constants, num_warps=4, num_stages=3,
    )  # fmt: skip
    return output, lse


@triton_op("fathom::range_attention_backward", mutates_args={})
def _gradients(
    query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, readers: Tensor, output: Tensor,
    lse: Tensor, grad: Tensor, scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    _, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    constants = _constants(query, key, start.shape[0])
    scale = scaling * LOG2_E
    delta = (grad.float() * output.float()).sum(-1)[0].contiguous()
    dq = query.new_empty(1, queries, heads, width).transpose(1, 2)
    dk, dv = (key.new_empty(1, groups, keys, width) for _ in range(2))
    grid = (triton.cdiv(queries, constants["ROWS"] // constants["HEADS"]), groups)
    wrap_triton(_backward_queries)[grid](
        query, key, value, grad, lse, delta, dq, start, stop, scale, scaling, queries, keys,
        *_strides(query, key, value, grad, dq), **constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    constants |= {"ROWS": constants["ROWS"] // 2, "RUN": RUN}
    wrap_triton(_backward_keys)[(triton.cdiv(keys, constants["KEYS"]), groups)](
        query, key, value, grad, lse, delta, dk, dv, start, stop, readers, scale, scaling, queries, keys,
        *_strides(query, key, value, grad, dk), **constants, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, start, stop, readers, output, lse = ctx.saved_tensors
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    gradients = _gradients(query, key, value, start, stop, readers, output, lse, grad, ctx.scaling)
    return *gradients, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def range_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G keys D"],
    value: Float[Tensor, "1 G keys D"],
    ranges: TokenRanges,
    scaling: float,
) -> Float[Tensor, "1 H N D"]:
    """o. The ends of the ranges are places among all keys and do not fall along N in any segment; gradients need
    `ranges.readers`."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _attend(query, key, value, ranges.start, ranges.stop, ranges.readers, scaling)[0]
