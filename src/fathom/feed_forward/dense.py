"""The ordinary feed-forward network, the same for every token.

gated    y = W_down (act(W_gate x) ⊙ W_up x)         plain    y = W_down act(W_up x)
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from fathom.feed_forward.base import Counts, FeedForward
from fathom.models.registry import register


@register("feed_forward", "dense")
class Dense(FeedForward):
    """Two linear maps with the activation between them, three when gated (`gated_mlp`)."""

    summary = "The ordinary feed-forward network: every token runs all of it."
    equation = "y = W_down (act(W_gate x) ⊙ W_up x)"

    def __init__(self, config: Any, options: Any, width: int | None = None):
        """width: hidden width, where this is part of another network; None: the config's intermediate_size."""
        super().__init__(config, options)
        width = config.intermediate_size if width is None else width
        self.gated = config.gated_mlp
        if config.gated_mlp:
            self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.down_proj.writes_residual = True  # type: ignore[assignment]  # initialization.py
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x) if self.gated else self.act_fn(self.up_proj(x))
        return self.down_proj(hidden)

    @classmethod
    def counts(cls, config, options) -> Counts:
        d, width, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        maps = 3 if config.gated_mlp else 2
        biases = (d + (maps - 1) * width) * config.mlp_bias
        return Counts(
            matmul=layers * 2 * maps * d * width,
            last_matmul=layers * 2 * d * width,
            elementwise=layers * (biases + (maps - 1) * width),  # activation, and the product with `up`
            parameters=layers * (maps * d * width + biases),
        )
