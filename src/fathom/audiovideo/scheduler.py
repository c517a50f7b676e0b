"""Noise levels of pictures and sound, for training and for sampling: rectified flow with one shift a modality.

    σ(u) = a·u / (1 + (a − 1)·u)                  u_n = 1 − n (1 − σ_min)/N,  n = 0 … N − 1;  σ_N = 0
    x_σ = (1 − σ) x₀ + σ ε,  v = ε − x₀           x ← x + v (σ_{n+1} − σ_n)

Each modality has its own a ("dual sigma shift"). σ_min = 0.003/1.002. The release's table has N = 1000.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from jaxtyping import Float
from torch import Tensor

SIGMA_MIN = 0.003 / 1.002
TABLE = 1000


def shifted(u: Float[Tensor, "*n"], a: float) -> Float[Tensor, "*n"]:
    """σ(u) = a·u / (1 + (a − 1)·u)."""
    return a * u / (1 + (a - 1) * u)


def unshifted(sigma: Any, a: float) -> Any:
    """u of σ(u), of a number or a tensor."""
    return sigma / (a - (a - 1) * sigma)


def levels(steps: int, a: float) -> Float[Tensor, " steps"]:
    """σ_n, n = 0 … steps − 1, in fp64."""
    u = 1 - torch.arange(steps, dtype=torch.float64) * ((1 - SIGMA_MIN) / steps)
    return shifted(u, a)


def draw(
    u: Float[Tensor, " B"], a: float, table: bool, above: float | None = None, below: float | None = None
) -> Float[Tensor, " B"]:
    """Noise levels of training, from numbers u uniform in [0, 1).

    Args:
        a: shift.
        table: one of the release's 1000 levels instead of any.
        above, below: levels σ ≥ above or σ < below alone, each as likely as without.
    """
    if table:
        entries = levels(TABLE, a).to(u.device)
        first = 0 if below is None else int((entries >= below).sum())
        last = TABLE if above is None else int((entries >= above).sum())
        if last <= first:
            raise ValueError(f"boundary={above if below is None else below!r}: no level of the table is on one side")
        return entries[first + (u.double() * (last - first)).long().clamp(max=last - first - 1)].to(u.dtype)
    low = 0.0 if above is None else unshifted(above, a)
    high = 1.0 if below is None else unshifted(below, a)
    return shifted(low + (high - low) * u, a)


class FlowMatchPairScheduler(SchedulerMixin, ConfigMixin):
    """Euler steps of two modalities side by side.

    Args:
        video_shift, audio_shift: a of each.
        quantize_sigma: step between the nearest of the table's 1000 levels, as the release does, instead of exactly
            between the σ_n: the same where N divides 1000, and up to 1e-3 off elsewhere.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        video_shift: float = 5.0,
        audio_shift: float = 5.0,
        quantize_sigma: bool = False,
        num_train_timesteps: int = TABLE,
    ) -> None:
        if num_train_timesteps != TABLE:
            raise ValueError(f"num_train_timesteps={num_train_timesteps}: τ = 1000 σ is what the towers are trained on")
        self.set_timesteps(50)

    def set_timesteps(
        self, steps: int, device: str | torch.device = "cpu", video_shift: float | None = None,
        audio_shift: float | None = None,
    ) -> None:  # fmt: skip
        """Makes `sigmas` [steps + 1, 2], video and audio, of which the last are 0, and `timesteps` = 1000 σ [steps, 2].
        The shifts are the config's where they are not given."""
        if steps < 1:
            raise ValueError(f"steps={steps}: must be at least 1")
        found = []
        for given, kept in ((video_shift, self.config.video_shift), (audio_shift, self.config.audio_shift)):
            a = kept if given is None else given
            if not a > 0:
                raise ValueError(f"shift={a!r}: must be above 0")
            sigma = levels(steps, a)
            if self.config.quantize_sigma:
                table = levels(TABLE, a)
                sigma = table[(sigma[:, None] - table).abs().argmin(1)]
            found.append(torch.cat([sigma, sigma.new_zeros(1)]))
        self.num_inference_steps = steps
        self.sigmas = torch.stack(found, dim=-1).to(device)
        self.timesteps = (TABLE * self.sigmas[:-1]).float()

    def step(
        self, velocities: tuple[Tensor, Tensor], index: int, samples: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The samples of video and audio one step further, from σ_index to σ_{index+1}, in their own dtype."""
        change = (self.sigmas[index + 1] - self.sigmas[index]).tolist()
        video, audio = (x + dx * v.to(x.dtype) for x, v, dx in zip(samples, velocities, change))
        return video, audio


def add_noise(x0: Float[Tensor, "B ..."], noise: Tensor, sigma: Float[Tensor, " B"]) -> Float[Tensor, "B ..."]:
    """x_σ = (1 − σ) x₀ + σ ε, a level a clip."""
    sigma = sigma.view(-1, *[1] * (x0.ndim - 1)).to(x0.dtype)
    return (1 - sigma) * x0 + sigma * noise
