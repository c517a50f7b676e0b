"""`rebuild` in one launch: a Triton kernel, for VQKV's blocks (arXiv 2603.16435).

    x̂_t = Σ_i Q_i[z_ti],   i = 1 … N in this order, in fp32, rounded once to the type of the codebooks

A program rebuilds TOKENS tokens of a head: for every stage it reads their codes as they are stored, and whole rows
of the codebook.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import FLOATS, wants_gradient

TILE = 2048  # numbers of a program


@triton.jit(do_not_specialize=["tokens"])
def _sum_codewords(codes, books, output, tokens, batch_stride, head_stride, G: tl.constexpr, SHARED: tl.constexpr,
                   N: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
                   TOKENS: tl.constexpr):  # fmt: skip
    """Program: tokens, head of a row. SHARED: heads that share a set of codebooks."""
    pair = tl.program_id(1).to(tl.int64)
    head = pair % G
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    exists = token < tokens
    both = exists[:, None] & (channel < D)[None, :]
    held = codes + pair // G * batch_stride + head * head_stride + token * N
    book = books + head // SHARED * (N * S * D) + channel[None, :]
    total = tl.zeros((TOKENS, WIDTH), dtype=tl.float32)
    for stage in tl.range(0, N, loop_unroll_factor=8):  # rows of several stages on their way at once
        entry = tl.load(held + stage, mask=exists, other=0).to(tl.int32) + SHIFT
        total += tl.load(book + stage * (S * D) + entry[:, None] * D, mask=both, other=0.0).to(tl.float32)
    out = output + (pair * tokens + token[:, None]) * D + channel[None, :]
    tl.store(out, total.to(output.dtype.element_ty), mask=both)


def serves(books: Tensor) -> bool:
    """Whether the kernel takes these: numbers of 16 or 32 bits, no gradient wanted."""
    return not wants_gradient(books) and books.dtype in FLOATS


def rebuild(codes: Int[Tensor, "B G t N"], books: Float[Tensor, "sets N S D"]) -> Float[Tensor, "B G t D"]:
    batch, groups, tokens, stages = codes.shape
    sets, _, size, width = books.shape
    if codes.stride()[2:] != (stages, 1):
        codes = codes.contiguous()
    output = books.new_empty(batch, groups, tokens, width)
    padded = triton.next_power_of_2(width)
    at_once = max(1, TILE // padded)
    _sum_codewords[(triton.cdiv(tokens, at_once), batch * groups)](
        codes,
        books.contiguous(),
        output,
        tokens,
        codes.stride(0),
        codes.stride(1),
        G=groups,
        SHARED=groups // sets,
        N=stages,
        S=size,
        D=width,
        WIDTH=padded,
        SHIFT=32768 if codes.dtype == torch.int16 else 0,
        TOKENS=at_once,
    )
    return output
