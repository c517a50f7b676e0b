"""`raw_partials`: a Triton kernel.

A program takes one row, all query heads of some key heads, and a run of blocks. q is zero outside its own head's
channels: a tensor core computes the zeros faster than memory brings the next channel. Each raw channel is read once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from fathom.ops.fourier_grid import SUPPORT, Grid, block_tokens, overlap_add

WIDEST = 512  # bytes of a token's raw channels in one program, keys or values, unless one head has more
PROGRAMS = 2  # a multiprocessor, at least


@triton.jit
def _raw_partials(
    query,
    scores,
    raw_key,
    raw_value,
    highest,
    total,
    mixed,
    running,
    spread,
    scaling,
    shape,
    tokens,
    window,
    points,
    blocks,
    parts,
    first_head,
    key_start,
    key_stop,
    value_start,
    value_stop,
    HEADS: tl.constexpr,
    HERE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
    SPAN: tl.constexpr,
    SUPPORT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < HERE
    head = batch * HEADS + first_head + row
    # starts and stops count units of ALIGN channels, which tells the compiler how wide its loads may be
    key_channel = key_start * KEY_ALIGN + tl.arange(0, KEYS)
    has_key = key_channel < key_stop * KEY_ALIGN
    value_channel = value_start * VALUE_ALIGN + tl.arange(0, VALUES)
    has_value = value_channel < value_stop * VALUE_ALIGN
    lane = tl.arange(0, BLOCK)
    tap = tl.arange(0, SPAN)
    # tokens and channels lie along the rows of every product: the query heads are too few for them
    q = tl.load(
        query + head[None, :] * KEY_WIDTH + key_channel[:, None], mask=real[None, :] & has_key[:, None], other=0.0
    )

    top = tl.full([ROWS], -1e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([VALUES, ROWS], tl.float32)
    for step in range(RUN):  # blocks after the last have no tokens
        block = part * RUN + step
        cell = block.to(tl.int64) * CELLS
        first = (cell * window + points - 1) // points
        stop = tl.minimum(((cell + CELLS) * window + points - 1) // points, tokens)
        exists = lane < (stop - first).to(tl.int32)
        at = batch * tokens + first
        k = tl.load(
            raw_key + at * KEY_WIDTH + (lane[:, None] * KEY_WIDTH + key_channel[None, :]),
            mask=exists[:, None] & has_key[None, :],
            other=0.0,
        )
        v = tl.load(
            raw_value + at * VALUE_WIDTH + (lane[:, None] * VALUE_WIDTH + value_channel[None, :]),
            mask=exists[:, None] & has_value[None, :],
            other=0.0,
        )

        # Φᵀ [BLOCK, SPAN]; a token's place among the cells is split in integers, so that none of its bits are lost
        ahead = (first * points - cell * window).to(tl.int32) + lane * points
        within = ahead // window
        fraction = (ahead - within * window).to(tl.float32) / window
        z = (within[:, None] + (SUPPORT - 1) - tap[None, :]).to(tl.float32) + fraction[:, None]
        under = SUPPORT * SUPPORT - z * z
        root = tl.sqrt(tl.maximum(under, 1e-6))
        sinh = tl.exp(shape * (root - SUPPORT)) - tl.exp(-shape * (root + SUPPORT))
        phi = tl.where(under > 0, sinh / (6.283185307179586 * root), 0.0)

        point = (block * CELLS + tap + (points - SUPPORT + 1)) % points
        g = tl.load(scores + head[None, :] * points + point[:, None], mask=real[None, :], other=0.0)
        s = tl.dot(phi, g, input_precision="tf32x3") + tl.dot(k, q, input_precision="tf32x3")
        s = tl.where(exists[:, None], s * scaling, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        e = tl.exp(s - higher[None, :])
        keep = tl.exp(top - higher)
        norm = norm * keep + tl.sum(e, 0)
        # widened: as a 16-bit product of a transposed operand, compiled for an H200, this gave wrong values
        o = o * keep[None, :] + tl.dot(tl.trans(v).to(tl.float32), e, input_precision=PRECISION)
        top = higher
        z_block = tl.dot(tl.trans(phi), e, input_precision="tf32x3")
        out = head * blocks + block
        stored = real & (block < blocks)
        tl.store(running + out, top, mask=stored)
        tl.store(spread + out[None, :] * SPAN + tap[:, None], z_block, mask=stored[None, :])

    out = head * parts + part
    tl.store(highest + out, top, mask=real)
    tl.store(total + out, norm, mask=real)
    place = mixed + out[None, :] * VALUE_WIDTH + value_channel[:, None]
    tl.store(place, o, mask=real[None, :] & has_value[:, None])


def raw_partials(
    query: Float[Tensor, "B H Rk"],
    scores: Float[Tensor, "B H K"],
    raw_key: Float[Tensor, "B t Rk"],
    raw_value: Float[Tensor, "B t Rv"],
    key_starts: list[int],
    value_starts: list[int],
    grid: Grid,
    scaling: float,
) -> tuple[Float[Tensor, "B H 1"], Float[Tensor, "B H 1"], Float[Tensor, "B H Rv"], Float[Tensor, "B H K"]]:
    batch, heads, key_width = query.shape
    tokens, value_width = raw_value.shape[1:]
    groups, blocks = len(key_starts) - 1, grid.blocks(tokens)
    device = query.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    run = 1 << max(0, (batch * blocks // (PROGRAMS * processors)).bit_length() - 1)  # few values: each is compiled
    parts = triton.cdiv(blocks, run)
    query, scores, raw_key, raw_value = (x.contiguous() for x in (query, scores, raw_key, raw_value))
    highest, running = scores.new_empty(batch, heads, parts), scores.new_empty(batch, heads, blocks)
    total, mixed = torch.empty_like(highest), scores.new_empty(batch, heads, parts, value_width)
    spread = scores.new_empty(batch, heads, blocks, grid.span)
    for start, stop in head_runs(key_starts, value_starts, WIDEST // raw_key.element_size()):
        here = heads // groups * (stop - start)
        key_align, value_align = (
            math.gcd(8, starts[start], starts[stop], starts[-1]) for starts in (key_starts, value_starts)
        )
        keys, values = (starts[stop] - starts[start] for starts in (key_starts, value_starts))
        _raw_partials[(parts, batch)](
            query,
            scores,
            raw_key,
            raw_value,
            highest,
            total,
            mixed,
            running,
            spread,
            scaling,
            grid.shape,
            tokens,
            grid.window,
            grid.points,
            blocks,
            parts,
            heads // groups * start,
            key_starts[start] // key_align,
            key_starts[stop] // key_align,
            value_starts[start] // value_align,
            value_starts[stop] // value_align,
            HEADS=heads,
            HERE=here,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            KEY_ALIGN=key_align,
            VALUE_ALIGN=value_align,
            ROWS=max(16, triton.next_power_of_2(here)),
            KEYS=max(16, triton.next_power_of_2(keys)),
            VALUES=max(16, triton.next_power_of_2(values)),
            RUN=run,
            BLOCK=block_tokens(raw_key.dtype),
            CELLS=grid.cells,
            SPAN=grid.span,
            SUPPORT=SUPPORT,
            PRECISION="tf32x3" if raw_key.element_size() == 4 else "tf32",  # 16-bit values lose nothing in tf32
            num_warps=8,
            num_stages=2,
        )
    top = highest.amax(-1, keepdim=True)
    factor = (highest - top).exp()
    output = (factor.unsqueeze(2) @ mixed).squeeze(2)
    spread = spread * (running - top).exp().unsqueeze(-1)
    return top, (factor * total).sum(-1, keepdim=True), output, overlap_add(spread, grid)


def head_runs(key_starts: list[int], value_starts: list[int], widest: int) -> list[tuple[int, int]]:
    """Key heads that one program takes together: as many as have at most `widest` raw channels, or one."""
    runs, start = [], 0
    for stop in range(1, len(key_starts)):
        wide = max(starts[min(stop + 1, len(starts) - 1)] - starts[start] for starts in (key_starts, value_starts))
        if stop == len(key_starts) - 1 or wide > widest:
            runs.append((start, stop))
            start = stop
    return runs
