"""`filled_attention`: Triton kernels. `_partials` reads what is visible of a part of the buffers, `_merge` joins."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from fathom.ops.kernels import FLOATS

BLOCK = 64  # slots of 16-bit numbers that are read at a time; of 32-bit ones half as many
PROGRAMS = 4  # programs of `_partials` for each multiprocessor, so that their reads overlap
MOST = 128  # parts of a buffer


@triton.jit
def _partials(
    query,
    key,
    value,
    visible,
    output,
    highest,
    total,
    mixed,
    scaling,
    room,
    part_blocks,
    key_batch,
    key_head,
    key_slot,
    value_batch,
    value_head,
    value_slot,
    visible_batch,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """μ = max s, l = Σ e^{s − μ}, o = Σ e^{s − μ} v / l over a part. Program: (part, key/value head of a row)."""
    part, group = tl.program_id(0), tl.program_id(1)
    row, head = (group // GROUPS).to(tl.int64), (group % GROUPS).to(tl.int64)
    member = tl.arange(0, HEADS)
    real = member < PER_GROUP
    channel, value_channel = tl.arange(0, CHANNELS), tl.arange(0, VALUE_CHANNELS)
    heads = group.to(tl.int64) * PER_GROUP + member  # rows of [B·H, …]
    q = tl.load(
        query + heads[:, None] * WIDTH + channel[None, :],
        mask=real[:, None] & (channel < WIDTH)[None, :],
        other=0.0,
    )
    top = tl.full([HEADS], float("-inf"), tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    o = tl.zeros([HEADS, VALUE_CHANNELS], tl.float32)
    first = part * part_blocks * BLOCK
    for start in range(first, tl.minimum(first + part_blocks * BLOCK, room), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = tl.load(visible + row * visible_batch + slot, mask=slot < room, other=0)
        if tl.max(seen.to(tl.int32), 0) > 0:
            at = key + row * key_batch + head * key_head + slot.to(tl.int64)[:, None] * key_slot + channel[None, :]
            k = tl.load(at, mask=seen[:, None] & (channel < WIDTH)[None, :], other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            score = tl.where(seen[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            e = tl.exp(score - higher[:, None])
            fade = tl.exp(top - higher)
            at = value + row * value_batch + head * value_head + slot.to(tl.int64)[:, None] * value_slot
            v = tl.load(
                at + value_channel[None, :],
                mask=seen[:, None] & (value_channel < VALUE_WIDTH)[None, :],
                other=0.0,
            )
            o = o * fade[:, None] + tl.dot(e.to(v.dtype), v, input_precision="ieee")
            norm = norm * fade + tl.sum(e, 1)
            top = higher
    if PARTS == 1:
        at = output + heads[:, None] * VALUE_WIDTH + value_channel[None, :]
        o = o / norm[:, None]
        tl.store(at, o.to(output.dtype.element_ty), mask=real[:, None] & (value_channel < VALUE_WIDTH)[None, :])
    else:
        at = heads * PARTS + part
        tl.store(highest + at, top, mask=real)
        tl.store(total + at, norm, mask=real)
        at = at[:, None] * VALUE_CHANNELS + value_channel[None, :]
        tl.store(mixed + at, o, mask=real[:, None])


@triton.jit
def _merge(
    output,
    highest,
    total,
    mixed,
    VALUE_WIDTH: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """o = Σ e^{μ_p − μ} o_p / Σ e^{μ_p − μ} l_p. Program: query head of a row."""
    head = tl.program_id(0).to(tl.int64)
    place, channel = tl.arange(0, PLACES), tl.arange(0, VALUE_CHANNELS)
    tops = tl.load(highest + head * PARTS + place, mask=place < PARTS, other=float("-inf"))
    share = tl.exp(tops - tl.max(tops, 0))  # 0 for a part in which nothing is visible
    norm = tl.sum(share * tl.load(total + head * PARTS + place, mask=place < PARTS, other=0.0), 0)
    at = mixed + (head * PARTS + place)[:, None] * VALUE_CHANNELS + channel[None, :]
    o = tl.sum(share[:, None] * tl.load(at, mask=(place < PARTS)[:, None], other=0.0), 0) / norm
    tl.store(output + head * VALUE_WIDTH + channel, o.to(output.dtype.element_ty), mask=channel < VALUE_WIDTH)


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these: one floating type of 16 or 32 bits, channels side by side, 256 at most."""
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in FLOATS
        and key.stride(3) == value.stride(3) == 1
        and max(key.shape[3], value.shape[3]) <= 256
    )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def filled_attention(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G R D"],
    value: Float[Tensor, "B G R Dv"],
    visible: Bool[Tensor, "B 1 1 R"],
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The output o, as in the plain form. A buffer is cut into enough parts to keep all multiprocessors busy."""
    batch, heads, _, width = query.shape
    groups, room, value_width = key.shape[1], key.shape[2], value.shape[3]
    query, shown = query.contiguous(), visible.expand(batch, 1, 1, room)
    block = BLOCK * 2 // query.element_size()
    blocks = triton.cdiv(room, block)
    wanted = max(1, min(MOST, blocks, PROGRAMS * _multiprocessors(query.device) // (batch * groups)))
    part_blocks = triton.cdiv(blocks, wanted)
    parts = triton.cdiv(blocks, part_blocks)
    output = query.new_empty(batch, heads, 1, value_width)
    channels, value_channels = (max(16, triton.next_power_of_2(x)) for x in (width, value_width))
    highest, total = query.new_empty(2, batch * heads, parts, dtype=torch.float32)
    mixed = highest.new_empty(batch * heads, parts, value_channels) if parts > 1 else highest
    _partials[(parts, batch * groups)](
        query,
        key,
        value,
        shown,
        output,
        highest,
        total,
        mixed,
        scaling,
        room,
        part_blocks,
        *key.stride()[:3],
        *value.stride()[:3],
        shown.stride(0),
        GROUPS=groups,
        PER_GROUP=heads // groups,
        HEADS=max(16, triton.next_power_of_2(heads // groups)),  # a matrix unit's least
        WIDTH=width,
        VALUE_WIDTH=value_width,
        CHANNELS=channels,
        VALUE_CHANNELS=value_channels,
        PARTS=parts,
        BLOCK=block,
    )
    if parts > 1:
        _merge[(batch * heads,)](
            output,
            highest,
            total,
            mixed,
            VALUE_WIDTH=value_width,
            VALUE_CHANNELS=value_channels,
            PARTS=parts,
            PLACES=triton.next_power_of_2(parts),
        )
    return output
