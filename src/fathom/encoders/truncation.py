"""The source cut to its first K tokens: the usual remedy where an encoder is too expensive.

Y = X_{t<K}
"""

from __future__ import annotations

import dataclasses

from fathom.encoders.shortening import Shortening, ShorteningOptions
from fathom.models.registry import register


@register("encoder", "truncation")
class Truncation(Shortening):
    """The first K tokens; the decoder reads these alone."""

    summary = "The encoder reads the first K = ⌈ρT⌉ tokens of the source."
    equation = "Y_n = X_n,  n < K"
    variants = ({"ratio": 0.5},)
    identity = {"ratio": 1.0, "residual": "filtered"}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options(ShorteningOptions):
        """filter_layers: as in `fourier`; (0,) cuts the source itself.
        global_residual: as in `fourier`.
        """

        filter_layers: tuple[int, ...] | None = (0,)
        global_residual: bool | None = False

    def resample(self, x, cut):
        return x[:, : cut.most]
