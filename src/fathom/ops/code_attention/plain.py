"""`lookup_scores` and `histogram_mix` in PyTorch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.autocast import without_autocast
from fathom.ops.residual_vq import unpacked

NUMBERS_AT_ONCE = 2**25  # looked-up numbers that are written out at a time (128 MiB in fp32)


def lookup_scores(
    query: Float[Tensor, "B G m D"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G m t"]:
    """q·k̂ from tables, in fp32 or wider: N additions a token instead of N·D. `m` queries share the codes of a head."""
    codes = unpacked(codes)
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
    codes = unpacked(codes)
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
