"""The head and the input table, as one object that depth methods read."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fathom.ops.vocabulary_mixture import vocabulary_mixture


@dataclasses.dataclass
class Vocabulary:
    """The two matrices between states and tokens, as a depth method sees them.

    Attributes:
        head: W_out, [V, d].   table: W_in, [V, d].   scale: c, the embedding scale.
    """

    head: Float[Tensor, "V d"]
    table: Float[Tensor, "V d"]
    scale: float

    def logits(self, hidden_states: Float[Tensor, "B T d"]) -> Float[Tensor, "B T V"]:
        """h W_outᵀ."""
        return F.linear(hidden_states, self.head)

    def mixture(self, hidden_states: Float[Tensor, "B T d"], **options: Any) -> Float[Tensor, "B T d"]:
        """Σ_v p_v · c·W_in[v] with p = softmax(h W_outᵀ): the expected next embedding (ops/vocabulary_mixture.py)."""
        mixed = vocabulary_mixture(hidden_states, self.head, self.table, **options)
        return mixed if self.scale == 1.0 else mixed * self.scale
