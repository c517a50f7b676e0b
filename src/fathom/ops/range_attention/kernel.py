"""`range_attention`, both ways: Triton kernels.

A program takes a few queries of all heads of a key/value head, or some keys of one; scores and sums in fp32. 16 or 32
bits, heads of 16 to 256 channels, a power of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.library import triton_op, wrap_triton

from fathom.ops.kernels import FLOATS
from fathom.ops.token_blocks import ROWS, RUN, TokenRanges

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # finite, so that a query may have seen nothing yet


class Tile(NamedTuple):
    """What a program of a kernel takes: queries times heads, keys; and how many warps and stages of loads it has."""

    rows: int
    keys: int
    warps: int
    stages: int


# In 16 bits and up to 64 channels, the best of a dozen each on an H200; wider ones, of which those of 256 channels and
# of 32 bits take half the keys. Rows are 32 or more, for 32 heads; half the keys of "keys" are a run or more.
TILES = {"forward": Tile(128, 64, 4, 3), "queries": Tile(64, 32, 4, 3), "keys": Tile(128, 64, 4, 2)}
WIDE_TILES = {"forward": Tile(64, 64, 4, 3), "queries": Tile(64, 64, 4, 2), "keys": Tile(32, 64, 4, 2)}
# Where there are more keys than queries, as in a step of few tokens: 3 to 28 % less for both gradients of such steps.
SEVERAL = {**TILES, "keys": Tile(64, 64, 4, 1)}
# Where blocks of queries are listed, all have as many rows; of one segment, and of several.
LISTED_TILES = Tile(ROWS, 64, 4, 3), Tile(ROWS, 32, 4, 3)

# Bytes of shared memory of a program, as compiled for up to 64, 128 and 256 channels, by bytes of a number: Turing GPUs
# have too few for any, Ada and consumer Ampere ones for the larger, an A100 for the largest.
NEEDED = {2: (98304, 98304, 102656), 4: (98304, 107008, 205312)}
# Asked for here, as a compiled graph must not ask.
SHARED_MEMORY = min(
    (
        getattr(torch.cuda.get_device_properties(n), "shared_memory_per_block_optin", 101376)
        for n in range(torch.cuda.device_count())
    ),
    default=232448,
)


@triton.jit
def _places(tensor, j, stride, last, MASKED: tl.constexpr, KEYS: tl.constexpr):
    """Where the keys from `j` on lie; masked, some may be behind the last, which is read in their place."""
    step = tl.arange(0, KEYS)
    if MASKED:
        places = tensor + tl.minimum(j + step, last).to(tl.int64) * stride
    else:  # all but one term stay the same from block to block
        places = tensor + tl.cast(j, tl.int64) * stride + step * stride
    return places


@triton.jit
def _scores(q, k, bias, j, scale, k_n, last, at, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr):
    """The keys from `j` on, as columns, and their scores in base 2."""
    if HAS_BIAS:
        shift = tl.load(_places(bias, j, 1, last, MASKED, KEYS))
    columns = tl.load(_places(k, j, k_n, last, MASKED, KEYS)[None, :] + at[:, None])
    s = tl.dot(q, columns, input_precision="ieee") * scale
    if HAS_BIAS:
        s += shift[None, :]
    return columns, s


@triton.jit
def _sweep(acc, top, total, q, k, v, bias, begin, end, low, high, scale, k_n, v_n, last, at,
           HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Online softmax over the keys `begin` to `end`; masked, over those of them in [low, high)."""
    for j in range(begin, end, KEYS):
        _, s = _scores(q, k, bias, j, scale, k_n, last, at, HAS_BIAS, MASKED, KEYS)
        if MASKED:
            key = j + tl.arange(0, KEYS)
            s = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(p, 1)
        values = tl.load(_places(v, j, v_n, last, MASKED, KEYS)[:, None] + at[None, :])
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit
def _ends(start, stop, first, count, KEYS: tl.constexpr):
    """The first key that `count` queries from `first` on see, where all see from, where all see to, and the last key;
    the first three in whole blocks. Ends do not fall from one query to the next."""
    last = first + tl.maximum(count, 1) - 1
    begin = tl.load(start + first) // KEYS * KEYS
    full = tl.cdiv(tl.load(start + last), KEYS) * KEYS
    end = tl.where(count > 0, tl.load(stop + last), 0)
    return begin, full, tl.maximum(full, tl.load(stop + first) // KEYS * KEYS), end


@triton.jit
def _block(blocks, queries, HAS_BLOCKS: tl.constexpr, TOKENS: tl.constexpr):
    """The program's queries: the first, and how many. Without a list, the last ones first: they see most."""
    if HAS_BLOCKS:
        first = tl.load(blocks + tl.program_id(0))
        count = tl.load(blocks + tl.num_programs(0) + tl.program_id(0))
    else:
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
        count = tl.minimum(TOKENS, queries - first)
    return first, count


@triton.jit
def _forward(q, k, v, bias, o, lse, start, stop, blocks, scale, queries, keys, q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n,
             HAS_BIAS: tl.constexpr, HAS_BLOCKS: tl.constexpr, HEADS: tl.constexpr, SEGMENTS: tl.constexpr,
             WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first, count = _block(blocks, queries, HAS_BLOCKS, TOKENS)
    token = first + tl.minimum(row // HEADS, tl.maximum(count, 1) - 1)
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
        begin, full, full_end, end = _ends(start + i * queries, stop + i * queries, first, count, KEYS)
        acc, top, total = _sweep(acc, top, total, query, k, v, bias, begin, tl.minimum(full, end), low, high, scale,
                                 k_n, v_n, keys - 1, at, HAS_BIAS, True, KEYS)  # fmt: skip
        acc, top, total = _sweep(acc, top, total, query, k, v, bias, full, full_end, low, high, scale,
                                 k_n, v_n, keys - 1, at, HAS_BIAS, False, KEYS)  # fmt: skip
        acc, top, total = _sweep(acc, top, total, query, k, v, bias, full_end, end, low, high, scale,
                                 k_n, v_n, keys - 1, at, HAS_BIAS, True, KEYS)  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    real = row // HEADS < count
    tl.store(o + (head * o_h + far * o_n)[:, None] + at[None, :], (acc / total[:, None]).to(o.dtype.element_ty),
             mask=real[:, None])  # fmt: skip
    tl.store(lse + far * (tl.num_programs(1) * HEADS) + head, top + tl.log2(total), mask=real)


@triton.jit
def _sweep_keys(dq, q, do, lse, delta, k, v, bias, begin, end, low, high, scale, k_n, v_n, last, at,
                HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Σ_s ds_s k_s over the keys `begin` to `end`."""
    for j in range(begin, end, KEYS):
        columns, s = _scores(q, k, bias, j, scale, k_n, last, at, HAS_BIAS, MASKED, KEYS)
        p = tl.exp2(s - lse[:, None])
        if MASKED:
            key = j + tl.arange(0, KEYS)
            p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), p, 0.0)
        values = tl.load(_places(v, j, v_n, last, MASKED, KEYS)[None, :] + at[:, None])
        dp = tl.dot(do, values, input_precision="ieee")
        ds = (p * (dp - delta[:, None])).to(columns.dtype)
        dq = tl.dot(ds, tl.trans(columns), dq, input_precision="ieee")
    return dq


@triton.jit
def _backward_queries(q, k, v, bias, o, do, lse, delta, dq, start, stop, blocks, scale, scaling, queries, keys,
                      q_h, q_n, k_g, k_n, v_g, v_n, o_h, o_n, do_h, do_n, dq_h, dq_n,
                      HAS_BIAS: tl.constexpr, HAS_BLOCKS: tl.constexpr, HEADS: tl.constexpr, SEGMENTS: tl.constexpr,
                      WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """dq, and δ for `_backward_keys`."""
    scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first, count = _block(blocks, queries, HAS_BLOCKS, TOKENS)
    token = first + tl.minimum(row // HEADS, tl.maximum(count, 1) - 1)
    group = tl.program_id(1)
    head = (group * HEADS + row % HEADS).to(tl.int64)
    far = token.to(tl.int64)
    real = row // HEADS < count
    query = tl.load(q + (head * q_h + far * q_n)[:, None] + at[None, :])
    grad = tl.load(do + (head * do_h + far * do_n)[:, None] + at[None, :])
    output = tl.load(o + (head * o_h + far * o_n)[:, None] + at[None, :])
    drift = tl.sum(output.to(tl.float32) * grad.to(tl.float32), 1)
    entry = far * (tl.num_programs(1) * HEADS) + head
    tl.store(delta + entry, drift, mask=real)
    mass = tl.load(lse + entry)
    k += group.to(tl.int64) * k_g
    v += group.to(tl.int64) * v_g
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(SEGMENTS):
        low, high = tl.load(start + i * queries + token), tl.load(stop + i * queries + token)
        begin, full, full_end, end = _ends(start + i * queries, stop + i * queries, first, count, KEYS)
        acc = _sweep_keys(acc, query, grad, mass, drift, k, v, bias, begin, tl.minimum(full, end), low, high, scale,
                          k_n, v_n, keys - 1, at, HAS_BIAS, True, KEYS)  # fmt: skip
        acc = _sweep_keys(acc, query, grad, mass, drift, k, v, bias, full, full_end, low, high, scale,
                          k_n, v_n, keys - 1, at, HAS_BIAS, False, KEYS)  # fmt: skip
        acc = _sweep_keys(acc, query, grad, mass, drift, k, v, bias, full_end, end, low, high, scale,
                          k_n, v_n, keys - 1, at, HAS_BIAS, True, KEYS)  # fmt: skip
    tl.store(dq + (head * dq_h + far * dq_n)[:, None] + at[None, :], (acc * scaling).to(dq.dtype.element_ty),
             mask=real[:, None])  # fmt: skip


@triton.jit
def _sweep_queries(sum_k, sum_v, sum_b, columns, values, shift, q, do, lse, delta, start, stop, begin, end, key, scale,
                   queries, q_n, do_n, at, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr,
                   ROWS: tl.constexpr):  # fmt: skip
    """Σ_q ds_q q, Σ_q p_q do_q, Σ_q ds_q over the queries `begin` to `end`; not masked, all see all of the keys. The
    pointers `q`, `do`, `lse` and `delta` are those of query 0, head by head."""
    TOKENS: tl.constexpr = ROWS // HEADS
    step = tl.arange(0, ROWS) // HEADS
    for first in range(begin, end, TOKENS):
        far = tl.cast(first, tl.int64)
        if MASKED:
            token = tl.minimum(first + step, queries - 1)
            far = token.to(tl.int64)
        else:
            far = far + step
        query = tl.load((q + far * q_n)[:, None] + at[None, :])
        grad = tl.load((do + far * do_n)[:, None] + at[None, :])
        entry = far * (tl.num_programs(1) * HEADS)
        mass, drift = tl.load(lse + entry), tl.load(delta + entry)
        s = tl.dot(columns, tl.trans(query), input_precision="ieee") * scale
        if HAS_BIAS:
            s += shift[:, None]
        p = tl.exp2(s - mass[None, :])
        if MASKED:
            low, high = tl.load(start + token), tl.load(stop + token)
            seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]) & (first + step < end)[None, :]
            p = tl.where(seen, p, 0.0)
        sum_v = tl.dot(p.to(grad.dtype), grad, sum_v, input_precision="ieee")
        dp = tl.dot(values, tl.trans(grad), input_precision="ieee")
        ds = p * (dp - drift[None, :])
        if HAS_BIAS:
            sum_b += tl.sum(ds, 1)
        sum_k = tl.dot(ds.to(query.dtype), query, sum_k, input_precision="ieee")
    return sum_k, sum_v, sum_b


@triton.jit
def _backward_keys(q, k, v, bias, do, lse, delta, dk, dv, db, start, stop, readers, scale, scaling, queries, keys,
                   q_h, q_n, k_g, k_n, v_g, v_n, do_h, do_n, dk_g, dk_n, dv_g, dv_n,
                   HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr,
                   ROWS: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    scale, scaling = tl.cast(scale, tl.float32), tl.cast(scaling, tl.float32)  # fp64 from compiled graphs
    TOKENS: tl.constexpr = ROWS // HEADS
    at = tl.arange(0, WIDTH)
    block, group = tl.program_id(0), tl.program_id(1)
    key = block * KEYS + tl.arange(0, KEYS)
    place = tl.minimum(key, keys - 1).to(tl.int64)
    columns = tl.load(k + group.to(tl.int64) * k_g + place[:, None] * k_n + at[None, :])
    values = tl.load(v + group.to(tl.int64) * v_g + place[:, None] * v_n + at[None, :])
    shift = place  # not read
    if HAS_BIAS:
        shift = tl.load(bias + place)
    head = (group * HEADS + tl.arange(0, ROWS) % HEADS).to(tl.int64)
    q, do, lse, delta = q + head * q_h, do + head * do_h, lse + head, delta + head
    sum_k, sum_v = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    sum_b = tl.zeros([KEYS], tl.float32)
    runs = tl.cdiv(keys, RUN)
    here = block * (KEYS // RUN)
    there = tl.minimum(here + KEYS // RUN, runs) - 1
    for i in range(SEGMENTS):
        begin, full = tl.load(readers + i * runs + here), tl.load(readers + (SEGMENTS + i) * runs + there)
        full_end = tl.load(readers + (2 * SEGMENTS + i) * runs + here)
        end = tl.load(readers + (3 * SEGMENTS + i) * runs + there)
        full = begin + tl.cdiv(full - begin, TOKENS) * TOKENS  # in whole steps from the first
        full_end = full + tl.maximum(full_end - full, 0) // TOKENS * TOKENS
        sum_k, sum_v, sum_b = _sweep_queries(
            sum_k, sum_v, sum_b, columns, values, shift, q, do, lse, delta, start + i * queries, stop + i * queries,
            begin, tl.minimum(full, end), key, scale, queries, q_n, do_n, at, HAS_BIAS, True, HEADS, ROWS)  # fmt: skip
        sum_k, sum_v, sum_b = _sweep_queries(
            sum_k, sum_v, sum_b, columns, values, shift, q, do, lse, delta, start + i * queries, stop + i * queries,
            full, full_end, key, scale, queries, q_n, do_n, at, HAS_BIAS, False, HEADS, ROWS)  # fmt: skip
        sum_k, sum_v, sum_b = _sweep_queries(
            sum_k, sum_v, sum_b, columns, values, shift, q, do, lse, delta, start + i * queries, stop + i * queries,
            full_end, end, key, scale, queries, q_n, do_n, at, HAS_BIAS, True, HEADS, ROWS)  # fmt: skip
    real = key < keys
    tl.store(dk + group.to(tl.int64) * dk_g + place[:, None] * dk_n + at[None, :],
             (sum_k * scaling).to(dk.dtype.element_ty), mask=real[:, None])  # fmt: skip
    tl.store(dv + group.to(tl.int64) * dv_g + place[:, None] * dv_n + at[None, :],
             sum_v.to(dv.dtype.element_ty), mask=real[:, None])  # fmt: skip
    if HAS_BIAS:
        tl.store(db + group.to(tl.int64) * keys + place, sum_b, mask=real)


def serves(width: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take heads of so many channels, so many of a key/value head, of this precision, and fit."""
    powers = width & (width - 1) == 0 and heads & (heads - 1) == 0
    if dtype not in FLOATS or not powers or not 16 <= width <= 256 or heads > 32:
        return False
    return NEEDED[dtype.itemsize][0 if width <= 64 else 1 if width == 128 else 2] <= SHARED_MEMORY


def _launch(
    kernel: Any,
    by: str,
    query: Tensor,
    key: Tensor,
    blocks: Tensor | None,
    arguments: tuple[Any, ...],
    **constants: Any,
) -> None:
    """A kernel over its tiles of all queries, or by "keys" of all of those."""
    groups, keys = key.shape[1:3]
    heads, width, short = query.shape[1] // groups, query.shape[3], query.element_size() == 2
    tiles = TILES if width <= 64 and short else WIDE_TILES
    if tiles is TILES and query.shape[2] < keys:
        tiles = SEVERAL
    tile = tiles[by]
    if blocks is not None and by != "keys" and tile.rows != ROWS:
        tile = LISTED_TILES[constants["SEGMENTS"] > 1]
    if width > 128 or not short:
        tile = tile._replace(keys=tile.keys // 2)
    if by == "keys":
        programs = triton.cdiv(keys, tile.keys)
    else:
        programs = triton.cdiv(query.shape[2], tile.rows // heads) if blocks is None else blocks.shape[1]
    wrap_triton(kernel)[(programs, groups)](
        *arguments, **constants, HEADS=heads, WIDTH=width, ROWS=tile.rows, KEYS=tile.keys, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[1:3]]


def _in_base_2(bias: Tensor | None, other: Tensor) -> Tensor:
    """The bias as kernels add it; without one `other`, which they do not read."""
    return other if bias is None else bias * LOG2_E


def _blocks(blocks: Tensor | None, other: Tensor) -> Tensor:
    """The list of blocks; without one `other`, which kernels do not read."""
    return other if blocks is None else blocks


@triton_op("fathom::range_attention", mutates_args={})
def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, start: Tensor, stop: Tensor,
    readers: Tensor | None, blocks: Tensor | None, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [1, H, N, D], and log₂ of Σ_s 2^(score/ln 2) of every query and head. `readers` is
    kept for the backward pass."""
    _, heads, queries, width = query.shape
    output = query.new_empty(1, queries, heads, width).transpose(1, 2)
    lse = query.new_empty(queries, heads, dtype=torch.float32)
    arguments = (
        query, key, value, _in_base_2(bias, start), output, lse, start, stop, _blocks(blocks, start), scaling * LOG2_E,
        queries, key.shape[2], *_strides(query, key, value, output),
    )  # fmt: skip
    constants = {"HAS_BIAS": bias is not None, "HAS_BLOCKS": blocks is not None, "SEGMENTS": start.shape[0]}
    _launch(_forward, "forward", query, key, blocks, arguments, **constants)
    return output, lse


@triton_op("fathom::range_attention_backward", mutates_args={})
def _gradients(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, start: Tensor, stop: Tensor, readers: Tensor,
    blocks: Tensor | None, output: Tensor, lse: Tensor, grad: Tensor, scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, and the bias's of every key/value head, [G, keys] (not
    written without one)."""
    _, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    shift = _in_base_2(bias, start)
    delta = torch.empty_like(lse)
    # in the order in which projections have them
    dq = query.new_empty(1, queries, heads, width).transpose(1, 2)
    dk, dv = (key.new_empty(1, keys, groups, width).transpose(1, 2) for _ in range(2))
    db = lse.new_empty(groups, keys)
    numbers = scaling * LOG2_E, scaling, queries, keys
    arguments: tuple[Any, ...] = (
        query, key, value, shift, output, grad, lse, delta, dq, start, stop, _blocks(blocks, start), *numbers,
        *_strides(query, key, value, output, grad, dq),
    )  # fmt: skip
    constants = {"HAS_BIAS": bias is not None, "SEGMENTS": start.shape[0]}
    _launch(_backward_queries, "queries", query, key, blocks, arguments, **constants, HAS_BLOCKS=blocks is not None)
    arguments = (
        query, key, value, shift, grad, lse, delta, dk, dv, db, start, stop, readers, *numbers,
        *_strides(query, key, value, grad, dk, dv),
    )  # fmt: skip
    _launch(_backward_keys, "keys", query, key, blocks, arguments, **constants, RUN=RUN)
    return dq, dk, dv, db


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, bias, start, stop, readers, blocks, output, lse = ctx.saved_tensors
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    *gradients, db = _gradients(query, key, value, bias, start, stop, readers, blocks, output, lse, grad, ctx.scaling)
    return *gradients, None if bias is None else db.sum(0), None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def range_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G keys D"],
    value: Float[Tensor, "1 G keys D"],
    ranges: TokenRanges,
    scaling: float,
    bias: Float[Tensor, " keys"] | None = None,
) -> Float[Tensor, "1 H N D"]:
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    bias = None if bias is None else bias.float()
    return _attend(query, key, value, bias, ranges.start, ranges.stop, ranges.readers, ranges.blocks, scaling)[0]
