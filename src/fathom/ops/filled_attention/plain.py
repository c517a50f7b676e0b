"""`filled_attention` by SDPA: the reference, and what runs without Triton."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def plain_filled_attention(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G R D"],
    value: Float[Tensor, "B G R Dv"],
    visible: Bool[Tensor, "B 1 1 R"],
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The heads of a group as queries of one head, so that no key is repeated."""
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=scaling)
    return mixed.reshape(*query.shape[:3], -1)
