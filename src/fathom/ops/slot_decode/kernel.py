"""`slot_decode`: Triton kernels.

`_partials` reads every key and value once and turns keys in registers, `_merge` puts blocks of slots together, `_evict`
moves slots j + 1 … n − 1 in place. All sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import FLOATS
from fathom.ops.run_merge.plain import SMALLEST

BLOCK = 32  # slots of a program that attends: 128 registers a thread at width 128
CHUNK = 256  # slots of a program that counts
MOVED = 512  # slots that move at a time
SLICE = 16  # channels of a program that moves: 32 bytes of bfloat16, the least that memory transfers


@triton.jit
def _partials(
    query,
    new_key,
    new_value,
    key,
    value,
    cos,
    sin,
    scores,
    highest,
    total,
    mixed,
    scaling,
    slots,
    blocks,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores, and per block μ = max s, l = Σ e^{s − μ}, o = Σ e^{s − μ} v. Program: block of slots, key/value head."""
    block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    held, newest = slot < slots, slot == slots
    low_channel = tl.arange(0, HALF)
    channel = tl.arange(0, 2 * HALF)

    row = (group * slots + slot)[:, None] * (2 * HALF)
    low = tl.load(key + row + low_channel[None, :], mask=held[:, None], other=0.0)
    high = tl.load(key + row + HALF + low_channel[None, :], mask=held[:, None], other=0.0)
    v = tl.load(value + row + channel[None, :], mask=held[:, None], other=0.0)
    new = group * (2 * HALF)
    low = tl.where(newest[:, None], tl.load(new_key + new + low_channel)[None, :], low).to(tl.float32)
    high = tl.where(newest[:, None], tl.load(new_key + new + HALF + low_channel)[None, :], high).to(tl.float32)
    v = tl.where(newest[:, None], tl.load(new_value + new + channel)[None, :], v).to(tl.float32)
    if TURN:
        angle = slot[:, None] * (2 * HALF) + low_channel[None, :]
        c = tl.load(cos + angle, mask=(slot <= slots)[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=(slot <= slots)[:, None], other=0.0).to(tl.float32)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
        query_cos = tl.load(cos + slots * (2 * HALF) + low_channel).to(tl.float32)
        query_sin = tl.load(sin + slots * (2 * HALF) + low_channel).to(tl.float32)

    for h in tl.static_range(PER_GROUP):
        head = group * PER_GROUP + h
        q_low = tl.load(query + head * (2 * HALF) + low_channel).to(tl.float32)
        q_high = tl.load(query + head * (2 * HALF) + HALF + low_channel).to(tl.float32)
        if TURN:
            q_turned = q_low * query_cos - q_high * query_sin
            q_high = q_high * query_cos + q_low * query_sin
            q_low = q_turned
        score = tl.sum(low * q_low[None, :] + high * q_high[None, :], 1) * scaling
        score = tl.where(slot <= slots, score, float("-inf"))
        tl.store(scores + head * (slots + 1) + slot, score, mask=slot <= slots)
        top = tl.max(score, 0)  # finite: every block has a slot
        e = tl.exp(score - top)
        out = head * blocks + block
        tl.store(highest + out, top)
        tl.store(total + out, tl.sum(e, 0))
        tl.store(mixed + out * (2 * HALF) + channel, tl.sum(e[:, None] * v, 0))


@triton.jit(do_not_specialize=["stride", "cycle"])
def _merge(
    scores,
    highest,
    total,
    mixed,
    received,
    queries,
    pointer,
    output,
    grown_received,
    grown_queries,
    slots,
    blocks,
    stride,
    cycle,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    REDUCE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COUNT: tl.constexpr,
    SWEEP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """o = Σ e^{μ_b − μ} o_b / Σ e^{μ_b − μ} l_b, and the statistics. Program: (query head, chunk of slots), group."""
    part, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCKS)
    if part < PER_GROUP:
        head = group * PER_GROUP + part
        tops = tl.load(highest + head * blocks + place, mask=place < blocks, other=float("-inf"))
        top = tl.max(tops, 0)
        sums = tl.load(total + head * blocks + place, mask=place < blocks, other=0.0)
        whole = tl.sum(tl.exp(tops - top) * sums, 0)
        channel = tl.arange(0, WIDTH)
        o = tl.zeros([WIDTH], tl.float32)
        for start in range(0, BLOCKS, PART):
            b = start + tl.arange(0, PART)
            share = tl.exp(tl.load(highest + head * blocks + b, mask=b < blocks, other=float("-inf")) - top)
            at = (head * blocks + b)[:, None] * WIDTH + channel[None, :]
            o += tl.sum(share[:, None] * tl.load(mixed + at, mask=(b < blocks)[:, None], other=0.0), 0)
        tl.store(output + head * WIDTH + channel, (o / whole).to(output.dtype.element_ty))

    if REDUCE != "none":
        slot = part * CHUNK + tl.arange(0, CHUNK)
        exists = slot <= slots
        pooled = tl.zeros([CHUNK], tl.float32)
        for h in tl.static_range(PER_GROUP):
            each = group * PER_GROUP + h
            tops = tl.load(highest + each * blocks + place, mask=place < blocks, other=float("-inf"))
            top = tl.max(tops, 0)
            sums = tl.load(total + each * blocks + place, mask=place < blocks, other=0.0)
            whole = tl.sum(tl.exp(tops - top) * sums, 0)
            score = tl.load(scores + each * (slots + 1) + slot, mask=exists, other=float("-inf"))
            weight = tl.exp(score - top) / whole
            if REDUCE == "max":
                pooled = tl.maximum(pooled, weight)
            else:
                pooled += weight
        if REDUCE == "mean":
            pooled = pooled / PER_GROUP
        if ACCUMULATE:
            pooled += tl.load(received + group * slots + slot, mask=slot < slots, other=0.0)
        tl.store(grown_received + group * (slots + 1) + slot, pooled, mask=exists)
        if COUNT:
            count = tl.load(queries + group * slots + slot, mask=slot < slots, other=0) + 1
            tl.store(grown_queries + group * (slots + 1) + slot, count, mask=exists)
    if SWEEP:
        walker = pointer + group // GROUPS
        tl.store(walker, (tl.load(walker) + stride) % cycle, mask=(part == 0) & (group % GROUPS == 0))


@triton.jit
def _score(
    received, queries, group, slot, mask, slots, GROUPS: tl.constexpr, BY_LAYER: tl.constexpr, COUNT: tl.constexpr
):
    """S/C (or S) of these slots, of one head or the mean over the heads of a layer."""
    if BY_LAYER:
        first = group // GROUPS * GROUPS
        score = tl.zeros(slot.shape, tl.float32)
        for g in tl.static_range(GROUPS):
            at = (first + g) * (slots + 1) + slot
            one = tl.load(received + at, mask=mask, other=0.0)
            if COUNT:
                one = one / tl.load(queries + at, mask=mask, other=1).to(tl.float32)
            score += one
        score = score / GROUPS
    else:
        at = group * (slots + 1) + slot
        score = tl.load(received + at, mask=mask, other=0.0)
        if COUNT:
            score = score / tl.load(queries + at, mask=mask, other=1).to(tl.float32)
    return score


@triton.jit(do_not_specialize=["first", "candidates", "stride", "cycle"])
def _evict(
    new_key,
    new_value,
    key,
    value,
    grown_received,
    grown_queries,
    received,
    queries,
    pointer,
    slots,
    first,
    candidates,
    stride,
    cycle,
    smallest,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    STORED: tl.constexpr,
    COUNT: tl.constexpr,
    AVERAGE: tl.constexpr,
    BY_LAYER: tl.constexpr,
    SWEEP: tl.constexpr,
    MERGE: tl.constexpr,
    POOL: tl.constexpr,
    SLOTS: tl.constexpr,
    MOVED: tl.constexpr,
):
    """Choose j and close its gap. Program: slice of channels, key/value head; no other program touches its memory."""
    part, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    leaves = first
    if SWEEP:  # `_merge` has moved the pointer on: this is where it stood
        leaves += ((tl.load(pointer + group // GROUPS) + stride * cycle - stride) % cycle).to(tl.int32)
    if POOL > 1:
        place = tl.arange(0, POOL)
        among = place < candidates
        score = _score(grown_received, grown_queries, group, leaves + place, among, slots, GROUPS, BY_LAYER, AVERAGE)
        score = tl.where(among, score, float("inf"))
        chosen = tl.min(tl.where(score == tl.min(score, 0), place, POOL), 0)
        leaves += tl.minimum(chosen, candidates - 1)  # within bounds for weights that are not numbers, too

    channel = part * SLICE + tl.arange(0, SLICE)
    fresh_key = tl.load(new_key + group * WIDTH + channel)
    fresh_value = tl.load(new_value + group * WIDTH + channel)
    if MERGE:
        two = tl.arange(0, 2)
        pair = _score(grown_received, grown_queries, group, leaves + two, two < 2, slots, GROUPS, BY_LAYER, AVERAGE)
        pair = pair / tl.maximum(tl.sum(pair, 0), smallest)
        ours = tl.sum(tl.where(two == 0, pair, 0.0), 0)
        theirs = tl.sum(tl.where(two == 1, pair, 0.0), 0)
        gone = ours * tl.load(value + (group * slots + leaves) * WIDTH + channel).to(tl.float32)
    for start in range(0, SLOTS, MOVED):
        slot = leaves + start + tl.arange(0, MOVED)
        inside, stored = slot < slots, slot + 1 < slots
        target = (group * slots + slot)[:, None] * WIDTH + channel[None, :]
        k = tl.load(key + target + WIDTH, mask=stored[:, None], other=0.0)
        v = tl.load(value + target + WIDTH, mask=stored[:, None], other=0.0)
        k = tl.where(stored[:, None], k, fresh_key[None, :])
        v = tl.where(stored[:, None], v, fresh_value[None, :])
        if MERGE:
            folded = (gone[None, :] + theirs * v.to(tl.float32)).to(v.dtype)
            v = tl.where((slot == leaves)[:, None], folded, v)
        tl.debug_barrier()  # every slot of this turn is read before one is overwritten
        tl.store(key + target, k, mask=inside[:, None])
        tl.store(value + target, v, mask=inside[:, None])
    if STORED:
        slot = tl.arange(0, SLOTS)
        inside = (slot < slots) & (part == 0)
        source = group * (slots + 1) + slot + (slot >= leaves).to(tl.int32)
        target = group * slots + slot
        tl.store(received + target, tl.load(grown_received + source, mask=inside, other=0.0), mask=inside)
        if COUNT:
            tl.store(queries + target, tl.load(grown_queries + source, mask=inside, other=0), mask=inside)


def serves(query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None) -> bool:
    """Whether the kernels take these: one floating type of 16 or 32 bits, one power-of-2 width, all of it turned."""
    width = key.shape[-1]
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in FLOATS
        and value.shape[-1] == width >= 4
        and width & (width - 1) == 0
        and (cos is None or (cos.shape[-1] == width and cos.shape[0] == 1))
    )


def slot_decode(
    query: Float[Tensor, "B H 1 D"],
    new_key: Float[Tensor, "B G 1 D"],
    new_value: Float[Tensor, "B G 1 D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    table: tuple[Tensor, Tensor] | None,
    scaling: float,
    received: Float[Tensor, "B G M"] | None,
    queries: Int[Tensor, "B G M"] | None,
    pointer: Int[Tensor, " B"] | None,
    first: int,
    candidates: int,
    stride: int,
    cycle: int,
    reduce: str,
    accumulate: bool,
    average: bool,
    by_layer: bool,
    merge: bool,
) -> Float[Tensor, "B H 1 D"]:
    batch, heads, _, width = query.shape
    groups, slots = key.shape[1:3]
    blocks, per_group = triton.cdiv(slots + 1, BLOCK), heads // groups
    query, new_key, new_value = query.contiguous(), new_key.contiguous(), new_value.contiguous()
    output = torch.empty_like(query)
    scores = query.new_empty(batch, heads, slots + 1, dtype=torch.float32)
    highest, total = scores.new_empty(2, batch, heads, blocks)
    mixed = scores.new_empty(batch, heads, blocks, width)
    cos, sin = (query, query) if table is None else (table[0].contiguous(), table[1].contiguous())
    # a tensor that is not there is never read: its place is taken by another
    grown_received = scores if reduce == "none" else scores.new_empty(batch, groups, slots + 1)
    grown_queries = torch.empty_like(grown_received, dtype=torch.int32) if queries is not None else scores
    held_received, held_queries = (scores if x is None else x for x in (received, queries))
    walker = scores if pointer is None else pointer
    _partials[(blocks, batch * groups)](
        query,
        new_key,
        new_value,
        key,
        value,
        cos,
        sin,
        scores,
        highest,
        total,
        mixed,
        scaling,
        slots,
        blocks,
        PER_GROUP=per_group,
        HALF=width // 2,
        TURN=table is not None,
        BLOCK=BLOCK,
    )
    chunks = 1 if reduce == "none" else triton.cdiv(slots + 1, CHUNK)
    _merge[(max(per_group, chunks), batch * groups)](
        scores,
        highest,
        total,
        mixed,
        held_received,
        held_queries,
        walker,
        output,
        grown_received,
        grown_queries,
        slots,
        blocks,
        stride,
        cycle,
        GROUPS=groups,
        PER_GROUP=per_group,
        WIDTH=width,
        REDUCE=reduce,
        ACCUMULATE=accumulate and received is not None,
        COUNT=queries is not None,
        SWEEP=pointer is not None,
        BLOCKS=triton.next_power_of_2(blocks),
        PART=32,
        CHUNK=CHUNK,
    )
    channels = min(SLICE, width)
    _evict[(width // channels, batch * groups)](
        new_key,
        new_value,
        key,
        value,
        grown_received,
        grown_queries,
        held_received,
        held_queries,
        walker,
        slots,
        first,
        candidates,
        stride,
        cycle,
        SMALLEST,
        GROUPS=groups,
        WIDTH=width,
        SLICE=channels,
        STORED=received is not None,
        COUNT=queries is not None,
        AVERAGE=average,
        BY_LAYER=by_layer,
        SWEEP=pointer is not None,
        MERGE=merge,
        POOL=1 if candidates == 1 else triton.next_power_of_2(candidates),
        SLOTS=triton.next_power_of_2(slots),
        MOVED=min(MOVED, triton.next_power_of_2(slots)),
        num_warps=8,
    )
    return output
