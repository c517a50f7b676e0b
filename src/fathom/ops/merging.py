"""Merging models of one shape: functions of one tensor that all of them have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ_i w_i P_i."""
    return sum((c * t for c, t in zip(weights, tensors, strict=True)), torch.zeros_like(tensors[0]))


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The point at share t of the arc from a to b; of the line where they are almost parallel."""
    cosine = ((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-30)).clamp(-1, 1)
    angle = cosine.arccos()
    if angle < 1e-4:
        return (1 - t) * a + t * b
    return (((1 - t) * angle).sin() * a + (t * angle).sin() * b) / angle.sin()


def ties(tasks: Sequence[Tensor], density: float) -> Tensor:
    """The TIES merge of task vectors (arXiv 2306.01708): the largest `density` of each are kept, the sign that most of
    their mass has is chosen, and those with it are averaged."""
    trimmed = []
    for task in tasks:
        limit = task.abs().flatten().kthvalue(max(1, int((1 - density) * task.numel()))).values
        trimmed.append(torch.where(task.abs() >= limit, task, 0))
    stack = torch.stack(trimmed)
    elected = stack.sum(0).sign()
    agree = (stack.sign() == elected) & (stack != 0)
    return (stack * agree).sum(0) / agree.sum(0).clamp_min(1)


def dare(tasks: Sequence[Tensor], density: float, generator: torch.Generator) -> Tensor:
    """The sum of task vectors whose entries stay with probability `density`, divided by it (arXiv 2311.03099)."""
    kept = [t * (torch.rand(t.shape, generator=generator, dtype=t.dtype) < density) / density for t in tasks]
    return sum(kept, torch.zeros_like(tasks[0]))
