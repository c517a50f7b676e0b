"""Raw low-frequency coefficients as tokens: the crop of Fourier-VLM without the inverse transform."""

from __future__ import annotations

import dataclasses

import torch

from fathom.ops.dct import dct
from fathom.vision.base import GridCompressor


@dataclasses.dataclass(frozen=True)
class Coefficients(GridCompressor):
    """The h × w lowest coefficients of the orthonormal 2-D DCT, one token each, row by row."""

    name = "dct_coefficients"
    summary = "The lowest coefficients of the 2-D DCT of the vision tokens, one token each."
    equation = "Y = DCT₂(X)[:h, :w]"
    invariants = ("linear", "channels", "scale", "transpose")

    def __call__(self, features, grid):
        h, w = self.kept(grid)
        wide = features.to(torch.promote_types(features.dtype, torch.float32)).unflatten(-2, grid).movedim(-1, -3)
        spectrum = dct(dct(wide.contiguous())[..., :w].transpose(-1, -2).contiguous())[..., :h]  # [B, C, w, h]
        return spectrum.transpose(-1, -2).movedim(-3, -1).flatten(-3, -2).to(features.dtype)
