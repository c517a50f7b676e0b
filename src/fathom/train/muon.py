"""One optimizer with Muon for the matrices of a model's blocks and AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def matrices_of_blocks(model: nn.Module) -> set[str]:
    """Names of the weights that Muon takes: those of linear layers inside a model's repeated blocks (`nn.ModuleList`).

    A layer with one input or one output, such as a gate, holds a vector and is left out. Raises ValueError where blocks
    have trained weights of more than two dimensions (stacked experts, convolutions), and where nothing is left.
    """
    blocks = {
        f"{name}.{inner}" if name else inner
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for inner, _ in module.named_modules()
        if inner
    }
    found = set()
    for name, weight in model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner not in blocks or not weight.requires_grad:
            continue
        if weight.ndim > 2:
            raise ValueError(
                f"training.optimizer='muon': {name} has {weight.ndim} dimensions, and Muon takes matrices; use 'adamw'"
            )
        if isinstance(model.get_submodule(owner), nn.Linear) and weight.ndim == 2 and min(weight.shape) > 1:
            found.add(name)
    if not found:
        raise ValueError("training.optimizer='muon': no matrices of blocks are trained; use 'adamw'")
    return found


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` over the groups of parameters that each is given.

        W ← (1 − γλ) W − 0.2 γ √max(rows, columns) · NS₅(g + μ (m − g)),   m ← μ m + (1 − μ) g,   μ = 0.95

    NS₅ is five Newton-Schulz iterations, which bring all singular values near 1. The factor gives a step the size of
    AdamW's (arXiv 2502.16982), so that one learning rate and one weight decay serve both.

    Args:
        groups: parameter groups, as for any optimizer, each with `muon`: whether Muon takes its parameters.
        fused: AdamW as one kernel.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        # Each class completes its groups with what it reads. Loading a checkpoint puts new objects in the place of
        # states and groups, so `step` hands both over.
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        for muon in (True, False):
            mine = [group for group in self.param_groups if group["muon"] is muon]
            if mine:
                self._parts[muon] = (
                    torch.optim.Muon(mine, lr, adjust_lr_fn="match_rms_adamw")
                    if muon
                    else torch.optim.AdamW(mine, lr, betas, eps, fused=fused)
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            part.state = self.state
            part.step()
        return loss
