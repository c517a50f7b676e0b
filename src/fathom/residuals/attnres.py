"""Attention Residuals, block form (arXiv 2603.15031).

    input of a sublayer = Σ_i α_i s_i,    α = softmax_i( ⟨w, γ ⊙ s_i / rms(s_i)⟩ ),    fp32

over the sources s_i of its depth: the embedding, one state per completed block of `block_size` sublayers, and the block
under way. w (starts at 0: a plain mean) and γ (starts at 1) are the sublayer's own; a last aggregator of the same form
feeds the final norm. Sublayers are numbered by their writes: 2ℓ, 2ℓ+1, or ℓ with parallel residual.

| reset | a completed block's state | the block under way |
|---|---|---|
| True (the paper) | the sum of its own sublayers' outputs | that sum so far; it starts empty |
| False (Depth-Attention's authors) | a snapshot of the whole stream | the whole stream; a learned bias on its score |

The bias starts at 3, so that a sublayer at first reads mostly the stream. Over L=48 layers in blocks of 12 all
sublayers together have 520 sources with reset and 528 without. The first sublayer has no weights: it can only read the
embedding.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.registry import register
from fathom.residuals.base import Counts, ResidualTopology, check_range

BLOCKS = 8  # default number of blocks, the paper's recommendation


class BlockReader(nn.Module):
    """Σ_i softmax_i(⟨w, γ ⊙ s_i / rms(s_i)⟩) s_i, with a learned bias on the last score if `recency_bias` is given."""

    def __init__(self, width: int, eps: float, recency_bias: float | None):
        super().__init__()
        self.eps = eps
        self.recency_bias = recency_bias
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width))
        if recency_bias is not None:
            self.recency = nn.Parameter(torch.empty(()))

    def initialize_parameters(self):
        init.zeros_(self.query)
        init.ones_(self.gain)
        if self.recency_bias is not None:
            init.constant_(self.recency, self.recency_bias)

    def forward(self, sources: tuple[Tensor, ...]) -> Float[Tensor, "B T d"]:
        # source by source, the softmax too: nothing is stacked, and the compiler can read each source once
        wide = torch.promote_types(sources[0].dtype, torch.float32)
        query = self.query.to(wide) * self.gain.to(wide)
        scores = []
        for source in sources:
            x = source.to(wide)
            inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            scores.append((x * query).sum(-1, keepdim=True) * inverse_rms)
        if self.recency_bias is not None:
            scores[-1] = scores[-1] + self.recency.to(wide)
        highest = scores[0].detach()  # any shift leaves the softmax as it is
        for score in scores[1:]:
            highest = torch.maximum(highest, score.detach())
        masses = [(score - highest).exp() for score in scores]
        total = masses[0]
        for mass in masses[1:]:
            total = total + mass
        mixed = (masses[0] / total).to(sources[0].dtype) * sources[0]
        for mass, source in zip(masses[1:], sources[1:], strict=True):
            mixed = mixed + (mass / total).to(source.dtype) * source
        return mixed


@register("residual", "attnres")
class AttentionResiduals(ResidualTopology):
    """Every sublayer reads a softmax mixture of earlier blocks instead of the residual sum."""

    summary = "Every sublayer reads a softmax mixture of the embedding, earlier blocks and the block under way."
    equation = "x = Σ_i α_i s_i,  α = softmax_i(⟨w, γ ⊙ s_i / rms(s_i)⟩),  s_i the embedding and the states of blocks"
    paper = "2603.15031"
    variants = ({"block_size": 1}, {"block_size": 3}, {"block_size": 2, "reset": False, "recency_bias": 0.5})

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options; the defaults are the paper's.

        block_size: sublayers in a block; 1 is the full form (every sublayer is a source), None makes 8 blocks.
        reset: see the table above.
        recency_bias: with reset=False, the bias's initial value.
        """

        block_size: int | None = None
        reset: bool = True
        recency_bias: float = 3.0

        def __post_init__(self):
            if self.block_size is not None:
                check_range("attnres", "block_size", self.block_size, 1)
            if not math.isfinite(self.recency_bias):
                raise ValueError(f"attnres option recency_bias={self.recency_bias!r}: must be finite")

        def sources(self, sublayers: int) -> list[int]:
            """How many sources each sublayer has."""
            size = self.size(sublayers)
            return [n // size + 1 + (not self.reset or n % size > 0) for n in range(sublayers)]

        def final_sources(self, sublayers: int) -> int:
            """How many sources the last aggregator has."""
            size = self.size(sublayers)
            return sublayers // size + 1 + (not self.reset or sublayers % size > 0)

        def size(self, sublayers: int) -> int:
            return math.ceil(sublayers / BLOCKS) if self.block_size is None else self.block_size

    def __init__(self, config, options):
        super().__init__(config, options)
        self.writes = 1 if config.parallel_residual else 2
        self.sublayers = self.writes * config.num_hidden_layers
        self.block_size = options.size(self.sublayers)
        recency_bias = None if options.reset else options.recency_bias
        # every sublayer's but the first's, which has nothing but the embedding; then the one before the final norm
        self.readers = nn.ModuleList(
            BlockReader(config.hidden_size, config.norm_eps, recency_bias) for _ in range(self.sublayers)
        )

    # the stream: the states of completed blocks, the embedding first, and the block under way (None if empty)

    def start(self, hidden_states):
        return (hidden_states,), None if self.options.reset else hidden_states

    def read(self, stream, sublayer):
        number, sources = self.number(sublayer), self.sources(stream)
        return sources[0] if number == 0 else self.readers[number - 1](sources), None

    def write(self, stream, sublayer, output, carry):
        blocks, current = stream
        current = output if current is None else current + output
        if (self.number(sublayer) + 1) % self.block_size == 0:
            return (*blocks, current), None if self.options.reset else current
        return blocks, current

    def finish(self, stream):
        return self.readers[-1](self.sources(stream))

    def number(self, sublayer: int) -> int:
        return sublayer * self.writes // 2

    def sources(self, stream) -> tuple[Tensor, ...]:
        blocks, current = stream
        return blocks if current is None else (*blocks, current)

    @classmethod
    def counts(cls, config, options) -> Counts:
        d = config.hidden_size
        sublayers = config.num_hidden_layers * (1 if config.parallel_residual else 2)
        reads = [*options.sources(sublayers)[1:], options.final_sources(sublayers)]
        starts = math.ceil(sublayers / options.size(sublayers)) if options.reset else 0  # writes that add nothing
        per_read = -1 - d + (0 if options.reset else 1)  # one term fewer in both sums; the bias
        # a source: squares, mean, ε, root; product, sum, scale; shift, exponential, sum, division; its share
        per_source = (2 * d + 3) + (2 * d + 1) + 4 + 2 * d
        return Counts(
            elementwise=sum(reads) * per_source + len(reads) * per_read + (sublayers - starts) * d,
            mixing=4 * sum(options.sources(sublayers)) * d,
            traffic=(sum(reads) + len(reads)) * d,
            parameters=len(reads) * (2 * d + (0 if options.reset else 1)),
        )
