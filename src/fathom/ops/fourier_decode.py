"""One query over raw channels and given scores, in one pass over the tokens: a Triton kernel for FourierAttention.

For a block of tokens and the h = H/G query heads of one key head, with x [h, block] the scores that the compressed
channels gave (one inverse FFT for all tokens) and the key head's raw channels R_k of keys and R_v of values:

    s = scaling · (x + q[R_k] k_rawᵀ),   μ = max s,   e = e^{s − μ},   l = Σ e,   o = e v_raw

e replaces x (0 after the last token, so that its FFT needs no padded copy); μ, l and o are merged over blocks by the
caller. Raw channels are read once for all query heads of a group. No key or value is rebuilt: that would be 2N
multiply-adds a channel and token. Needs the package `triton`, which GPU builds of PyTorch bring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 128


@triton.jit
def _raw_partials(
    scores,
    query,
    raw_key,
    raw_value,
    key_place,
    key_starts,
    value_starts,
    highest,
    total,
    mixed,
    scaling,
    tokens,
    slots,
    blocks,
    key_width,
    value_width,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDEST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < PER_GROUP
    head = batch * HEADS + group * PER_GROUP + row
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens

    start = tl.load(key_starts + group)
    column = tl.arange(0, KEYS)
    ours = column < tl.load(key_starts + group + 1) - start
    channel = tl.load(key_place + group * WIDEST + column, mask=ours, other=0)
    q = tl.load(query + head[:, None] * WIDTH + channel[None, :], mask=real[:, None] & ours[None, :], other=0.0)
    at = (batch * tokens + token)[None, :] * key_width + start + column[:, None]
    k = tl.load(raw_key + at, mask=exists[None, :] & ours[:, None], other=0.0)

    place = head[:, None] * slots + token[None, :]
    inside = real[:, None] & (token < slots)[None, :]
    s = tl.load(scores + place, mask=inside, other=0.0) + tl.dot(q, k, input_precision="ieee")
    s = tl.where(exists[None, :], s * scaling, float("-inf"))
    top = tl.maximum(tl.max(s, 1), -1e30)  # a block after the last token holds nothing but −inf
    e = tl.exp(s - top[:, None])
    tl.store(scores + place, e, mask=inside)

    start = tl.load(value_starts + group)
    column = tl.arange(0, VALUES)
    ours = column < tl.load(value_starts + group + 1) - start
    at = (batch * tokens + token)[:, None] * value_width + start + column[None, :]
    v = tl.load(raw_value + at, mask=exists[:, None] & ours[None, :], other=0.0)
    o = tl.dot(e.to(v.dtype), v, input_precision="ieee")
    out = head * blocks + block
    tl.store(highest + out, top, mask=real)
    tl.store(total + out, tl.sum(e, 1), mask=real)
    tl.store(mixed + out[:, None] * VALUES + column[None, :], o, mask=real[:, None])


def raw_partials(
    scores: Float[Tensor, "B H Tw"],
    query: Float[Tensor, "B H D"],
    raw_key: Float[Tensor, "B t Rk"],
    raw_value: Float[Tensor, "B t Rv"],
    key_place: Int[Tensor, "G widest_key"],
    key_starts: Int[Tensor, " heads"],
    value_starts: Int[Tensor, " heads"],
    widest: int,
    scaling: float,
) -> tuple[Float[Tensor, "B H blocks"], Float[Tensor, "B H blocks"], Float[Tensor, "B H blocks channels"]]:
    """μ, l and o of every block of `BLOCK` tokens; `scores` (fp32, contiguous) becomes e.

    *_starts [G+1]: where each head's raw channels begin among all (int32). key_place: their channels within the head.
    widest: the most raw value channels of a head; o has that many or more, filled up with 0.
    """
    batch, heads, slots = scores.shape
    groups, width, blocks = len(key_starts) - 1, query.shape[2], triton.cdiv(slots, BLOCK)
    keys, values = (max(16, triton.next_power_of_2(channels)) for channels in (key_place.shape[1], widest))
    highest = scores.new_empty(batch, heads, blocks)
    total, mixed = torch.empty_like(highest), scores.new_empty(batch, heads, blocks, values)
    _raw_partials[(blocks, groups, batch)](
        scores,
        query.contiguous(),
        raw_key.contiguous(),
        raw_value.contiguous(),
        key_place.contiguous(),
        key_starts,
        value_starts,
        highest,
        total,
        mixed,
        scaling,
        raw_key.shape[1],
        slots,
        blocks,
        raw_key.shape[2],
        raw_value.shape[2],
        HEADS=heads,
        PER_GROUP=heads // groups,
        WIDTH=width,
        WIDEST=key_place.shape[1],
        ROWS=max(16, triton.next_power_of_2(heads // groups)),
        KEYS=keys,
        VALUES=values,
        BLOCK=BLOCK,
    )
    return highest, total, mixed
