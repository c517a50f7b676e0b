"""The head and the input table, as one object that depth methods read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from fathom.models.adapted_layers import linear_matrix, plain_weight, table_matrix
from fathom.ops.cross_entropy import (
    cross_entropy,
    gradients_of_chunk,
    linear_cross_entropy,
    losses_of_chunk,
    token_cross_entropies,
    without_token,
)
from fathom.ops.vocabulary_mixture import mixture_of_chunk, vocabulary_mixture


@dataclasses.dataclass
class Vocabulary:
    """The head and the input table, as a depth method sees them.

    Attributes:
        head: the layer with W_out, [V, d].   table: the embedding with W_in, [V, d].   scale: c, the embedding scale.
        compiled: compiled functions of `ops`, by the functions that they were made from.
    """

    head: nn.Module
    table: nn.Module
    scale: float
    compiled: dict[Callable[..., Any], Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def logits(self, hidden_states: Float[Tensor, "B T d"]) -> Float[Tensor, "B T V"]:
        """The logits h W_outᵀ."""
        return self.head(hidden_states)

    def mixture(self, hidden_states: Float[Tensor, "B T d"], **options: Any) -> Float[Tensor, "B T d"]:
        """Σ_v p_v · c·W_in[v] with p = softmax(h W_outᵀ): the expected next embedding (ops/vocabulary_mixture.py)."""
        device = hidden_states.device
        mixed = vocabulary_mixture(
            hidden_states, linear_matrix(self.head, device), table_matrix(self.table, device), **options,
            of_chunk=self.compiled.get(mixture_of_chunk, mixture_of_chunk),
        )  # fmt: skip
        return mixed if self.scale == 1.0 else mixed * self.scale

    def loss(
        self,
        hidden_states: Float[Tensor, "B T d"],
        targets: Int[Tensor, "B T"],
        scales: Float[Tensor, "B T"] | None = None,
        excluded: int | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"]]:
        """The sum of `losses`, and the losses without gradient, for training: together they cost what the sum does.

        scales: factors of the losses.   excluded: a token that has no probability.
        """
        weight = plain_weight(self.head, hidden_states.device)
        if weight is None:  # an adapter's dropout is of states
            logits = self.head(hidden_states).flatten(0, 1)
            logits = logits if excluded is None else without_token(logits, excluded)
            losses = cross_entropy(logits, targets.flatten())
            losses = losses if scales is None else losses * scales.flatten()
            return losses.sum(), losses.detach().view_as(targets)
        of_chunk = self.compiled.get(gradients_of_chunk, gradients_of_chunk)
        return linear_cross_entropy(hidden_states, weight, targets, of_chunk=of_chunk, scales=scales, excluded=excluded)

    def losses(self, hidden_states: Float[Tensor, "B T d"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """−log p of every target token, 0 where it is −100."""
        of_chunk = self.compiled.get(losses_of_chunk, losses_of_chunk)
        matrix = linear_matrix(self.head, hidden_states.device)
        return token_cross_entropies(hidden_states, matrix, targets, of_chunk)
