"""ResFormer: value residual learning (arXiv 2410.17897).

    v^ℓ ← λ1 v^0 + λ2 v^ℓ,    ℓ = 1 … L−1

v^0 is the first layer's own value, of the same token and, under a multi-pass depth method, of the same pass. Keys stay
as they are, and the cache holds the mixed value. The paper's identity variant keeps λ1 = λ2 = 1/2; with `learned` every
layer learns its two.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from transformers import initialization as init

from fathom.mixers.base import Counts, Mixer
from fathom.models.registry import register


@register("mixer", "resformer")
class ResFormer(Mixer):
    """The first layer's value, added to every later layer's."""

    summary = "Every layer's value is averaged with the first layer's (value residual)."
    equation = "v^ℓ ← λ1 v^0 + λ2 v^ℓ,  ℓ = 1 … L−1"
    paper = "2410.17897"
    variants = ({}, {"learned": True})
    identity = {"first_weight": 0.0, "own_weight": 1.0}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """first_weight, own_weight: λ1, λ2, or their initial values if `learned`.

        learned: every layer but the first learns its two weights.
        """

        first_weight: float = 0.5
        own_weight: float = 0.5
        learned: bool = False

        def __post_init__(self):
            for option in ("first_weight", "own_weight"):
                if not math.isfinite(getattr(self, option)):
                    raise ValueError(f"resformer option {option}={getattr(self, option)!r}: must be finite")

    def __init__(self, config, options):
        super().__init__(config, options)
        self.layers = config.num_hidden_layers
        if options.learned:
            self.first_weights = nn.Parameter(torch.empty(self.layers - 1))
            self.own_weights = nn.Parameter(torch.empty(self.layers - 1))

    def initialize_parameters(self):
        if self.options.learned:
            init.constant_(self.first_weights, self.options.first_weight)
            init.constant_(self.own_weights, self.options.own_weight)

    @classmethod
    def unsupported(cls, config, options):
        if getattr(config, "kv_lora_rank", None) is not None:
            return "multi-head latent attention (kv_lora_rank): layers share no space of values"
        if options.learned and config.num_hidden_layers < 2:
            return "learned=True needs at least 2 layers, the first has no weights to learn"
        return None

    def source_layers(self, index):
        first = index - index % self.layers
        return (first,) if index > first else ()

    def is_source(self, index):
        return index % self.layers == 0

    def forward(self, query, key, value, sources, layer):
        if not sources:
            return key, value, (value,)
        first, own = self.options.first_weight, self.options.own_weight
        if self.options.learned:
            first, own = self.first_weights[layer - 1], self.own_weights[layer - 1]
        return key, first * sources[0][0] + own * value, ()

    @classmethod
    def counts(cls, config, options) -> Counts:
        mixing = config.num_hidden_layers - 1
        width = config.num_key_value_heads * config.head_dim
        return Counts(
            elementwise=3 * width * mixing * config.passes,
            mixing=4 * width * mixing * config.passes,
            traffic=3 * width * mixing * config.passes,
            parameters=2 * mixing if options.learned else 0,
        )
