"""One stage of training in plain PyTorch: what selectors, planners, adapters and retrievers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fathom.ops.cudnn_attention import sound_attention


@dataclass(frozen=True)
class Stage:
    """Options of a stage's training.

    steps, batch_size: optimiser steps and examples in each.
    lr, warmup: peak learning rate, and the steps that lead to it; `schedule` linear falls to zero, constant stays.
    optimizer: adamw, or adafactor with a fixed rate (no scaling, no relative step, decay −0.8).
    clip: largest norm of the gradient.
    """

    steps: int = 1000
    batch_size: int = 8
    lr: float = 3e-5
    warmup: int = 0
    schedule: str = "linear"
    optimizer: str = "adamw"
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "adafactor"):
            raise ValueError(f'optimizer={self.optimizer!r}: use "adamw" or "adafactor"')
        if self.schedule not in ("linear", "constant"):
            raise ValueError(f'schedule={self.schedule!r}: use "linear" or "constant"')
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")

    def optimiser(self, parameters: list[nn.Parameter]) -> Any:
        if self.optimizer == "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(parameters, lr=self.lr, scale_parameter=False, relative_step=False, decay_rate=-0.8)
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0, fused=parameters[0].is_cuda)

    def rate(self, step: int) -> float:
        """Share of the peak rate at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        return max(0.0, (self.steps - step) / max(1, self.steps - self.warmup))


def train(
    model: nn.Module, examples: Sequence[Any], loss_of: Callable[[list[Any]], Tensor], stage: Stage,
    watch: Callable[[int], None] | None = None,
) -> list[float]:  # fmt: skip
    """Losses of all steps. Trains the parameters that have gradients; examples come in a new order every epoch.

    watch: called after every step with the number of steps done; the model trains on as it was.

    Raises ValueError without examples, and where nothing trains.
    """
    if not examples:
        raise ValueError("examples=[]: there is nothing to learn from")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__}: none of its parameters has a gradient")
    order = torch.Generator().manual_seed(stage.seed)
    optimiser = stage.optimiser(parameters)
    was, losses = model.training, []
    queue: list[int] = []
    model.train()
    for step in range(stage.steps):
        while len(queue) < min(stage.batch_size, len(examples)):
            queue += torch.randperm(len(examples), generator=order).tolist()
        chosen, queue = queue[: stage.batch_size], queue[stage.batch_size :]
        for group in optimiser.param_groups:
            group["lr"] = stage.lr * stage.rate(step)
        optimiser.zero_grad()
        with sound_attention():
            loss = loss_of([examples[index] for index in chosen])
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, stage.clip)
        optimiser.step()
        losses.append(float(loss.detach()))
        if watch is not None:
            watch(step + 1)
            model.train()
    model.train(was)
    return losses
