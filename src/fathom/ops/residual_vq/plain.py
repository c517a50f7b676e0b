"""`encode`, `decode` and `rebuild` in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.autocast import without_autocast

NUMBERS_AT_ONCE = 2**25  # distances that are written out at a time (128 MiB in fp32)


def encode(x: Float[Tensor, "*rows D"], books: Float[Tensor, "N S D"]) -> Int[Tensor, "*rows N"]:
    """Greedy codes, ties to the smallest index, in fp32 or wider; a bounded number of distances at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    books = books.to(wide)
    half_norms = books.square().sum(-1) / 2
    flat = x.reshape(-1, x.shape[-1])
    codes = torch.empty(flat.shape[0], books.shape[0], dtype=torch.int32, device=x.device)
    step = max(1, NUMBERS_AT_ONCE // books.shape[1])
    for start in range(0, flat.shape[0], step):
        residual = flat[start : start + step].to(wide)
        for stage in range(books.shape[0]):
            with without_autocast(x.device.type):
                distance = torch.addmm(half_norms[stage], residual, books[stage].T, alpha=-1)
            chosen = distance.argmin(-1)
            codes[start : start + step, stage] = chosen
            residual = residual - books[stage, chosen]
    return codes.view(*x.shape[:-1], books.shape[0])


def decode(codes: Int[Tensor, "*rows N"], books: Float[Tensor, "N S D"]) -> Float[Tensor, "*rows D"]:
    """x̂ = Σ_i Q_i[z_i]."""
    stages, size, width = books.shape
    flat = codes.reshape(-1, stages) + torch.arange(stages, device=codes.device, dtype=codes.dtype) * size
    return F.embedding_bag(flat, books.reshape(-1, width), mode="sum").view(*codes.shape[:-1], width)


def rebuild(codes: Int[Tensor, "B G t N"], books: Float[Tensor, "sets N S D"]) -> Float[Tensor, "B G t D"]:
    heads = unpacked(codes).split(codes.shape[1] // books.shape[0], dim=1)
    return torch.cat([decode(part, book) for part, book in zip(heads, books)], dim=1)


def unpacked(codes: Int[Tensor, "B G t N"]) -> Int[Tensor, "B G t N"]:
    """int16 holds code − 32768, other types the code."""
    return codes.to(torch.int32) + 32768 if codes.dtype == torch.int16 else codes
