"""Scores and outputs of attention over residual codes, one pass over the codes each: Triton kernels for VQKV.

For a block of tokens, the R query rows that share one key head, and codes z [tokens, N] with N codebooks of S entries:

    s_rt = Σ_i A_r[i, z_ti]                  A = q Qᵀ, one table of N·S numbers a row
    P_r[i, s] = Σ_{t: z_ti = s} p_rt         added up with atomics; the output is P Q

Codes are read as they are stored (int16 less 32768, or int32), once for all R rows, and nothing of the size tokens · N
is written. The same results as `residual_vq.lookup_scores` and `histogram_mix`. Needs the package `triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 128


@triton.jit
def _scores(codes, tables, scores, tokens, R: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
            SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    exists, real = token < tokens, row < R
    both = exists[:, None] & real[None, :]
    held = codes + (pair * tokens + token) * N
    table = tables + pair * (N * S * R) + row[None, :]
    total = tl.zeros((BLOCK, ROWS), dtype=tl.float32)
    for stage in range(N):
        entry = tl.load(held + stage, mask=exists, other=0).to(tl.int32) + SHIFT + stage * S
        total += tl.load(table + entry[:, None] * R, mask=both, other=0.0)
    tl.store(scores + (pair * R + row[None, :]) * tokens + token[:, None], total, mask=both)


@triton.jit
def _histogram(codes, weights, mass, tokens, R: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
               SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    exists, real = token < tokens, row < R
    both = exists[:, None] & real[None, :]
    held = codes + (pair * tokens + token) * N
    table = mass + pair * (N * S * R) + row[None, :]
    weight = tl.load(weights + (pair * R + row[None, :]) * tokens + token[:, None], mask=both, other=0.0)
    for stage in range(N):
        entry = tl.load(held + stage, mask=exists, other=0).to(tl.int32) + SHIFT + stage * S
        tl.atomic_add(table + entry[:, None] * R, weight, mask=both, sem="relaxed")


def code_scores(
    query: Float[Tensor, "B G R D"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G R t"]:
    """q·k̂ in fp32."""
    batch, groups, rows, _ = query.shape
    stages, size, width = books.shape[1:]
    flat = books.reshape(len(books), stages * size, width).float()
    if len(books) == 1:  # one product for all rows and heads
        tables = (flat[0] @ query.float().reshape(-1, width).T).view(-1, batch * groups, rows).transpose(0, 1)
    else:
        tables = flat @ query.float().transpose(2, 3)  # [B,G,N·S,R]
    tables = tables.contiguous()
    scores = torch.empty(batch, groups, rows, codes.shape[2], device=query.device)
    _scores[(triton.cdiv(codes.shape[2], BLOCK), batch * groups)](
        codes.contiguous(), tables, scores, codes.shape[2], **_constants(rows, stages, size, codes)
    )
    return scores


def code_mix(
    weights: Float[Tensor, "B G R t"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G R D"]:
    """Σ_t p_t v̂_t in fp32."""
    batch, groups, rows, tokens = weights.shape
    stages, size, width = books.shape[1:]
    mass = torch.zeros(batch, groups, stages * size, rows, device=weights.device)
    _histogram[(triton.cdiv(tokens, BLOCK), batch * groups)](
        codes.contiguous(), weights.float().contiguous(), mass, tokens, **_constants(rows, stages, size, codes)
    )
    return mass.transpose(2, 3) @ books.reshape(len(books), stages * size, width).float()


def _constants(rows: int, stages: int, size: int, codes: Tensor) -> dict[str, int]:
    shift = 32768 if codes.dtype == torch.int16 else 0
    padded = triton.next_power_of_2(rows)
    return {"R": rows, "ROWS": padded, "N": stages, "S": size, "SHIFT": shift, "BLOCK": BLOCK}
