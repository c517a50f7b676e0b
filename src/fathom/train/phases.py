"""Training in phases: what a depth method does at which share of the training, and when it trains alone.

While `depth.trains_alone()`, the gradients of all other parameters are zero before they are clipped and None when the
optimiser steps, so that neither an update nor weight decay touches them. Gradients exist all the same: under DDP every
rank must reduce the same tensors in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback


class Phases(TrainerCallback):
    """Tells the model's depth method how far training is."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.depth = model.depth
        own = {id(parameter) for parameter in model.depth.parameters()}
        self.others = [parameter for parameter in model.parameters() if id(parameter) not in own]
        self.hooked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.depth.progress = state.global_step / state.max_steps
        if self.depth.trains_alone() and not self.hooked:
            self.hooked = True
            for parameter in self.others:
                parameter.register_hook(lambda grad: torch.zeros_like(grad) if self.depth.trains_alone() else grad)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.depth.trains_alone():
            for parameter in self.others:
                parameter.grad = None
