"""Parts of methods whose tokens stop on their own: reference schedules, and a warning for collapsed routers.

A reference schedule decides by position alone how often a token runs. Its mean S is that of a learned rule:

    uniform    n_t = ⌊(t+1)·S⌋ − ⌊t·S⌋               ⌊S⌋ or ⌈S⌉ everywhere
    random     P(n_t > k) = q^k,  Σ_{k=0}^{K} q^k = S    the same chance q to go on after every step
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import initialization as init

COLLAPSED_AFTER = 20  # forwards in a row


def check_mean_passes(method: str, halting: str, mean: float | None, most: int) -> None:
    """Raise ValueError unless `mean_passes` is given exactly where a schedule needs it, and is possible."""
    needed = halting in ("random", "uniform")
    if needed != (mean is not None):
        rule = f'is needed with halting="{halting}"' if needed else 'applies only with halting="random" or "uniform"'
        raise ValueError(f"{method} option mean_passes={mean!r}: {rule}")
    if mean is not None and not 1 <= mean <= most:
        raise ValueError(
            f"{method} option mean_passes={mean!r}: must be between 1 and {most}, the most that a token runs"
        )


def scheduled_passes(halting: str, position_ids: Int[Tensor, "B T"], mean: float, most: int) -> Int[Tensor, "B T"]:
    """n_t of the schedule, which depends on position alone, so that decoding equals the full forward."""
    t = position_ids.double()
    if halting == "uniform":
        return (((t + 1) * mean).floor() - (t * mean).floor()).long().clamp(1, most)
    chance = _chance(mean, most)
    if chance in (0.0, 1.0):
        return torch.full_like(position_ids, 1 if chance == 0.0 else most)
    bits = position_ids.long()
    for factor in (0x7FEB352D, 0x846CA68B):  # a 32-bit integer hash (C. Wellons)
        bits = ((bits ^ (bits >> 16)) * factor) & 0xFFFFFFFF
    uniform = ((bits ^ (bits >> 16)).double() + 0.5) / 2**32
    return (1 + uniform.log() / torch.tensor(chance, dtype=torch.float64).log()).floor().long().clamp(1, most)


def _chance(mean: float, most: int) -> float:
    """q of Σ_{k<most} q^k = mean, by bisection."""
    low, high = 0.0, 1.0
    if mean >= most:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(most)) < mean else (low, middle)
    return 0.0 if mean <= 1 else high


class Score(nn.Module):
    """w·x + b, in fp32 or wider whatever runs around it; w starts at 0, b at `start`."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(1))

    def initialize_parameters(self) -> None:
        init.zeros_(self.weight)
        init.constant_(self.bias, self.start)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * self.weight.to(wide)).sum(-1) + self.bias.to(wide)


class CollapseWatch:
    """A watch that warns once when no token has taken a second step in `COLLAPSED_AFTER` forwards in a row."""

    def __init__(self, method: str, remedy: str):
        self.method, self.remedy, self.forwards = method, remedy, 0

    def __call__(self, steps: int, tokens: int) -> None:
        """Record a forward of `tokens` new tokens a row that took `steps` steps."""
        if tokens == 1:  # decoding: one token may well be easy
            return
        self.forwards = self.forwards + 1 if steps == 1 else 0
        if self.forwards == COLLAPSED_AFTER:
            warnings.warn(
                f"{self.method}: every token stopped after its first step in {COLLAPSED_AFTER} forwards in a row: "
                f"the router has collapsed; {self.remedy}",
                stacklevel=3,
            )
