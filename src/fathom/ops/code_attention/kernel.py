"""`code_scores` and `code_mix`, one pass over the codes each: Triton kernels.

Codes are read as they are stored (int16 less 32768, or int32), in words of up to 8 bytes and two words at once, for up
to 4 rows in `_scores` and for all in `_histogram`, which adds up with atomics; nothing of the size tokens · N is
written. A table larger than the L1 cache would come from L2 for every token. So `_scores` goes through the stages with
many tokens, holds one stage of the table in shared memory (two rows side by side: one 8-byte read a token), and loads
the next stage meanwhile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

SCORES = {"BLOCK": 2048, "num_warps": 16}  # tokens and warps of a program
HISTOGRAM = {"BLOCK": 128, "num_warps": 4}
SHARED_ENTRIES = 4096  # 8 bytes an entry must fit into shared memory; larger codebooks are read where they are
FROM_GLOBAL = {"BLOCK": 256, "num_warps": 4}  # for those
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@triton.jit
def _words(held, exists, WIDE: tl.constexpr):
    """The next words of every token: one load of two words, or of one."""
    if WIDE == 2:
        return tl.split(tl.load(held[:, None] + tl.arange(0, 2)[None, :], mask=exists[:, None], other=0))
    else:
        return (tl.load(held, mask=exists, other=0),)


@triton.jit
def _code(word, j: tl.constexpr, BITS: tl.constexpr):
    """Code j of a word; 16 bits hold it less 32768."""
    code = (word >> (j * BITS)).to(tl.int32)
    if BITS == 16:
        code = (code & 0xFFFF) ^ 0x8000
    return code


@triton.jit
def _stage(table, stage, rows, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SIZE: tl.constexpr):
    """One stage of the tables of ROWS rows, past the L1 cache."""
    entry = tl.arange(0, SIZE)
    loaded = ()
    for r in tl.static_range(ROWS):
        there = (entry < S) & (stage < N) & (r < rows)
        numbers = tl.load(table + r * (N * S) + stage * S + entry, mask=there, other=0.0, cache_modifier=".cg")
        loaded += (numbers,)  # type: ignore[assignment]
    return loaded


@triton.jit
def _scores(words, tables, scores, tokens, R: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
            SIZE: tl.constexpr, SHARED: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Program: tokens, head of a row, ROWS (2 or 4) of its R query rows."""
    pair = tl.program_id(1).to(tl.int64)
    first = pair * R + tl.program_id(2) * ROWS
    rows = R - tl.program_id(2) * ROWS
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    held = words + (pair * tokens + token) * (N // PER)
    table = tables + first * (N * S)
    totals = (tl.zeros((BLOCK,), dtype=tl.float32),) * ROWS
    if SHARED:
        ahead = _stage(table, 0, rows, ROWS, N, S, SIZE)
    for step in range(N // (PER * WIDE)):
        pieces = _words(held + step * WIDE, exists, WIDE)
        for i in tl.static_range(WIDE):
            for j in tl.static_range(PER):
                stage = (step * WIDE + i) * PER + j
                code = _code(pieces[i], j, BITS)
                added = totals[:0]
                if SHARED:
                    code &= SIZE - 1  # none beyond the table where no token is
                    now = ahead
                    ahead = _stage(table, stage + 1, rows, ROWS, N, S, SIZE)
                    for r in tl.static_range(0, ROWS, 2):
                        low = now[r].to(tl.uint32, bitcast=True).to(tl.uint64)
                        high = now[r + 1].to(tl.uint32, bitcast=True).to(tl.uint64)
                        both = tl.gather(low | (high << 32), code, 0)
                        added += (
                            totals[r] + both.to(tl.uint32).to(tl.float32, bitcast=True),
                            totals[r + 1] + (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True),
                        )
                else:
                    for r in tl.static_range(ROWS):
                        at = table + r * (N * S) + stage * S + code
                        added += (totals[r] + tl.load(at, mask=exists & (r < rows), other=0.0),)
                totals = added
    for r in tl.static_range(ROWS):
        tl.store(scores + (first + r) * tokens + token, totals[r], mask=exists & (r < rows))


@triton.jit
def _histogram(words, weights, mass, tokens, R: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
               PER: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program: tokens, head of a row. ROWS: R, rounded up to a power of 2. R = 4 adds 16 bytes with one instruction."""
    pair = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    exists, real = token < tokens, row < R
    both = exists[:, None] & real[None, :]
    held = words + (pair * tokens + token) * (N // PER)
    table = mass + pair * (N * S * R) + row[None, :]
    weight = tl.load(weights + (pair * R + row[None, :]) * tokens + token[:, None], mask=both, other=0.0)
    for step in range(N // (PER * WIDE)):
        pieces = _words(held + step * WIDE, exists, WIDE)
        for i in tl.static_range(WIDE):
            for j in tl.static_range(PER):
                entry = _code(pieces[i], j, BITS) + ((step * WIDE + i) * PER + j) * S
                tl.atomic_add(table + entry[:, None] * R, weight, mask=both, sem="relaxed")


def code_scores(
    query: Float[Tensor, "B G R D"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G R t"]:
    """q·k̂ in fp32."""
    batch, groups, rows, _ = query.shape
    stages, size = books.shape[1:3]
    tables = _products(query, books)
    scores = torch.empty(batch, groups, rows, codes.shape[2], device=query.device)
    at_once = 4 if rows > 2 else 2
    words, layout = _in_words(codes)
    tile = SCORES if size <= SHARED_ENTRIES else FROM_GLOBAL
    _scores[(triton.cdiv(codes.shape[2], tile["BLOCK"]), batch * groups, triton.cdiv(rows, at_once))](
        words,
        tables,
        scores,
        codes.shape[2],
        R=rows,
        ROWS=at_once,
        N=stages,
        S=size,
        SIZE=triton.next_power_of_2(size),
        SHARED=size <= SHARED_ENTRIES,
        **layout,
        **tile,
    )
    return scores


def code_mix(
    weights: Float[Tensor, "B G R t"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G R D"]:
    """Σ_t p_t v̂_t in fp32."""
    batch, groups, rows, tokens = weights.shape
    stages, size = books.shape[1:3]
    mass = torch.zeros(batch, groups, stages * size, rows, device=weights.device)
    words, layout = _in_words(codes)
    _histogram[(triton.cdiv(tokens, HISTOGRAM["BLOCK"]), batch * groups)](
        words,
        weights.float().contiguous(),
        mass,
        tokens,
        R=rows,
        ROWS=triton.next_power_of_2(rows),
        N=stages,
        S=size,
        **layout,
        **HISTOGRAM,
    )
    flat, mass = books.flatten(1, 2).float(), mass.transpose(2, 3)
    if len(books) > 1:
        return mass @ flat
    return (mass.reshape(-1, stages * size) @ flat[0]).view(batch, groups, rows, -1)  # one product for all


def _products(query: Float[Tensor, "B G R D"], books: Float[Tensor, "#G N S D"]) -> Float[Tensor, "B G R N*S"]:
    """q Qᵀ in fp32, contiguous. Products of 16-bit numbers are exact in fp32, so these need no copy of the books."""
    flat = books.flatten(1, 2)
    if len(books) > 1:
        return query.float() @ flat.float().transpose(1, 2)
    rows, table = query.reshape(-1, query.shape[-1]), flat[0].T
    if query.is_cuda and query.dtype == books.dtype and query.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows, table, out_dtype=torch.float32)
    return rows.float() @ table.float()


def _in_words(codes: Int[Tensor, "B G t N"]) -> tuple[Tensor, dict[str, int]]:
    """Codes in the largest integers that a token's codes fill, and how they lie there."""
    codes = codes.contiguous()
    if codes.storage_offset() * codes.itemsize % 8:  # a view from the middle of a word
        codes = codes.clone()
    held = codes.view(WORDS[math.gcd(codes.shape[3] * codes.itemsize, 8)])
    wide = 2 if held.shape[3] % 2 == 0 else 1
    return held, {"PER": held.itemsize // codes.itemsize, "WIDE": wide, "BITS": 8 * codes.itemsize}
