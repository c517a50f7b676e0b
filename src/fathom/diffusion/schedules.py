"""Schedules: how many hidden tokens of a block a step reveals in each row.

linear   ⌊k/s⌋, and one more in the first k mod s steps                           (LLaDA, arXiv 2502.09992)
dream    ⌊n · (1 − t_{i+1}/t_i)⌋ of the n that are hidden now, t from 1 to 0.001 in s equal parts; rounding leaves
         extra tokens to the last step                                            (Dream, arXiv 2508.15487)
exact    ⌊k (i+1)/s⌋ − ⌊k i/s⌋: after i + 1 steps the share (i+1)/s is revealed, in whole numbers

k: hidden tokens of the row's block at its start; s: steps of the block; i: this step, from 0. The last step reveals all
that is left.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

LAST = 1e-3  # of the times of `dream`


def linear(now: Int[Tensor, " B"], first: Int[Tensor, " B"], step: int, steps: int) -> Int[Tensor, " B"]:
    """⌊k/s⌋ tokens, and one more in the first k mod s steps (LLaDA)."""
    return first // steps + (step < first % steps).long()


def dream(now: Int[Tensor, " B"], first: Int[Tensor, " B"], step: int, steps: int) -> Int[Tensor, " B"]:
    """⌊n · (1 − t_{i+1}/t_i)⌋ of the n tokens that are hidden now (Dream)."""
    times = torch.linspace(1, LAST, steps + 1, device=now.device)  # in fp32, whose rounding is part of it
    return (now * (1 - times[step + 1] / times[step])).long()


def exact(now: Int[Tensor, " B"], first: Int[Tensor, " B"], step: int, steps: int) -> Int[Tensor, " B"]:
    """⌊k (i+1)/s⌋ − ⌊k i/s⌋ tokens."""
    return first * (step + 1) // steps - first * step // steps


SCHEDULES = {"linear": linear, "dream": dream, "exact": exact}
