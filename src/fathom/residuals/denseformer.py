"""DenseFormer: depth-weighted averages of block outputs (arXiv 2402.02622).

    X_0 = Y_0 = embedding;   X_n = block_n(Y_{n−1});   Y_n = Σ_j a_{n,j} X_j,   n = 1 … L

over the blocks j ≤ n with j ≡ n (mod dilation), and Y_n = X_n where n is no multiple of `period`. The a_{n,j} are
learned scalars. A block's own starts at 1 and the others at 0, so a new model is the ordinary decoder, bit by bit. The
head reads Y_L. The average is over block outputs X_j *before* their own average, as in the paper and both public
implementations.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.registry import register
from fathom.residuals.base import Counts, ResidualTopology, check_range


class DepthWeightedAverage(nn.Module):
    """Σ_j a_j X_j with learned scalars, the last of which starts at 1 and the others at 0."""

    def __init__(self, states: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(states))

    def initialize_parameters(self):
        init.copy_(self.weight, torch.eye(len(self.weight))[-1])

    def forward(self, states: list[Tensor]) -> Float[Tensor, "B T d"]:
        weights = self.weight.unbind()  # scalars, so that the states' dtype is kept
        average = weights[0] * states[0]
        for weight, state in zip(weights[1:], states[1:], strict=True):  # one after another: nothing is stacked
            average = average + weight * state
        return average


@register("residual", "denseformer")
class DenseFormer(ResidualTopology):
    """After every block, a learned weighted average over the embedding and all block outputs so far."""

    summary = "After every block, a learned weighted average of the embedding and all block outputs so far."
    equation = "X_n = block_n(Y_{n−1});  Y_n = Σ_{j≤n} a_{n,j} X_j"
    paper = "2402.02622"
    variants = ({}, {"dilation": 2}, {"period": 2})
    identity = {"period": 10**6}  # noqa: RUF012  a period beyond the last block never averages

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options; the defaults are the paper's full form.

        dilation: average every `dilation`-th block output, counted back from the current one.
        period: average after every `period`-th block.
        """

        dilation: int = 1
        period: int = 1

        def __post_init__(self):
            check_range("denseformer", "dilation", self.dilation, 1)
            check_range("denseformer", "period", self.period, 1)

        def averaged(self, n: int) -> range:
            """The indices j of the blocks that Y_n averages, ascending; empty if there is no average after block n."""
            return range(n % self.dilation, n + 1, self.dilation) if n % self.period == 0 else range(0)

    def __init__(self, config, options):
        super().__init__(config, options)
        layers = config.num_hidden_layers
        self.averaged = [options.averaged(n) for n in range(layers + 1)]
        # the X_j that an average after block n still reads: only they travel on
        self.kept = [
            [j for j in range(n + 1) if any(j in self.averaged[later] for later in range(n + 1, layers + 1))]
            for n in range(layers + 1)
        ]
        self.last_write = 0 if config.parallel_residual else 1
        self.averages = nn.ModuleDict(
            {str(n): DepthWeightedAverage(len(self.averaged[n])) for n in range(1, layers + 1) if self.averaged[n]}
        )

    # the stream: Y_n (or what the current block has made of it), and the X_j of `kept`

    def start(self, hidden_states):
        return hidden_states, tuple(hidden_states for _ in self.kept[0])

    def read(self, stream, sublayer):
        return stream[0], None

    def write(self, stream, sublayer, output, carry):
        hidden_states, history = stream
        hidden_states = hidden_states + output
        layer, half = divmod(sublayer, 2)
        if half != self.last_write:
            return hidden_states, history
        n = layer + 1
        outputs = dict(zip(self.kept[n - 1], history, strict=True)) | {n: hidden_states}
        if self.averaged[n]:
            hidden_states = self.averages[str(n)]([outputs[j] for j in self.averaged[n]])
        return hidden_states, tuple(outputs[j] for j in self.kept[n])

    def finish(self, stream):
        return stream[0]

    @classmethod
    def counts(cls, config, options) -> Counts:
        layers, d = config.num_hidden_layers, config.hidden_size
        sources = [len(options.averaged(n)) for n in range(1, layers + 1)]
        averages = sum(1 for count in sources if count)
        writes = layers * (1 if config.parallel_residual else 2)
        return Counts(
            elementwise=(writes + sum(2 * count - 1 for count in sources if count)) * d,
            recomputed_outputs=averages,
            mixing=2 * sum(sources) * d,
            traffic=(sum(sources) + averages) * d,
            parameters=sum(sources),
        )
