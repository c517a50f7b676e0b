"""Resizing the grid like a picture: bilinear or bicubic, with or without antialiasing."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fathom.vision.base import GridCompressor


@dataclasses.dataclass(frozen=True)
class Interpolation(GridCompressor):
    """PyTorch's interpolation of the grid; corners are not aligned.

    antialias: widen the kernel by the factor of reduction, as picture libraries do.
    """

    antialias: bool = True

    mode = ""
    invariants = ("identity", "linear", "channels", "scale", "transpose")

    def __call__(self, features, grid):
        kept, x = self.kept(grid), features.unflatten(-2, grid).movedim(-1, -3)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out = F.interpolate(wide, kept, mode=self.mode, align_corners=False, antialias=self.antialias)
        return out.movedim(-3, -1).flatten(-3, -2).to(features.dtype)


@dataclasses.dataclass(frozen=True)
class Bilinear(Interpolation):
    """Linear interpolation along both axes."""

    name = "bilinear"
    summary = "The grid of vision tokens, resized by bilinear interpolation."
    equation = "Y = L_h X L_wᵀ with the weights of bilinear resizing"
    mode = "bilinear"


@dataclasses.dataclass(frozen=True)
class Bicubic(Interpolation):
    """Cubic interpolation along both axes."""

    name = "bicubic"
    summary = "The grid of vision tokens, resized by bicubic interpolation."
    equation = "Y = L_h X L_wᵀ with the weights of bicubic resizing"
    mode = "bicubic"
