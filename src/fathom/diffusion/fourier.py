"""FourierSampler (arXiv 2601.23182): structure before detail, by a band that slides over the spectrum of the block.

h: the states that the head reads for the block's n tokens, [n, d]; step i of s, u = i/(s − 1) (1 for s = 1).

    X = rfft(h along tokens),  K = ⌊n/2⌋ + 1 bins;   w = max(1, ⌊ρK⌋);   c = ⌊u (K − w)⌋
    Y = irfft(X on bins c … c + w − 1);   E_j = Σ_d Y_jd²;   φ_j = E_j / (max E + 1e−8)
    v = variance of the highest probabilities over hidden tokens;   pct = 100 · share of the history below v
    β = β_min + (1 − Φ(3 (pct − 50)/50)) (β_max − β_min)
    rank_j = p_j(x_j) + β φ_j

Only the order of revealing changes, not the predictions. Revealed tokens count in the spectrum and in the maximum. The
history holds the last `history_size` variances, the current one included; a single hidden token has no variance. The
authors' code keeps one history for all rows and lets NaN into it.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fathom.diffusion.base import Policy, View, check_option
from fathom.models.method import check_choice, check_range


def band(length: int, rho: float, step: int, steps: int) -> tuple[int, int, int]:
    """(K, first bin, width) of the window at this step, in exact arithmetic."""
    bins = length // 2 + 1
    width = max(1, int(Fraction(str(rho)) * bins))
    first = bins - width if steps <= 1 else (bins - width) * step // (steps - 1)
    return bins, first, width


def band_score(hidden: Float[Tensor, "B n d"], inside: Bool[Tensor, " K"]) -> Float[Tensor, "B n"]:
    """φ: each token's energy in the bins inside the band / the row's largest such energy."""
    length = hidden.shape[1]
    spectrum = torch.fft.rfft(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=1)
    energy = torch.fft.irfft(spectrum.masked_fill(~inside[:, None], 0), n=length, dim=1).square().sum(-1)
    return energy / (energy.amax(1, keepdim=True) + 1e-8)


def calibrate(
    history: Float[Tensor, "H size"], values: Float[Tensor, " H"], low: float, high: float
) -> Float[Tensor, " H"]:
    """β of every row's variance, which is added to its history: what is not yet there is NaN. An undefined variance is
    not added, and gives the largest β."""
    undefined = values.isnan()
    history.copy_(torch.where(undefined[:, None], history, torch.cat([history[:, 1:], values[:, None]], dim=1)))
    percent = 100 * (history < values[:, None]).sum(1) / (~history.isnan()).sum(1)
    share = 0.5 * (1 + torch.erf(3 * (percent.double() - 50) / 50 / math.sqrt(2)))
    return torch.where(undefined, high, low + (1 - share) * (high - low))


@dataclasses.dataclass(frozen=True)
class Fourier(Policy):
    """Probability plus the energy of the block's states in a band that slides from low to high frequencies.

    rho: ρ, the share of the bins that the band covers, in (0, 1]; the paper has 0.4 for LLaDA, 0.2 for LLaDA-1.5.
    beta_min, beta_max: range of the weight β of the energy.
    history_size: number of variances that β compares with.
    history: "per_row", or "global": one variance and history of the whole batch, as in the authors' code.
    variance_scope: "sequence": over all hidden tokens that a pass predicts; "block": those of the block.
    gate: g, reveal only among the share g + (1 − g)(i + 1)/s of the block with most energy first; None: no gate.
    phi: "band"; or an ablation, "low" (the band does not slide), "noise" (uniform random energies).
    """

    rho: float = 0.4
    beta_min: float = 0.4
    beta_max: float = 0.6
    history_size: int = 20
    history: str = "per_row"
    variance_scope: str = "sequence"
    gate: float | None = None
    phi: str = "band"

    name = "fourier_sampler"
    paper = "2601.23182"
    summary = "Reveal by probability plus the block's energy in a band that slides from low to high frequencies."
    equation = "rank_j = p_j(x_j) + β φ_j;  φ_j ∝ Σ_d irfft(rfft(h) on bins c … c+w−1)_jd²;  c = ⌊u (K − w)⌋"
    whole_block = True

    def __post_init__(self):
        check_option(self.name, "rho", self.rho, 0 < self.rho <= 1, "above 0 and at most 1")
        check_option(self.name, "beta_min", self.beta_min, 0 <= self.beta_min < math.inf, "finite and at least 0")
        fine = self.beta_min <= self.beta_max < math.inf
        check_option(self.name, "beta_max", self.beta_max, fine, f"finite and at least beta_min={self.beta_min:g}")
        check_range(self.name, "history_size", self.history_size, 1)
        check_choice(self.name, "history", self.history, ("per_row", "global"))
        check_choice(self.name, "variance_scope", self.variance_scope, ("sequence", "block"))
        check_choice(self.name, "phi", self.phi, ("band", "low", "noise"))
        fine = self.gate is None or 0 < self.gate <= 1
        check_option(self.name, "gate", self.gate, fine, "None, or above 0 and at most 1")

    @property
    def beyond_block(self) -> bool:  # type: ignore[override]
        return self.variance_scope == "sequence"

    @property
    def fixed_shape(self) -> bool:  # type: ignore[override]
        return self.variance_scope == "block" and self.gate is None and self.phi != "noise"

    def of_step(self, block, step, device):
        """The bins of the band, of which a recorded step is told."""
        bins, first, width = band(block.stop - block.start, self.rho, 0 if self.phi == "low" else step, block.steps)
        inside = torch.zeros(bins, dtype=torch.bool)
        inside[first : first + width] = True
        return inside.to(device)

    def new_memory(self, rows: int) -> Any:
        """The last variances of each history, made where the first ones lie."""
        return []

    def rank(self, view, memory):
        phi, variances = self.energies(view), self.variances(view)
        if not memory:
            memory.append(variances.new_full((len(variances), self.history_size), torch.nan))
        beta = calibrate(memory[0], variances, self.beta_min, self.beta_max)
        rank = view.probability.to(phi.dtype) + beta.to(phi.dtype)[:, None] * phi
        if self.gate is None:
            return rank
        share = self.gate + (1 - self.gate) * (view.step + 1) / view.steps
        kept = max(1, math.ceil(share * phi.shape[1]))
        outside = phi < phi.topk(kept, dim=1).values[:, -1:]
        return rank - outside * (2 + 2 * self.beta_max)  # below all inside, so that a quota is still served

    def energies(self, view: View) -> Float[Tensor, "B n"]:
        """φ of this step."""
        if self.phi == "noise":
            length, device = view.candidates.shape[1], view.candidates.device
            return torch.stack([torch.rand(length, generator=g, device=device) for g in view.generators])
        assert view.hidden is not None and view.of_step is not None
        return band_score(view.hidden, view.of_step)

    def variances(self, view: View) -> Float[Tensor, " H"]:
        """Unbiased variance of the highest probabilities over hidden tokens, for each history; NaN for
        fewer than two.
        """
        values = view.log_probs.amax(-1).exp()
        if view.whole:  # of all tokens of the block, hidden or not
            shape = (1, -1) if self.history == "global" else view.candidates.shape
            values, inside = values.double().view(shape), view.candidates.reshape(shape)
            number = inside.sum(1)
            mean = (values * inside).sum(1) / number
            spread = ((values - mean[:, None]).square() * inside).sum(1)
            return (spread / (number - 1)).where(number > 1, torch.nan)
        rows = view.candidates.nonzero()[:, 0]
        if view.others is not None:
            values, rows = torch.cat([values, view.others[0]]), torch.cat([rows, view.others[1]])
        if self.history == "global":
            rows = torch.zeros_like(rows)
        count = len(view.candidates) if self.history == "per_row" else 1
        values, number = values.double(), torch.bincount(rows, minlength=count).double()
        mean = torch.zeros_like(number).index_add_(0, rows, values) / number
        spread = torch.zeros_like(number).index_add_(0, rows, (values - mean[rows]).square())
        return (spread / (number - 1)).where(number > 1, torch.nan)
