"""The running mean of the weights (EMA), which replaces the last weights at the end of a training.

    after step n:   m ← d m + (1 − d) θ,   d = min(decay, (1 + n)/(10 + n)),   m = θ after the first

It is part of the optimiser's state of each weight, so it is saved, sharded and resumed with it. After the last step the
model's weights are set to the mean, before it is scored and saved. Scores during training are of the current weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

MEAN = "running_mean"  # in the state of a weight


class RunningMean(TrainerCallback):
    """A callback that keeps the running mean, by `decay`, of every weight that trains."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for weight, own in weights(optimizer):
            if MEAN in own:
                own[MEAN].lerp_(weight, share)
            else:
                own[MEAN] = weight.detach().clone()
            if step >= state.max_steps:
                weight.copy_(own[MEAN])


def weights(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Every weight that has been updated, and its state."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if optimizer.state.get(weight):
                yield weight, optimizer.state[weight]
