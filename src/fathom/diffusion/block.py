"""Block diffusion (BD3-LM, arXiv 2503.09573; SDAR, arXiv 2510.06303): blocks follow each other, within one tokens are
filled in any order.

    p(x) = Π_b p(x_b | x_<b)
    −log p(x_b | x_<b) ≤ E_t E_hidden [1/t · Σ_{j hidden in b} −log p(x_j | x_<b, tokens of b not hidden)]

A token sees its whole block and all earlier ones, so keys and values of a finished block never change, and its cache is
exact. Training runs two streams [noisy | clean] at once; a token of the noisy one sees its own block there and earlier
blocks in the clean one. Blocks of one token are an autoregressive model; one block of the whole row is a masked model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fathom.diffusion.base import BlockCache, BlockState, Objective
from fathom.diffusion.masked import Masked
from fathom.diffusion.passes import Columns, Passes
from fathom.models.registry import register
from fathom.ops.visibility import Blocks


@register("diffusion", "block")
class BlockDiffusion(Objective):
    """The model predicts hidden tokens of a block from the rest of that block and from earlier blocks."""

    summary = "Blocks from left to right, hidden tokens within one in any order; the cache of earlier blocks is exact."
    equation = "−log p(x) ≤ Σ_b E_t E_hidden [1/t · Σ_{j hidden in b} −log p(x_j | x_<b, tokens of b not hidden)]"
    paper = "2503.09573"
    variants = ()  # the suite of causal language models does not run it: tests/diffusion

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options:

        mask_token_id: the token that stands for a hidden one.
        block_length: tokens of a block, counted from the first token of a row.
        """

        mask_token_id: int | None = None
        block_length: int = 4
        shift = False  # each token is predicted at its own place

    @classmethod
    def unsupported(cls, config, options):
        if options.block_length < 1:
            return f"block_length={options.block_length}: must be at least 1"
        return Masked.unsupported(config, options)

    @staticmethod
    def generate(model: Any, inputs: Any, attention_mask: Any, generation_config: Any, **options: Any) -> Any:
        return Masked.generate(model, inputs, attention_mask, generation_config, **options)


@dataclasses.dataclass(frozen=True)
class Exact(BlockCache):
    """Keeps all earlier blocks, which do not depend on later ones. Models of block diffusion are sampled with this
    cache.

    A finished block runs once more, without masks, before the next one begins. Tokens of the prompt after its last
    whole block belong to the first block that is filled, and run with it.
    """

    name = "exact"

    def new_state(self, passes):
        return ExactState(self, passes)


class ExactState(BlockState):
    """Keys and values [R, G, L, D] of all columns. A pass writes those of its columns and reads those in `visible`."""

    def __init__(self, method: Any, passes: Passes):
        super().__init__(method, passes)
        self.size = passes.model.config.diffusion["block_length"]
        self.pads = int((~passes.real).sum(1).min())  # of the longest row; the others have whole blocks more
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.visible = torch.zeros_like(passes.real)[:, None, None]
        self.kept: int | None = None  # columns before this one are final

    def border(self, column: int) -> int:
        """The first column of the block that a column belongs to."""
        return column - (column - self.pads) % self.size

    def states(self, canvas, hidden, step, quota):
        start = self.border(self.block.start)
        if self.kept is None:
            self.read_prompt(canvas, start)
        elif self.kept < start:
            self.run(canvas, self.kept, start)
        self.kept = start
        return self.run(canvas, start, self.block.stop)

    def read_prompt(self, canvas: Tensor, stop: int) -> None:
        """Run the whole blocks of the prompt in one pass."""
        if stop <= self.pads:
            return
        columns = Columns.stretch(0, stop, len(canvas), canvas.device)
        number, real = self.passes.positions, self.passes.real.clone()
        real[:, stop:] = False
        self.mask = (Blocks(self.size)(number[:, :stop, None], number[:, None]) & real[:, None])[:, None]
        self.passes.run(canvas, columns, self.read, "full")

    def run(self, canvas: Tensor, start: int, stop: int) -> tuple[Tensor, Columns]:
        """Run a pass over one block, which sees itself and all columns before it."""
        columns = Columns.stretch(start, stop, len(canvas), canvas.device)
        self.visible[..., :stop] = self.passes.real[:, None, None, :stop]
        self.mask = self.visible
        return self.passes.run(canvas, columns, self.read, "block", fixed=True), columns

    def read(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if layer == len(self.layers):
            shape = (*key.shape[:2], self.passes.length, key.shape[3])
            self.layers.append((key.new_zeros(shape), value.new_zeros(shape)))
        for kept, new in zip(self.layers[layer], (key, value), strict=True):
            kept.index_copy_(2, self.passes.columns.index[0], new)
        return *self.layers[layer], self.mask

    def nbytes(self):
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer)
