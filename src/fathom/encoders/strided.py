"""Every n-th token is kept between two encoder layers.

Y_n = X_⌊nT/K⌋
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.encoders.shortening import Cut, Shortening, ShorteningOptions, stretch
from fathom.models.registry import register


@register("encoder", "strided")
class Strided(Shortening):
    """Tokens at equal distances; K and everything else as in `fourier`."""

    summary = "Between two layers every n-th token is kept: K = ⌈ρT⌉ tokens."
    equation = "Y_n = X_⌊nT/K⌋"
    variants = ({"ratio": 0.5}, {"ratio": 0.3})
    identity = {"ratio": 1.0, "global_residual": False, "residual": "filtered"}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options(ShorteningOptions):
        """The options of `fourier` but for `rescale` and `transform`."""

    def resample(self, x: Any, cut: Cut) -> Any:
        return stretch(x, cut.lengths, cut.kept, cut.most, "nearest")
