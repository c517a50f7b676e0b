"""Facts about tokens that layers may read beside their states."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


class TokenFacts(NamedTuple):
    """Facts about tokens that a feed-forward network may read beside their states.

    Attributes:
        real: which tokens are no padding; None: all.
        domains: the number of the source that each token's row comes from; None: unknown.
    """

    real: Bool[Tensor, "B T"] | None = None
    domains: Int[Tensor, "B T"] | None = None
