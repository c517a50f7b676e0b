"""Orthonormal DCT-II / DCT-III along the last axis, and the low-pass resampler of FreqKV built from them.

    C_n[k,j] = a_k cos(π(2j+1)k / 2n),  a_0 = √(1/n), a_{k>0} = √(2/n)
    M = √(L/N) · C_Lᵀ · [I_L 0] · C_N :  N samples → their L lowest frequencies → L samples of the same amplitude

Rows of M sum to 1 and M Mᵀ = (L/N) I. All in fp32 or wider (torch.fft has no bf16; twiddles need exact angles).

On a grid both axes are resampled: Y = M_h X M_wᵀ for every channel (`resample_grid`).

The spectral filter of the Fourier Transformer is the same map without the factor, A = C_Lᵀ · [I_L 0] · C_N, A Aᵀ = I
(`low_pass`, `low_pass_rows`). Its entries have a closed form, so that rows of several lengths need no product:

    A[n,t] = (S(θ_n − φ_t) + S(θ_n + φ_t)) / 2√(NL),  S(α) = Σ_{|k|<L} cos kα = sin((L−½)α) / sin(α/2),
    θ_n = π(2n+1)/2L,  φ_t = π(2t+1)/2N
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.autocast import without_autocast


def dct(x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """Orthonormal DCT-II by one complex FFT of the even/odd reordering."""
    n = x.shape[-1]
    spectrum = torch.fft.fft(torch.cat((x[..., ::2], x[..., 1::2].flip(-1)), dim=-1))
    out = 2 * (spectrum * _twiddle(n, -1, x)).real
    return out * _scale(n, x)


def idct(x: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """Orthonormal DCT-III, the inverse of `dct`."""
    n = x.shape[-1]
    x = x / _scale(n, x)
    mirrored = torch.cat((torch.zeros_like(x[..., :1]), x[..., 1:].flip(-1)), dim=-1)
    half = torch.fft.ifft(torch.complex(x, -mirrored) * _twiddle(n, 1, x) / 2).real
    even = (n + 1) // 2
    out = torch.empty_like(x)
    out[..., ::2], out[..., 1::2] = half[..., :even], half[..., even:].flip(-1)
    return out


def _scale(n: int, like: Tensor) -> Tensor:
    scale = torch.full((n,), math.sqrt(1 / (2 * n)), dtype=like.dtype, device=like.device)
    scale[0] = math.sqrt(1 / (4 * n))
    return scale


def _twiddle(n: int, sign: int, like: Tensor) -> Tensor:
    angle = torch.arange(n, dtype=torch.float64, device=like.device) * (sign * math.pi / (2 * n))
    return torch.polar(torch.ones_like(angle), angle).to(
        torch.complex128 if like.dtype == torch.float64 else torch.complex64
    )


@functools.lru_cache(maxsize=16)
def resampler(n: int, length: int, band: str, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "length n"]:
    """M for `band` "low"; "high" keeps the L highest frequencies, "mean" averages (the DC-only relative)."""
    with torch.inference_mode(False), without_autocast("cpu"):  # kept, and training may come after inference
        if band == "mean":
            start = torch.arange(length) * n // length
            stop = -(-(torch.arange(length) + 1) * n // length)
            token = torch.arange(n)
            inside = (token >= start[:, None]) & (token < stop[:, None])
            return (inside.double() / inside.sum(-1, keepdim=True)).to(device, dtype)
        forward, backward = _dct_matrix(n), _dct_matrix(length)
        rows = forward[:length] if band == "low" else forward[n - length :]
        return (math.sqrt(length / n) * backward.T @ rows).to(device, dtype)


def _dct_matrix(n: int) -> Float[Tensor, "n n"]:
    k, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = math.sqrt(2 / n) * torch.cos(math.pi * (2 * j + 1) * k / (2 * n))
    matrix[0] = math.sqrt(1 / n)
    return matrix


def resample(
    x: Float[Tensor, "*rows n D"], length: int, band: str = "low", transform: str = "gemm"
) -> Float[Tensor, "*rows length D"]:
    """y = M x along the token axis (second to last), in the dtype of x. `transform`: "gemm" or "fft" (low only)."""
    n = x.shape[-2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if transform == "fft":
        spectrum = dct(wide.transpose(-1, -2))[..., :length]
        return (math.sqrt(length / n) * idct(spectrum)).transpose(-1, -2).to(x.dtype)
    with without_autocast(x.device.type):
        return (resampler(n, length, band, wide.dtype, x.device) @ wide).to(x.dtype)


def resample_grid(
    x: Float[Tensor, "*rows n C"],
    grid: tuple[int, int],
    kept: tuple[int, int],
    rescale: str = "none",
    transform: str = "gemm",
) -> Float[Tensor, "*rows m C"]:
    """The low-pass of a grid of tokens, in the dtype of x: n = H·W tokens row by row → m = h·w.

    The orthonormal 2-D DCT of every channel is cropped to its h × w lowest frequencies and transformed back on the
    smaller grid. Cost in FLOPs, gemm: 2·C·(h·H·W + h·w·W).

    rescale: "none" is that transform, whose constants grow by √(HW/hw); "amplitude" keeps constants as they are.
    transform: "gemm", two products with small constant matrices, or "fft".
    """
    (height, width), (h, w) = grid, kept
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-2, (height, width))  # [..., H, W, C]
    if transform == "fft":
        spectrum = dct(wide.movedim(-1, -3).contiguous())[..., :w]  # [..., C, H, w]
        spectrum = dct(spectrum.transpose(-1, -2).contiguous())[..., :h]
        out = idct(idct(spectrum).transpose(-1, -2).contiguous()).movedim(-3, -1)
        scale = math.sqrt(h * w / (height * width)) if rescale == "amplitude" else 1.0
    else:
        down = resampler(height, h, "low", wide.dtype, x.device)
        along = resampler(width, w, "low", wide.dtype, x.device)
        with without_autocast(x.device.type):
            out = along @ (down @ wide.flatten(-2)).unflatten(-1, (width, x.shape[-1]))
        scale = 1.0 if rescale == "amplitude" else math.sqrt(height * width / (h * w))
    return (out * scale if scale != 1.0 else out).flatten(-3, -2).to(x.dtype)


# Up to this length one product with A is taken, above it the FFT: A of 64k tokens would have gigabytes.
LONGEST_PRODUCT = 1024


def low_pass(x: Float[Tensor, "*rows n D"], kept: int, transform: str = "auto") -> Float[Tensor, "*rows kept D"]:
    """y = A x along the token axis (second to last), in the dtype of x: energy is kept, and a constant grows by √(n/L).

    `transform`: "matmul", "fft", or "auto", which takes the first up to `LONGEST_PRODUCT` tokens.
    """
    n = x.shape[-2]
    if kept == n:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    with without_autocast(x.device.type):
        if transform == "fft" or (transform == "auto" and n > LONGEST_PRODUCT):
            return idct(dct(wide.transpose(-1, -2))[..., :kept]).transpose(-1, -2).to(x.dtype)
        return (_low_pass_matrix(n, kept, wide.dtype, x.device) @ wide).to(x.dtype)


def low_pass_rows(
    x: Float[Tensor, "B T D"], lengths: Int[Tensor, " B"], kept: Int[Tensor, " B"], most: int, transform: str = "auto"
) -> Float[Tensor, "B most D"]:
    """`low_pass` of the first `lengths[b]` tokens of each row to `kept[b]`, zeros after them; `most` = max kept."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    with without_autocast(x.device.type):
        if transform == "fft" or (transform == "auto" and x.shape[1] > LONGEST_PRODUCT):
            out = wide.new_zeros(len(x), most, x.shape[2])
            for n, k in set(zip(lengths.tolist(), kept.tolist(), strict=True)):
                rows = (lengths == n) & (kept == k)
                out[rows, :k] = low_pass(wide[rows, :n], k, "fft")
            return out.to(x.dtype)
        return (low_pass_matrices(lengths, kept, most, x.shape[1]).to(wide.dtype) @ wide).to(x.dtype)


