"""`raw_partials` in PyTorch: all tokens at once, every score and weight of φ written out."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fathom.ops.fourier_grid import SUPPORT, Grid


def raw_partials(
    query: Float[Tensor, "B H Rk"],
    scores: Float[Tensor, "B H K"],
    raw_key: Float[Tensor, "B t Rk"],
    raw_value: Float[Tensor, "B t Rv"],
    key_starts: list[int],
    value_starts: list[int],
    grid: Grid,
    scaling: float,
) -> tuple[Float[Tensor, "B H 1"], Float[Tensor, "B H 1"], Float[Tensor, "B H Rv"], Float[Tensor, "B H K"]]:
    phi = interpolation(grid, raw_key.shape[1], scores.dtype, scores.device)
    query, raw_key, raw_value = (x.to(scores.dtype) for x in (query, raw_key, raw_value))
    s = (scores @ phi + query @ raw_key.transpose(1, 2)) * scaling
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return top, e.sum(-1, keepdim=True), e @ raw_value, e @ phi.T


def interpolation(grid: Grid, tokens: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "K t"]:
    """Φ: the weight φ(tK/Tw − k) of every point k at every token t, 0 but for the nearest 2m."""
    place = torch.arange(tokens, dtype=torch.float64, device=device) * grid.points / grid.window
    point = place.floor() + torch.arange(1 - SUPPORT, SUPPORT + 1, device=device).unsqueeze(1)
    under = (SUPPORT**2 - (place - point).square()).clamp(min=0)
    root = under.sqrt().clamp(min=1e-12)
    near = torch.where(under > 0, (grid.shape * root).sinh() / root, 0.0) * math.exp(-grid.shape * SUPPORT) / math.pi
    phi = torch.zeros(grid.points, tokens, dtype=torch.float64, device=device)
    return phi.scatter_add(0, point.long() % grid.points, near).to(dtype)
