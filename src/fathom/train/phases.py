"""Training in phases: what a depth method does at each share of the training, and when it trains alone.

While `depth.trains_alone()`, gradients of all other parameters are set to zero before clipping and to None before the
optimiser steps, so that neither an update nor weight decay changes these parameters. The gradients are still computed:
under DDP every rank must reduce the same tensors in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from fathom.depth.base import DepthMethod


class Phases(TrainerCallback):
    """A callback that tells the depth method how far training is, and modules with `on_step(step,
    of_steps)` the step.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # peft may train a copy of the method beside the first (modules_to_save)
        self.depths = [module for module in model.modules() if isinstance(module, DepthMethod)]
        self.listeners = [module for module in model.modules() if hasattr(module, "on_step")]
        own = {id(parameter) for depth in self.depths for parameter in depth.parameters()}
        self.others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
        self.hooked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for depth in self.depths:
            depth.progress = state.global_step / state.max_steps
        for module in self.listeners:
            module.on_step(state.global_step, state.max_steps)
        if self.alone() and not self.hooked:
            self.hooked = True
            for parameter in self.others:
                parameter.register_hook(lambda grad: torch.zeros_like(grad) if self.alone() else grad)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.alone():
            for parameter in self.others:
                parameter.grad = None

    def alone(self) -> bool:
        """Whether only the method's own parameters train in this step."""
        return any(depth.trains_alone() for depth in self.depths)
