"""Fourier-VLM (arXiv 2508.06038): the low frequencies of the grid of vision tokens, as a smaller grid.

    Z = DCT₂(X) over the H × W grid, for each channel;  Y = IDCT₂(Z[:h, :w]) of size h × w

Equal to Y = A_h X A_wᵀ with A_h = D_hᵀ D_H[:h], A_h A_hᵀ = I: two products with small constant matrices.
"""

from __future__ import annotations

import dataclasses

from fathom.ops.dct import resample_grid
from fathom.vision.base import GridCompressor


@dataclasses.dataclass(frozen=True)
class FourierVLM(GridCompressor):
    """Low-pass of the grid of vision tokens; no parameters.

    rescale: "none" (the official code: constants grow by √(HW/hw), which training absorbs) or "amplitude" (constants
        stay, which a model that was not trained with it needs).
    transform: "gemm" (two small products) or "fft".
    """

    rescale: str = "none"
    transform: str = "gemm"

    name = "fourier_vlm"
    paper = "Fourier-VLM: Compressing Vision Tokens in the Frequency Domain, arXiv 2508.06038"
    summary = "Crop the 2-D DCT of the vision tokens to low frequencies and transform back on a smaller grid."
    equation = "Y = IDCT₂(DCT₂(X)[:h, :w])"
    invariants = ("identity", "linear", "channels", "scale", "transpose")
    role = "method"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescale not in ("none", "amplitude"):
            raise self.refuse("rescale", self.rescale, "use 'none' or 'amplitude'")
        if self.transform not in ("gemm", "fft"):
            raise self.refuse("transform", self.transform, "use 'gemm' or 'fft'")

    def __call__(self, features, grid):
        return resample_grid(features, grid, self.kept(grid), self.rescale, self.transform)

    def flops(self, grid, channels):
        (height, width), (h, w) = grid, self.kept(grid)
        return 2 * channels * (h * height * width + h * w * width)
