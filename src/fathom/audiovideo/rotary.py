"""Rotary positions: of a tower's own grid, and of the clock that both streams share in the bridge.

Towers (as Wan has it): pairs of neighbouring numbers turn; of a video head, d_t = d − 2·d_h numbers by the frame and
d_h = 2 ⌊d/6⌋ each by row and column; of an audio head, all by the index.

Bridge: number i turns with number i + d/2 (half-split), by one position in time. audio latent j ↦ j; latent frame i ↦

    aligned       i · s,   s = audio_rate · stride / frame_rate                 (8.33 at 24 pictures and 50 latents/s)
    first_frame   0, then (1 + (i − 1) · stride) · audio_rate / frame_rate      the first latent frame is one picture
    unaligned     i

Positions are real numbers. All tokens of a frame have one. Angles are computed in fp64; tables are fp32, or the states'
dtype where that is wider.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

THETA = 10_000.0
Table = tuple[Tensor, Tensor]  # cos and sin


def _angles(positions: Float[Tensor, " L"], dim: int) -> Float[Tensor, "L half"]:
    powers = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return positions.double()[:, None] / THETA**powers


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def grid_table(head_dim: int, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Table:
    """cos and sin [1, tokens, 1, head_dim] for diffusers' Wan attention: of a video's (frames, rows, columns), or of a
    sound's (length,)."""
    dims = [head_dim]
    if len(sizes) == 3:
        side = 2 * (head_dim // 6)
        dims = [head_dim - 2 * side, side, side]
    parts = []
    for axis, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        angles = _angles(torch.arange(size, device=device), dim).repeat_interleave(2, dim=-1)
        shape = [size if other == axis else 1 for other in range(len(sizes))]
        parts.append(angles.view(*shape, dim).expand(*sizes, dim))
    angles = torch.cat(parts, dim=-1).reshape(1, -1, 1, head_dim)
    return angles.cos().to(_wide(dtype)), angles.sin().to(_wide(dtype))


def frame_positions(
    frames: int, rotary: str, stride: int, frame_rate: float, audio_rate: float, device: torch.device | None = None
) -> Float[Tensor, " frames"]:
    """Positions of latent frames on the clock of the audio latents, in fp64."""
    index = torch.arange(frames, dtype=torch.float64, device=device)
    if rotary == "unaligned":
        return index
    if rotary == "aligned":
        return index * (audio_rate * stride / frame_rate)
    if rotary == "first_frame":
        return torch.where(index > 0, (1 + (index - 1) * stride) * (audio_rate / frame_rate), 0.0)
    raise ValueError(f"rotary={rotary!r}: must be 'aligned', 'first_frame' or 'unaligned'")


def clock_table(positions: Float[Tensor, " L"], head_dim: int, dtype: torch.dtype) -> Table:
    """cos and sin [L, head_dim] of positions in time, for `turn`."""
    angles = torch.cat([_angles(positions, head_dim)] * 2, dim=-1)
    return angles.cos().to(_wide(dtype)), angles.sin().to(_wide(dtype))


def turn(x: Float[Tensor, "B heads L d"], table: Table) -> Float[Tensor, "B heads L d"]:
    """x turned by its positions: x cos + (−x₂, x₁) sin, for halves x₁ and x₂ of a head."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)
