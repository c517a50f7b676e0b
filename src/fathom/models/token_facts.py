"""What layers may know of the tokens beside their states."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


class TokenFacts(NamedTuple):
    """What a feed-forward network may know of the tokens beside their states.

    Attributes:
        real: which of them are no padding; None: all.
        domains: from which source of text the row of each comes; None: not said.
    """

    real: Bool[Tensor, "B T"] | None = None
    domains: Int[Tensor, "B T"] | None = None
