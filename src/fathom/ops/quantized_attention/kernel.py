"""`quantized_attention` of one query, whose codes are read as they are stored: flash decoding in Triton.

`_partials` gives μ, Σ e^{s − μ} and Σ e^{s − μ} v̂ of a run of blocks, for all query heads of a key/value head, so that
codes are read once and nothing rebuilt is written; the last program of a head takes the tokens whose keys are full.
`_combine` puts the runs together. Rebuilt numbers and weights e^{s − μ} are rounded to the type of the cache for the
two products, as `blockwise_attention` does; sums and scores are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.group_quantize import Quantized
from fathom.ops.group_quantize.kernel import unpack_codes
from fathom.ops.kernels import FLOATS, wants_gradient

BLOCK = 64  # tokens of one step, at least a group
PROGRAMS = 8  # a multiprocessor, at least
COMBINED = 32  # runs that are read together
SHARED_BYTES = 232448  # of a program on Hopper; elsewhere as the device says


@triton.jit
def _rebuild(packed, scale, minimum, BITS: tl.constexpr):
    """Bytes [M, N, bytes of a group], scale and minimum [M, N] → numbers [M, N · group] in fp32, lowest bits first."""
    codes = unpack_codes(packed, BITS)
    wide = codes * scale.to(tl.float32)[:, :, None, None] + minimum.to(tl.float32)[:, :, None, None]
    return tl.reshape(wide, (packed.shape[0], packed.shape[1] * packed.shape[2] * (8 // BITS)))


@triton.jit
def _take_in(top, norm, o, q, k, v, exists, scaling, PRECISION: tl.constexpr):
    """One step of the online softmax: q [ROWS, K], k [K, BLOCK], v [BLOCK, V]."""
    s = tl.dot(q, k, input_precision=PRECISION) * scaling
    s = tl.where(exists[None, :], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    e = tl.exp(s - higher[:, None])
    keep = tl.exp(top - higher)
    norm = norm * keep + tl.sum(e, 1)
    o = o * keep[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
    return higher, norm, o


@triton.jit(do_not_specialize=["coded_keys", "coded_values", "full_keys", "groups_held", "values_held", "keys_full",
                               "values_full", "parts"])  # fmt: skip
def _partials(
    query,
    key_codes,
    key_scale,
    key_minimum,
    value_codes,
    value_scale,
    value_minimum,
    key,
    value,
    highest,
    total,
    mixed,
    scaling,
    newest,
    coded_keys,
    coded_values,
    full_keys,
    groups_held,
    values_held,
    keys_full,
    values_full,
    parts,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FULL_STEPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program: run of blocks (the last: the tokens with full keys), key/value head.

    groups_held, values_held, keys_full, values_full: for how many there is room. RESIDUAL > 0: how many count follows
    from the number of the newest token, and full values lie in a ring.
    """
    if RESIDUAL > 0:
        now = tl.load(newest).to(tl.int32)
        coded_keys = now // RESIDUAL * RESIDUAL
        coded_values = now - RESIDUAL
        full_keys = now - coded_keys + 1
    BYTES: tl.constexpr = GROUP * BITS // 8
    KEY_GROUPS: tl.constexpr = BLOCK // GROUP
    VALUE_GROUPS: tl.constexpr = VALUES // GROUP
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row < PER_GROUP
    head = pair * PER_GROUP + row
    key_channel, channel, byte = tl.arange(0, KEYS), tl.arange(0, VALUES), tl.arange(0, BYTES)
    token_in = tl.arange(0, BLOCK)
    q = tl.load(query + head[:, None] * KEYS + key_channel[None, :], mask=real[:, None], other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, VALUES], tl.float32)
    value += pair * values_full * VALUES

    if part < parts - 1:
        groups = coded_keys // GROUP
        key_codes += pair * groups_held * (KEYS * BYTES)
        key_scale += pair * groups_held * KEYS
        key_minimum += pair * groups_held * KEYS
        value_codes += pair * values_held * (VALUE_GROUPS * BYTES)
        value_scale += pair * values_held * VALUE_GROUPS
        value_minimum += pair * values_held * VALUE_GROUPS
        for step in range(RUN):  # blocks after the last have no tokens
            block = part * RUN + step
            # keys [KEYS, BLOCK]: channels are the rows of a group, as they are stored
            group = block * KEY_GROUPS + tl.arange(0, KEY_GROUPS)
            held = (group < groups)[None, :]
            of = group[None, :] * KEYS + key_channel[:, None]
            packed = tl.load(key_codes + of[:, :, None] * BYTES + byte[None, None, :], mask=held[:, :, None], other=0)
            scale = tl.load(key_scale + of, mask=held, other=0.0)
            minimum = tl.load(key_minimum + of, mask=held, other=0.0)
            k = _rebuild(packed, scale, minimum, BITS).to(q.dtype)
            # values [BLOCK, VALUES]
            token = block * BLOCK + token_in
            exists, coded = token < coded_keys, token < coded_values
            of = token[:, None] * VALUE_GROUPS + tl.arange(0, VALUE_GROUPS)[None, :]
            packed = tl.load(
                value_codes + of[:, :, None] * BYTES + byte[None, None, :], mask=coded[:, None, None], other=0
            )
            scale = tl.load(value_scale + of, mask=coded[:, None], other=0.0)
            minimum = tl.load(value_minimum + of, mask=coded[:, None], other=0.0)
            full = (exists & (token >= coded_values))[:, None]
            slot = token % (RESIDUAL + 1) if RESIDUAL > 0 else token - coded_values
            v = tl.load(value + slot[:, None] * VALUES + channel[None, :], mask=full, other=0.0)
            v = tl.where(full, v, _rebuild(packed, scale, minimum, BITS).to(q.dtype))
            top, norm, o = _take_in(top, norm, o, q, k, v, exists, scaling, PRECISION)
    else:
        key += pair * keys_full * KEYS
        for step in range(FULL_STEPS):
            place = step * BLOCK + token_in
            exists = place < full_keys
            k = tl.load(key + place[None, :] * KEYS + key_channel[:, None], mask=exists[None, :], other=0.0)
            token = coded_keys + place
            slot = token % (RESIDUAL + 1) if RESIDUAL > 0 else token - coded_values
            v = tl.load(value + slot[:, None] * VALUES + channel[None, :], mask=exists[:, None], other=0.0)
            top, norm, o = _take_in(top, norm, o, q, k, v, exists, scaling, PRECISION)

    out = head * parts + part
    tl.store(highest + out, top, mask=real)
    tl.store(total + out, norm, mask=real)
    tl.store(mixed + out[:, None] * VALUES + channel[None, :], o, mask=real[:, None])


