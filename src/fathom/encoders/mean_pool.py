"""Mean pooling between two encoder layers: the control of every filter of the same length.

Y_n = mean of X_t,  ⌊nT/K⌋ ≤ t < ⌈(n+1)T/K⌉
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fathom.encoders.shortening import Shortening, ShorteningOptions
from fathom.models.registry import register


@register("encoder", "mean_pool")
class MeanPool(Shortening):
    """Neighbouring tokens become their mean; K and everything else as in `fourier`."""

    summary = "Between two layers neighbouring tokens become their mean: K = ⌈ρT⌉ tokens."
    equation = "Y_n = mean X_t,  ⌊nT/K⌋ ≤ t < ⌈(n+1)T/K⌉"
    variants = ({"ratio": 0.5}, {"ratio": 0.3})
    identity = {"ratio": 1.0, "global_residual": False, "residual": "filtered"}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options(ShorteningOptions):
        """The options of `fourier` but for `rescale` and `transform`."""

    def resample(self, x, cut):
        n = torch.arange(cut.most, device=x.device)
        length, kept = cut.lengths[:, None], cut.kept[:, None]
        start, stop = n * length // kept, -(-(n + 1) * length // kept)
        stop = torch.minimum(stop, length)
        wide = torch.promote_types(x.dtype, torch.float32)
        total: Any = 0
        for shift in range(int((stop - start).max())):
            token = start + shift
            inside = (token < stop)[..., None]
            index = token.clamp(max=x.shape[1] - 1)[..., None].expand(len(x), -1, x.shape[2])
            total = total + torch.where(inside, x.gather(1, index).to(wide), 0.0)
        return (total / (stop - start).clamp(min=1)[..., None]).to(x.dtype)
