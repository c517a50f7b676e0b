"""Fourier coefficients of signals along time: a state of fixed size, updated online (FourierAttention, 2506.11886).

    C[n]   = Σ_t cos(2πnt/Tw) x_t,   C[N+n] = Σ_t sin(2πnt/Tw) x_t          n = 0 … N−1,   t = 0, 1, … < Tw
    x̂_t   = Σ_n w_n (C[n] cos(2πnt/Tw) + C[N+n] sin(2πnt/Tw))

Weights: "affine" w_n = 1/N (the paper's; a per-channel affine map repairs it); "projection" w_0 = 1/Tw, w_n = 2/Tw, for
even Tw 1/Tw at n = Tw/2, 0 above: the orthogonal projection, exact once N ≥ ⌊Tw/2⌋ + 1. Angles are reduced in integers.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.autocast import without_autocast


def basis(
    start: int, stop: int, frequencies: int, window: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "2N t"]:
    """cos and sin of 2πnt/Tw for t = start … stop − 1."""
    return basis_at(torch.arange(start, stop, device=device), frequencies, window, dtype)


def basis_at(t: Int[Tensor, " t"], frequencies: int, window: int, dtype: torch.dtype) -> Float[Tensor, "2N t"]:
    """cos and sin of 2πnt/Tw."""
    n = torch.arange(frequencies, device=t.device)[:, None]
    angle = (n * t % window).to(torch.float64) * (2 * math.pi / window)
    return torch.cat((angle.cos(), angle.sin())).to(dtype)


def transform(x: Float[Tensor, "B t M"], frequencies: int, window: int, start: int = 0) -> Float[Tensor, "B 2N M"]:
    """Coefficients of x, the signal's values at start, start + 1, …; from 0 by FFT of the zero-padded signal."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if start == 0 and x.numel() and frequencies <= window:  # FFTs refuse empty input
        spectrum = torch.fft.fft(wide, n=window, dim=1)[:, :frequencies]
        return torch.cat((spectrum.real, -spectrum.imag), dim=1)
    with without_autocast(x.device.type):
        return basis(start, start + x.shape[1], frequencies, window, wide.dtype, x.device) @ wide


@functools.lru_cache(maxsize=64)
def weights(
    reconstruction: str, frequencies: int, window: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "2N"]:
    """w_n for both halves of the coefficients. Made once on the CPU, so not while a CUDA graph is captured."""
    with torch.inference_mode(False):
        if reconstruction == "affine":
            return torch.full((2 * frequencies,), 1 / frequencies, dtype=dtype).to(device)
        n = torch.arange(frequencies)
        half = torch.full((frequencies,), 2 / window, dtype=dtype)
        half[(n == 0) | (2 * n == window)] = 1 / window
        half[2 * n > window] = 0
        return half.repeat(2).to(device)


def rebuild(
    coefficients: Float[Tensor, "B 2N M"], weight: Float[Tensor, "2N"], start: int, stop: int, window: int
) -> Float[Tensor, "B t M"]:
    """x̂ at start … stop − 1."""
    angles = basis(start, stop, weight.shape[0] // 2, window, coefficients.dtype, coefficients.device)
    with without_autocast(coefficients.device.type):
        return (angles * weight[:, None]).T @ coefficients


def evaluate(amplitude: Float[Tensor, "*rows 2N"], length: int, window: int) -> Float[Tensor, "*rows t"]:
    """Σ_n a_n cos(2πnt/Tw) + a_{N+n} sin(2πnt/Tw) for t = 0 … length − 1, by one inverse FFT of length Tw."""
    cosine, sine = amplitude.chunk(2, dim=-1)
    if 2 * (cosine.shape[-1] - 1) < window:  # below Nyquist: the real transform, with halved amplitudes
        spectrum = torch.complex(cosine, -sine)
        spectrum[..., 1:].div_(2)
        return torch.fft.irfft(spectrum, n=window, norm="forward")[..., :length]
    return torch.fft.ifft(torch.complex(cosine, -sine), n=window, norm="forward").real[..., :length]


def project(signal: Float[Tensor, "*rows t"], frequencies: int, window: int) -> Float[Tensor, "*rows 2N"]:
    """Σ_t s_t cos(2πnt/Tw) and Σ_t s_t sin(2πnt/Tw), by one FFT of length Tw: the adjoint of `evaluate`."""
    if 2 * (frequencies - 1) <= window:
        spectrum = torch.fft.rfft(signal, n=window)[..., :frequencies]
    else:
        spectrum = torch.fft.fft(signal, n=window)[..., :frequencies]
    return torch.cat((spectrum.real, -spectrum.imag), dim=-1)


def fast_length(length: int) -> int:
    """The smallest 2^a·3^b·5^c·7^d ≥ length: FFTs of such lengths are fast."""
    candidate = max(1, length)
    while True:
        rest = candidate
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return candidate
        candidate += 1
