"""Attention written out, the reference behind every backend and the one that returns its weights.

softmax(q kᵀ · scaling + mask) v,   each key/value head serving H/G query heads
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def eager_attention(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B H T S"]]:
    """Signature of transformers' `AttentionInterface`. The softmax runs in fp32, or wider for a float64 model."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = F.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = F.dropout(weights, dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
