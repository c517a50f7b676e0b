"""Pause tokens: n learned tokens after every token, the last of which predicts (arXiv 2310.02226).

Pauses stand after every token, as in the PonderLM-2 repository, where this is a baseline.

    S = [e_1, p_1, …, p_n, e_2, p_1, …, p_n, …],   e_t = c·W_in[x_t],   p_i = c·P_i
    logits_t = W_out F(S)[slot of p_n after token t]

One causal forward over (n+1)·T slots; a token's pauses share its position. P is [n, d], or one row repeated n times.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from fathom.depth.base import Counts, DepthMethod, DepthOutput, check_range
from fathom.models.registry import register
from fathom.models.slots import interleave


@register("depth", "pause")
class Pause(DepthMethod):
    """n learned slots after every token."""

    summary = "Learned pause tokens after every token; the last one predicts."
    equation = "S = [e_1, p_1 … p_n, e_2, p_1 … p_n, …];  logits_t = W_out F(S)[slot of p_n after token t]"
    paper = "2310.02226"
    variants = ({"pauses": 2}, {"pauses": 2, "shared": True})
    identity = {"pauses": 0}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """pauses: n, pause tokens after every token; 0 is the ordinary decoder.

        shared: all n are the same vocabulary row, as in the PonderLM-2 repository; False learns n rows.
        """

        pauses: int = 1
        shared: bool = False
        passes: ClassVar[int] = 1

        def __post_init__(self):
            check_range("pause", "pauses", self.pauses, 0)

        @property
        def rows(self) -> int:
            return min(self.pauses, 1) if self.shared else self.pauses

    def __init__(self, config, options):
        super().__init__(config, options)
        self.scale, self.init, self.initializer_range = config.embed_scale, config.init, config.initializer_range
        if options.pauses:
            self.embedding = nn.Parameter(torch.empty(options.rows, config.hidden_size))

    @property
    def slots(self) -> int:
        return self.options.pauses + 1

    def initialize_parameters(self) -> None:
        if self.options.pauses:  # as a row of the input table
            std = self.initializer_range if self.init == "hf" else math.sqrt(2 / (5 * self.embedding.shape[1]))
            if self.init == "hf":
                init.normal_(self.embedding, mean=0.0, std=std)
            else:
                init.trunc_normal_(self.embedding, mean=0.0, std=std, a=-3 * std, b=3 * std)

    def forward(self, stack, embeddings, vocabulary) -> DepthOutput:
        if not self.options.pauses:
            return DepthOutput(stack(embeddings))
        n = self.slots
        rows = self.embedding if self.scale == 1.0 else self.embedding * self.scale
        pauses = [rows[i % len(rows)].expand_as(embeddings) for i in range(n - 1)]
        slots = interleave([embeddings, *pauses])
        return DepthOutput(stack.bind(slots, stack.layout(n))(slots)[:, n - 1 :: n])

    @classmethod
    def counts(cls, config, options) -> Counts:
        return Counts(slots=options.pauses + 1, parameters=options.rows * config.hidden_size)
