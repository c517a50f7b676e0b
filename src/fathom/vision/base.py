"""The seam of the wing: a *compressor* (frozen dataclass) turns many vision tokens into few.

    image → vision tower → features of a grid of patches [B, H·W, C] → compressor → [B, m, C] → language model

`families.py` says where in each family of models this happens, and how processor and positions follow. Two kinds need
more
than the features: a `TowerCompressor` reads the tower's attention; a `LanguageCompressor` reads the language model's
and drops tokens between its layers.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Grid = tuple[int, int]  # rows and columns of tokens


def fitting(grid: Grid, tokens: int) -> Grid | None:
    """The grid with `tokens` tokens and the proportions of `grid`, or None: for 24 × 24 and 144 it is 12 × 12."""
    rows, columns = grid
    unit = math.gcd(rows, columns)
    rows, columns = rows // unit, columns // unit
    times = math.isqrt(tokens // (rows * columns))
    return (rows * times, columns * times) if times > 0 and rows * columns * times * times == tokens else None


@dataclasses.dataclass(frozen=True)
class Compressor(ABC):
    """A way to make fewer vision tokens. Subclasses are frozen dataclasses whose fields are the method's options.

    `invariants` names further properties that a method promises (tests/vision/test_vision_invariants.py):
        "identity": with all tokens kept nothing changes.
        "linear": in the features.
        "channels": each channel is treated alike and by itself.
        "scale": multiplying all features multiplies what is kept.
        "transpose": turning the grid turns what is kept.
        "subset": every kept token is one of the features', in their order.

    tokens: vision tokens kept of every image, tile or frame; None where `ratio` says it.
    """

    tokens: int | None = None

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    registry: ClassVar[str] = "vision"
    summary: ClassVar[str]  # one line for `fathom methods`, which reads the sources: write literals
    equation: ClassVar[str]
    role: ClassVar[str] = "baseline"  # or "method"
    invariants: ClassVar[tuple[str, ...]] = ()
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

    def read(self, grid: Grid, layers: int) -> list[int]:
        """The number of a grid's vision tokens that each layer of the language model reads."""
        return [self.count(grid)] * layers

    def resampler(self, channels: int) -> nn.Module | None:
        """The module with the method's weights for features of `channels` channels; it takes features, grid, count."""
        return None

    def in_training(self) -> Compressor:
        """The compressor that one training step uses."""
        return self


@dataclasses.dataclass(frozen=True)
class Seen:
    """The attention of one layer of a tower: the CLS token's query [B, C], the keys of that token and of all patches
    [B, 1+n, C], neither split into heads, and the number of heads."""

    query: Float[Tensor, "B C"]
    keys: Float[Tensor, "B n1 C"]
    heads: int

    def attention(self, heads: int | None = None) -> Float[Tensor, "B heads n"]:
        """softmax(q_cls Kᵀ / √d) for every patch, in `heads` heads; the CLS token's own share is left out."""
        heads = self.heads if heads is None else heads
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        query = self.query.unflatten(-1, (heads, -1)).to(wide)  # [B, heads, d]
        keys = self.keys.unflatten(-1, (heads, -1)).to(wide)  # [B, 1+n, heads, d]
        scores = (query[:, None] * keys).sum(-1) / math.sqrt(query.shape[-1])  # [B, 1+n, heads]
        return scores.softmax(1)[:, 1:].transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class TowerCompressor(Compressor):
    """A compressor that reads the attention of the tower's CLS token.

    next_layer: whether it is taken from the layer that reads the features, instead of the one that wrote them.
    """

    next_layer: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, features: Float[Tensor, "B n C"], grid: Grid, seen: Seen | None = None
    ) -> Float[Tensor, "B m C"]: ...


@dataclasses.dataclass(frozen=True)
class LanguageCompressor(Compressor):
    """A method that drops vision tokens between layers of the language model, until `tokens` are left.

    All vision tokens enter the language model, so their placeholders stay. Kept tokens keep their positions.
    """

    def count(self, grid: Grid) -> int:
        super().count(grid)
        return grid[0] * grid[1]

    def __call__(self, features, grid):
        self.count(grid)
        return features

    def read(self, grid: Grid, layers: int) -> list[int]:
        found, now = [], grid[0] * grid[1]
        after = self.stages(now, layers)
        for layer in range(layers):
            found.append(now)
            now = after.get(layer, now)
        return found

    @abstractmethod
    def stages(self, tokens: int, layers: int) -> dict[int, int]:
        """The number of a picture's vision tokens that are left, by the layer after which others are
        dropped (from 0).
        """

    def raters(self, embeddings: Float[Tensor, "T C"], image: Bool[Tensor, " T"]) -> Int[Tensor, " r"]:
        """Indices in one prompt of the tokens whose attention is used: by default the last one."""
        return torch.tensor([len(image) - 1], device=image.device)

    @abstractmethod
    def keep(
        self, scores: Float[Tensor, " v"], states: Float[Tensor, "v C"], count: int
    ) -> tuple[Int[Tensor, " m"], Float[Tensor, "m C"]]:
        """Which of the vision tokens of one prompt stay (in order), and their states.

        scores: attention that each gets from the raters, the mean over heads and raters.
        """


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
        """Rows and columns of the kept grid. Raises ValueError if no grid of `tokens` tokens has these proportions."""
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
