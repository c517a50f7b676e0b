"""No compression: every vision token goes to the language model."""

from __future__ import annotations

import dataclasses

from fathom.vision.base import GridCompressor


@dataclasses.dataclass(frozen=True)
class AllTokens(GridCompressor):
    """The stock model."""

    ratio: str | float | None = 1.0

    name = "all_tokens"
    summary = "Every vision token goes to the language model: the stock model."
    equation = "Y = X"
    invariants = ("identity", "linear", "channels", "scale", "transpose")

    def __call__(self, features, grid):
        self.kept(grid)
        return features
