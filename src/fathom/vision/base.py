"""The seam of the wing: a *compressor* (frozen dataclass) makes few vision tokens of many.

    image → vision tower → features of a grid of patches [B, H·W, C] → compressor → [B, m, C] → language model

Where in a model that happens, and how its processor and positions follow, is the family's affair (`families.py`).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

Grid = tuple[int, int]  # rows and columns of tokens


def fitting(grid: Grid, tokens: int) -> Grid | None:
    """The grid of that many tokens with the proportions of `grid`, or None if there is none: 24 × 24, 144 → 12 × 12."""
    rows, columns = grid
    unit = math.gcd(rows, columns)
    rows, columns = rows // unit, columns // unit
    times = math.isqrt(tokens // (rows * columns))
    return (rows * times, columns * times) if times > 0 and rows * columns * times * times == tokens else None


@dataclasses.dataclass(frozen=True)
class Compressor(ABC):
    """One way to make fewer vision tokens. Subclasses are frozen dataclasses whose fields are the method's options.

    tokens: vision tokens kept of every image, tile or frame; None where `ratio` says it.
    """

    tokens: int | None = None

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    registry: ClassVar[str] = "vision"
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]
    role: ClassVar[str] = "baseline"  # or "method"
    makes_a_grid: ClassVar[bool] = False  # what is kept is a smaller grid, so that 2-D positions have a meaning

    def __post_init__(self) -> None:
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise self.refuse("tokens", self.tokens, "use a whole number of at least 1")

    def refuse(self, option: str, value: Any, remedy: str) -> ValueError:
        return ValueError(f"{type(self).__name__}({option}={value!r}): {remedy}")

    def to_dict(self) -> dict[str, Any]:
        """`{"name": …, options}`, which a checkpoint's config holds and `fathom.vision.from_dict` reads."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def count(self, grid: Grid) -> int:
        """Tokens kept of a grid. Raises ValueError where the grid has too few."""
        if self.tokens is None:
            raise self.refuse("tokens", None, "say how many tokens to keep")
        if self.tokens > grid[0] * grid[1]:
            raise self.refuse(
                "tokens", self.tokens, f"the image has {grid[0]} × {grid[1]} = {grid[0] * grid[1]}; use at most that"
            )
        return self.tokens

    @abstractmethod
    def __call__(self, features: Float[Tensor, "B n C"], grid: Grid) -> Float[Tensor, "B m C"]:
        """The kept tokens of every grid; n = H·W row by row, m = `count(grid)`."""

    def flops(self, grid: Grid, channels: int) -> int:
        """FLOPs of one call for one grid, in closed form."""
        return 0


@dataclasses.dataclass(frozen=True)
class GridCompressor(Compressor):
    """A compressor whose tokens are a smaller grid.

    ratio: kept share of each side as a decimal or a fraction such as "2/3", rounded down, at least 1; instead of
        `tokens`.
    """

    ratio: str | float | None = None

    makes_a_grid: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tokens is None) == (self.ratio is None):
            raise self.refuse("tokens", self.tokens, f"give tokens or ratio, one of them; ratio={self.ratio!r}")
        if self.ratio is not None:
            try:
                share = Fraction(str(self.ratio))
            except (ValueError, ZeroDivisionError):
                share = Fraction(0)
            if not 0 < share <= 1:
                raise self.refuse("ratio", self.ratio, 'use a number in (0, 1], such as 0.5 or "2/3"')

    def kept(self, grid: Grid) -> Grid:
        """Rows and columns of what is kept. Raises ValueError where `tokens` makes no grid of these proportions."""
        if self.ratio is not None:
            share = Fraction(str(self.ratio))
            return max(1, math.floor(grid[0] * share)), max(1, math.floor(grid[1] * share))
        tokens = super().count(grid)
        found = fitting(grid, tokens)
        if found is None:
            usable = [n for n in range(1, grid[0] * grid[1] + 1) if fitting(grid, n)]
            near = [max((n for n in usable if n < tokens), default=None), min(n for n in usable if n > tokens)]
            raise self.refuse(
                "tokens",
                tokens,
                f"no grid with the proportions of {grid[0]} × {grid[1]} has that many; use "
                f"{' or '.join(str(n) for n in near if n)}, or ratio",
            )
        return found

    def count(self, grid: Grid) -> int:
        h, w = self.kept(grid)
        return h * w
