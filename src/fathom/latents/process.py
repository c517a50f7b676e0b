"""The noise process x_t = α_t x₀ + σ_t ε, t from 0 to 1, with the terms that a step back needs.

    vp         α² + σ² = 1:
      tangent    α = 1/√(1 + δ² tan²(πt/2))                TEncDM; δ = 1 is the cosine schedule
      linear     α = exp(−½ ∫β),  β = 0.1 + 19.9 t
      sqrt       α² = 1 − √((t + s)/(1 + s)),  s = 1e-4    Diffusion-LM
    rectified  α = 1 − t,  σ = t

    ε̂ = (x − α x̂₀)/σ;   ODE  dx = (α' x̂₀ + σ' ε̂) dt;   SDE  dx = (f x − g² · score) dt + g dw
    f = α'/α,   g² = 2σσ' − 2fσ²  (of vp: −β/2 and β),   score = (α x̂₀ − x)/σ²

Constants are computed in fp32 or wider: in bf16 they would be wrong near both ends.
"""

from __future__ import annotations

import dataclasses
import math
import zlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fathom.latents.codar import CoDAR

LATEST = 0.95  # f and g² grow without bound towards t = 1; later times use those of this one
SQRT_SHIFT = 1e-4
BETAS = (0.1, 20.0)
EARLIEST = 1e-5  # of the times in training


@dataclasses.dataclass(frozen=True)
class Process:
    """α, σ and their derivatives by t, and the maps from a prediction to x₀ and ε."""

    kind: str = "vp"
    schedule: str = "tangent"
    delta: float = 9.0
    prediction: str = "x0"

    @classmethod
    def of(cls, options: CoDAR) -> Process:
        return cls(options.process, options.schedule, options.delta, options.prediction)

    def check(self, t: Tensor | float) -> None:
        """Raise ValueError for a time outside (0, 1]."""
        times = torch.as_tensor(t)
        if not bool(((times > 0) & (times <= 1)).all()):
            wrong = times[~((times > 0) & (times <= 1))].flatten()[0]
            raise ValueError(f"t={float(wrong)!r}: must be above 0 and at most 1")

    def alpha_sigma(self, t: Float[Tensor, " *n"]) -> tuple[Tensor, Tensor]:
        """α_t and σ_t, in fp32 or wider."""
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        if self.kind == "rectified":
            return 1 - t, t
        if self.schedule == "linear":
            square = torch.exp(-self._integral(t))
            return square.sqrt(), (-torch.expm1(-self._integral(t))).sqrt()
        if self.schedule == "sqrt":
            noise = ((t + SQRT_SHIFT) / (1 + SQRT_SHIFT)).sqrt()
            return (1 - noise).clamp(min=0).sqrt(), noise.sqrt()
        cosine, sine = self._turned(t)
        length = (cosine**2 + sine**2).sqrt()
        return cosine / length, sine / length

    def rates(self, t: Float[Tensor, " *n"]) -> tuple[Tensor, Tensor]:
        """α' and σ', at most at `LATEST`."""
        t = t.to(torch.promote_types(t.dtype, torch.float32)).clamp(max=LATEST)
        if self.kind == "rectified":
            return -torch.ones_like(t), torch.ones_like(t)
        alpha, sigma = self.alpha_sigma(t)
        beta = self.beta(t)
        return -beta * alpha / 2, beta * alpha**2 / (2 * sigma)

    def beta(self, t: Float[Tensor, " *n"]) -> Tensor:
        """β = −2 d log α/dt of a vp schedule."""
        if self.schedule == "linear":
            return BETAS[0] + (BETAS[1] - BETAS[0]) * t
        if self.schedule == "sqrt":
            noise = ((t + SQRT_SHIFT) / (1 + SQRT_SHIFT)).sqrt()
            return 1 / (2 * (1 + SQRT_SHIFT) * noise * (1 - noise))
        cosine, sine = self._turned(t)
        return math.pi * self._delta * sine / (cosine * (cosine**2 + sine**2))

    def drift(self, t: Float[Tensor, " *n"]) -> tuple[Tensor, Tensor]:
        """f and g² of the SDE, at most at `LATEST`."""
        t = t.clamp(max=LATEST)
        alpha, sigma = self.alpha_sigma(t)
        of_alpha, of_sigma = self.rates(t)
        f = of_alpha / alpha
        return f, 2 * sigma * of_sigma - 2 * f * sigma**2

    def corrupt(self, x0: Float[Tensor, "B L k"], t: Tensor, noise: Float[Tensor, "B L k"]) -> Tensor:
        """x_t; `t` has a time a row [B], or a token [B, L]."""
        alpha, sigma = (self._spread(part, x0) for part in self.alpha_sigma(t.to(x0.device)))
        return (alpha * x0 + sigma * noise).to(x0.dtype)

    def target(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The denoiser's target."""
        if self.prediction == "x0":
            return x0
        if self.prediction == "eps":
            return noise
        a, b = (self._spread(part, x0) for part in self._velocity(t.to(x0.device)))
        return a * noise - b * x0

    def denoised(self, said: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """x̂₀ from the denoiser's output for x at t, in fp32 or wider."""
        said = said.to(torch.promote_types(said.dtype, torch.float32))
        if self.prediction == "x0":
            return said
        alpha, sigma = (self._spread(part, x) for part in self.alpha_sigma(t.to(x.device)))
        if self.prediction == "eps":
            return (x - sigma * said) / alpha.clamp(min=torch.finfo(alpha.dtype).eps)
        a, b = (self._spread(part, x) for part in self._velocity(t.to(x.device)))
        return (a * x - sigma * said) / (a * alpha + b * sigma)

    def noise(self, x0: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """ε̂ that follows from an estimate of x₀."""
        alpha, sigma = (self._spread(part, x) for part in self.alpha_sigma(t.to(x.device)))
        return (x - alpha * x0) / sigma

    def _velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a and b of v = a·ε − b·x₀."""
        alpha, sigma = self.alpha_sigma(t)
        return (torch.ones_like(t), torch.ones_like(t)) if self.kind == "rectified" else (alpha, sigma)

    @property
    def _delta(self) -> float:
        return 1.0 if self.schedule == "cosine" else self.delta

    def _turned(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """cos(πt/2) and δ sin(πt/2): their ratio is the tangent, which at t = 1 is of the wrong sign in fp32."""
        return torch.cos(t * (math.pi / 2)).clamp(min=0), self._delta * torch.sin(t * (math.pi / 2))

    @staticmethod
    def _integral(t: Tensor) -> Tensor:
        """∫β from 0 to t."""
        return BETAS[0] * t + (BETAS[1] - BETAS[0]) * t**2 / 2

    @staticmethod
    def _spread(values: Tensor, x: Tensor) -> Tensor:
        """Values a row [B] or a token [B, L], to be multiplied with x [B, L, k]."""
        return values.reshape(*values.shape, *[1] * (x.ndim - values.ndim))


def row_generators(input_ids: Int[Tensor, "B L"], seed: int = 0) -> list[torch.Generator]:
    """A generator for each row, seeded by its tokens: the same noise whatever the batch."""
    return [torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes(), seed)) for row in input_ids.cpu()]


def row_noise(generators: list[torch.Generator], length: int, width: int) -> Float[Tensor, "B L k"]:
    """N(0, I) of each row its own, on the CPU."""
    return torch.stack([torch.randn(length, width, generator=generator) for generator in generators])
