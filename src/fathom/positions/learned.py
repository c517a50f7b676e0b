"""Learned positions (GPT-2): one vector a position, added to the embedding of the token.

E_n ← E_n + P_n
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from fathom.models.registry import register
from fathom.positions.base import Counts, Positions


@register("positions", "learned")
class Learned(Positions, nn.Embedding):
    """A table of `max_position_embeddings` vectors, initialised like every other table."""

    summary = "A learned vector a position, added to the embeddings."
    equation = "E_n ← E_n + P_n"
    place: ClassVar[str] = "embed_positions"

    def __init__(self, config: Any, options: Any):
        nn.Embedding.__init__(self, config.max_position_embeddings, config.hidden_size)
        self.options = options

    def add(self, embeddings, position_ids):
        return embeddings + self(position_ids)

    @classmethod
    def added(cls, config, options):
        return config.hidden_size

    @classmethod
    def counts(cls, config, options) -> Counts:
        return Counts(parameters=config.max_position_embeddings * config.hidden_size)
