"""Fourier Transformer (arXiv 2305.15099): a low-pass filter along the sequence between two encoder layers.

    C = DCT-II(X) along the tokens, orthonormal;   K = ⌈ρT⌉;   Y = inverse DCT of length K of C_{k<K}

Y = A X with A Aᵀ = I, without parameters; in fp32 or wider. Energy is kept, so a constant grows by √(T/K);
`rescale` "amplitude" undoes that. The official code casts to half precision, lets padding into every coefficient of
every row (here `padding` "leak"), and counts a CLS token that it does not filter (`count_cls`).
"""

from __future__ import annotations

import dataclasses
import math

from fathom.encoders.shortening import Shortening, ShorteningOptions
from fathom.models.method import check_choice
from fathom.models.registry import register
from fathom.ops.dct import LONGEST_PRODUCT, low_pass, low_pass_rows


@register("encoder", "fourier")
class Fourier(Shortening):
    """The spectral filter between two layers, on BART and on the decoder's own blocks."""

    summary = "Between two layers the sequence keeps its low frequencies only: K = ⌈ρT⌉ tokens."
    equation = "Y = C_Kᵀ [I_K 0] C_T X,  C_n the orthonormal DCT-II of length n"
    paper = "2305.15099"
    variants = ({"ratio": 0.5}, {"ratio": 0.3, "rescale": "amplitude", "upsample": "linear"})
    identity = {"ratio": 1.0, "global_residual": False, "residual": "filtered"}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options(ShorteningOptions):
        """rescale: "none" keeps the energy, as in the official code; "amplitude" keeps constants.
        transform: "fft", "matmul" or "auto", which chooses by length.
        """

        rescale: str = "none"
        transform: str = "auto"

        def __post_init__(self):
            super().__post_init__()
            check_choice("fourier", "rescale", self.rescale, ("none", "amplitude"))
            check_choice("fourier", "transform", self.transform, ("auto", "fft", "matmul"))

    @classmethod
    def map_flops(cls, options, before, after):
        """FLOPs of the filter on one channel: 2·K·T as a matrix product, about 2·T·log₂T by FFT."""
        by_fft = options.transform == "fft" or (options.transform == "auto" and before > LONGEST_PRODUCT)
        return 2 * before * math.log2(before) if by_fft else 2 * after * before

    def resample(self, x, cut):
        if cut.order is None:
            y = low_pass(x, cut.most, self.options.transform)
        else:
            y = low_pass_rows(x, cut.lengths, cut.kept, cut.most, self.options.transform)
        if self.options.rescale == "amplitude":
            y = y * (cut.kept.double() / cut.lengths).sqrt()[:, None, None].to(y.dtype)
        return y