def low_pass_matrices(
    lengths: Int[Tensor, " B"], kept: Int[Tensor, " B"], most: int, longest: int
) -> Float[Tensor, "B most longest"]:
    """A of every row in float64, zero beyond its own size."""
    device = lengths.device
    n, t = (torch.arange(size, device=device, dtype=torch.float64) for size in (most, longest))
    size, length = kept.double()[:, None, None], lengths.double()[:, None, None]
    theta, phi = math.pi * (2 * n[:, None] + 1) / (2 * size), math.pi * (2 * t + 1) / (2 * length)

    def kernel(angle: Tensor) -> Tensor:
        half = torch.sin(angle / 2)
        zero = half.abs() < 1e-12
        ratio = torch.sin((size - 0.5) * angle) / half.masked_fill(zero, 1.0)
        return torch.where(zero, 2 * size - 1, ratio)

    matrix = (kernel(theta - phi) + kernel(theta + phi)) / (2 * torch.sqrt(size * length))
    inside = (n[:, None] < size) & (t < length)
    same = (size == length) & (n[:, None] == t)  # nothing is cut: the identity, without rounding
    return torch.where(inside, torch.where(size == length, same.double(), matrix), 0.0)


@functools.lru_cache(maxsize=16)
def _low_pass_matrix(n: int, kept: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "kept n"]:
    with torch.inference_mode(False):  # kept, and training may come after inference
        return low_pass_matrices(torch.tensor([n]), torch.tensor([kept]), kept, n)[0].to(device, dtype)