@triton.jit(do_not_specialize=["parts"])
def _combine(highest, total, mixed, output, parts, WIDTH: tl.constexpr, STEPS: tl.constexpr, COMBINED: tl.constexpr):
    """o = Σ e^{μ_b − μ} o_b / Σ e^{μ_b − μ} l_b. Program: query head."""
    head = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    top = -1e30
    norm = 0.0
    o = tl.zeros([WIDTH], tl.float32)
    for step in range(STEPS):
        part = step * COMBINED + tl.arange(0, COMBINED)
        held = part < parts
        tops = tl.load(highest + head * parts + part, mask=held, other=-1e30)
        sums = tl.load(total + head * parts + part, mask=held, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        keep = tl.exp(top - higher)
        share = tl.exp(tops - higher)
        at = (head * parts + part)[:, None] * WIDTH + channel[None, :]
        o = o * keep + tl.sum(share[:, None] * tl.load(mixed + at, mask=held[:, None], other=0.0), 0)
        norm = norm * keep + tl.sum(share * sums, 0)
        top = higher
    tl.store(output + head * WIDTH + channel, (o / norm).to(output.dtype.element_ty))


def serves(query: Tensor, key: Tensor, value: Tensor, bits: int, group: int) -> bool:
    """Whether the kernels take these: one query, one floating type of 16 or 32 bits, no gradient wanted, widths and
    groups that are powers of 2, at least 16 channels, groups of whole bytes, and steps that fit in shared memory."""
    if query.shape[2] > 1 or wants_gradient(query, key, value):
        return False
    sizes = (group, key.shape[-1], value.shape[-1])
    shared = SHARED_BYTES
    if query.is_cuda:
        shared = getattr(torch.cuda.get_device_properties(query.device), "shared_memory_per_block_optin", SHARED_BYTES)
    return (
        all(size & (size - 1) == 0 for size in sizes)
        and min(sizes[1:]) >= 16
        and group * bits >= 8
        and 2.5 * max(BLOCK, group) * max(sizes[1:]) * query.element_size() <= shared  # as compiled: keys, values, rest
        and query.dtype == key.dtype == value.dtype
        and query.dtype in FLOATS
    )


def quantized_attention(
    query: Float[Tensor, "B H 1 Dk"],
    key_codes: Quantized,
    value_codes: Quantized | None,
    key: Float[Tensor, "B G nk_full Dk"],
    value: Float[Tensor, "B G nv_full Dv"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The output for the newest token of codes whose lengths the host knows, in one launch."""
    held = [x.contiguous() for x in (query, *key_codes, *(value_codes or key_codes), key, value)]
    coded_values = 0 if value_codes is None else value_codes[0].shape[2]
    counts = query, key_codes[0].shape[2] * group, coded_values, key.shape[2]  # the first is not read
    return _launched(held, counts, coded_values, bits, group, scaling, residual=0)


def ring_quantized_attention(
    query: Float[Tensor, "B H 1 Dk"],
    key_codes: Quantized,
    value_codes: Quantized,
    key: Float[Tensor, "B G r Dk"],
    value: Float[Tensor, "B G r1 Dv"],
    newest: Int[Tensor, " 1"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The output for the newest token, whose number the device alone knows: a launch that a CUDA graph can hold."""
    held = [query.contiguous(), *key_codes, *value_codes, key, value]
    return _launched(held, (newest, 0, 0, 0), value_codes[0].shape[2], bits, group, scaling, residual=key.shape[2])


def _launched(
    held: list[Tensor], counts: tuple[Tensor, int, int, int], values_held: int, bits: int, group: int, scaling: float,
    residual: int,
) -> Float[Tensor, "B H 1 Dv"]:  # fmt: skip
    query, key, value = held[0], held[-2], held[-1]
    batch, heads, _, key_width = query.shape
    groups, width, groups_held = key.shape[1], value.shape[3], held[1].shape[2]
    per_group = heads // groups
    block = max(BLOCK, group)
    blocks = triton.cdiv(groups_held * group, block)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    # few values: each is compiled
    run = 1 << max(0, (batch * groups * blocks // (PROGRAMS * processors)).bit_length() - 1)
    parts = triton.cdiv(blocks, run) + 1
    highest, total = query.new_empty(2, batch, heads, parts, dtype=torch.float32)
    mixed = highest.new_empty(batch, heads, parts, width)
    output = query.new_empty(batch, heads, 1, width)
    _partials[(parts, batch * groups)](
        *held,
        highest,
        total,
        mixed,
        scaling,
        *counts,
        groups_held,
        values_held,
        key.shape[2],
        value.shape[2],
        parts,
        PER_GROUP=per_group,
        ROWS=max(16, triton.next_power_of_2(per_group)),
        KEYS=key_width,
        VALUES=width,
        BITS=bits,
        GROUP=group,
        BLOCK=block,
        RUN=run,
        FULL_STEPS=triton.next_power_of_2(triton.cdiv(key.shape[2], block)),
        RESIDUAL=residual,
        PRECISION="ieee",
        num_warps=4,
        num_stages=1,
    )
    _combine[(batch * heads,)](
        highest,
        total,
        mixed,
        output,
        parts,
        WIDTH=width,
        STEPS=triton.next_power_of_2(triton.cdiv(parts, COMBINED)),
        COMBINED=COMBINED,
    )
    return output
