"""Sums of low frequencies at every token, through a coarse grid: the nonequispaced FFT with a Kaiser–Bessel window.

    f(t) = Σ_{n<N} a_n e^{2πint/Tw}  ≈  Σ_k g_k φ(tK/Tw − k),    g_k = Σ_n a_n/φ̂_n e^{2πink/K}        k = 0 … K − 1
    φ(z) = e^{−bm} sinh(b√(m²−z²)) / (π√(m²−z²)), |z| < m;   φ̂_n = e^{−bm} I₀(m√(b²−(2πn/K)²)),   b = π(2 − 2N/K)

One FFT of length K ≪ Tw and 2m = 8 multiply-adds a token. The error falls as e^{−2πm√(1−2N/K)}: with m = 4 and
K ≥ 4.2 N it is 1e-7 of max|f|, the round-off of fp32. The adjoint (Σ_t p_t e^{−2πint/Tw}) spreads p over the grid with
the same φ. Keiner, Kunis, Potts: Using NFFT 3, ACM TOMS 36 (2009); here it lets a kernel hold what a block of tokens
needs of 2N coefficients in `span` numbers a head.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fathom.ops.fourier_coefficients import fast_length

SUPPORT = 4  # m: φ reaches that many points to either side
OVERSAMPLING = 4.2  # K / N at least


@dataclasses.dataclass(frozen=True)
class Grid:
    """`points` K over a window of Tw tokens; a block of tokens spans `cells` intervals and reads `span` ≥ cells + 7."""

    frequencies: int
    window: int
    points: int
    cells: int

    @property
    def span(self) -> int:
        return 1 << (self.cells + 2 * SUPPORT - 2).bit_length()

    @property
    def shape(self) -> float:
        """b of the Kaiser–Bessel window."""
        return math.pi * (2 - 2 * self.frequencies / self.points)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold tokens 0 … tokens − 1: block i has the tokens of cells i·cells … (i + 1)·cells − 1."""
        return (tokens - 1) * self.points // self.window // self.cells + 1


def block_tokens(dtype: torch.dtype) -> int:
    """Tokens of a block in `fourier_decode`'s kernel: what fits beside its successor in shared memory."""
    return 128 // dtype.itemsize


def make_grid(frequencies: int, window: int, block: int) -> Grid:
    """The grid whose blocks of 8, 16 or 32 cells have at most `block` tokens, and about as many where N allows."""
    points = fast_length(max(math.ceil(OVERSAMPLING * frequencies), -(-8 * window // block)))
    cells = 8
    while cells < 32 and 2 * cells * window <= block * points:
        cells *= 2
    return Grid(frequencies, window, points, cells)


@functools.lru_cache(maxsize=64)
def spectrum(grid: Grid, device: torch.device) -> Float[Tensor, "2N"]:
    """φ̂_n for both halves of the coefficients, fp32. Made once on the CPU, so not while a CUDA graph is captured."""
    with torch.inference_mode(False):
        n = torch.arange(grid.frequencies, dtype=torch.float64)
        root = (grid.shape**2 - (2 * math.pi / grid.points * n).square()).sqrt()
        transformed = torch.special.i0e(SUPPORT * root) * (SUPPORT * (root - grid.shape)).exp()
        return transformed.float().repeat(2).to(device)


def overlap_add(spread: Float[Tensor, "B H blocks span"], grid: Grid) -> Float[Tensor, "B H K"]:
    """Sum the blocks' shares: number j of block i belongs to point i·cells + j − (m − 1), modulo K."""
    blocks, parts = spread.shape[2], -(-grid.span // grid.cells)
    total = spread.new_zeros(*spread.shape[:2], blocks + parts - 1, grid.cells)
    for part in range(parts):
        total[:, :, part : part + blocks] += spread[..., part * grid.cells : (part + 1) * grid.cells]
    total = total.flatten(2)
    total = F.pad(total, (0, -total.shape[-1] % grid.points)).unflatten(-1, (-1, grid.points)).sum(-2)
    return total.roll(1 - SUPPORT, -1)
