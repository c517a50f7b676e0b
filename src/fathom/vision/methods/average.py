"""Average pooling of the grid: each kept token is the mean of a rectangle of patches."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from fathom.vision.base import GridCompressor


@dataclasses.dataclass(frozen=True)
class AveragePooling(GridCompressor):
    """PyTorch's adaptive average pooling: row i of h covers rows ⌊iH/h⌋ … ⌈(i+1)H/h⌉ − 1."""

    name = "average_pooling"
    summary = "Each kept token is the mean of a rectangle of vision tokens."
    equation = "Y[i, j] = mean of X over the i-th of h row ranges and the j-th of w column ranges"
    invariants = ("identity", "linear", "channels", "scale", "transpose")

    def __call__(self, features, grid):
        kept, x = self.kept(grid), features.unflatten(-2, grid).movedim(-1, -3)
        return F.adaptive_avg_pool2d(x, kept).movedim(-3, -1).flatten(-3, -2)
