"""Residual vector quantisation: a vector is a sum of one codeword from each of N codebooks, chosen greedily.

    r_1 = x;   z_i = argmin_s ‖r_i − Q_i[s]‖²;   r_{i+1} = r_i − Q_i[z_i];      x̂ = Σ_i Q_i[z_i]

And attention on the codes, without rebuilding x̂: scores by look-up tables, outputs by a histogram of the weights.

    q·k̂_t = Σ_i A_i[z_ti],  A_i = Q_i q;        Σ_t p_t v̂_t = Σ_i P_i Q_i,  P_i[s] = Σ_{t: z_ti = s} p_t
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.autocast import without_autocast

NUMBERS_AT_ONCE = 2**25  # distances or looked-up numbers that are written out at a time (128 MiB in fp32)


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


def lookup_scores(
    query: Float[Tensor, "B G m D"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G m t"]:
    """q·k̂ from tables, in fp32 or wider: N additions a token instead of N·D. `m` queries share the codes of a head."""
    batch, groups, m, _ = query.shape
    stages, size = books.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        tables = query.to(wide) @ books.to(wide).flatten(1, 2).transpose(1, 2)  # [B,G,m,N·S]
    offset = torch.arange(stages, device=codes.device) * size
    scores = torch.empty(batch, groups, m, codes.shape[2], dtype=wide, device=query.device)
    step = max(1, NUMBERS_AT_ONCE // (batch * groups * m * stages))
    for start in range(0, codes.shape[2], step):
        part = codes[:, :, start : start + step].long() + offset
        index = part.flatten(2).unsqueeze(2).expand(-1, -1, m, -1)
        scores[..., start : start + step] = tables.gather(3, index).unflatten(3, (-1, stages)).sum(-1)
    return scores


def histogram_mix(
    weights: Float[Tensor, "B G m t"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G m D"]:
    """Σ_t p_t v̂_t: the weights are added up by code, then one product with the codebooks."""
    batch, groups, m, _ = weights.shape
    stages, size = books.shape[1:3]
    offset = torch.arange(stages, device=codes.device) * size
    mass = weights.new_zeros(batch, groups, m, stages * size)
    step = max(1, NUMBERS_AT_ONCE // (batch * groups * m * stages))
    for start in range(0, codes.shape[2], step):
        part = codes[:, :, start : start + step].long() + offset
        index = part.flatten(2).unsqueeze(2).expand(-1, -1, m, -1)
        added = weights[..., start : start + step].unsqueeze(-1).expand(-1, -1, -1, -1, stages).flatten(3)
        mass.scatter_add_(3, index, added)
    with without_autocast(weights.device.type):
        return mass @ books.to(weights.dtype).flatten(1, 2)
