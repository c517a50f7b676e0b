"""The mix of Depth-Attention (arXiv 2606.05014): a softmax over layers, at one token, that mixes values.

    q̄      = mean of the g query heads of a key/value head
    α_j    = softmax_j( <q̄, k_j> / √D ),   j over the sources and the layer itself
    out    = Σ_j α_j · v_j

K and V of the sources are never stacked: only the scores are, [B, G, T, M]. Written so that the compiler fuses it with
the rotation before and the attention's input after it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def depth_weights(
    query: Float[Tensor, "B H T D"], keys: list[Float[Tensor, "B G T D"]], wide_scores: bool = False
) -> Float[Tensor, "B G T M"]:
    """α over the M candidates, in fp32 or wider. `wide_scores` takes the dot products in fp32 too."""
    groups = query.shape[1] // keys[0].shape[1]
    mean_query = query.unflatten(1, (-1, groups)).mean(2) if groups > 1 else query
    wide = torch.promote_types(query.dtype, torch.float32)
    if wide_scores:
        mean_query, keys = mean_query.to(wide), [key.to(wide) for key in keys]
    scores = torch.stack([(mean_query * key).sum(-1) for key in keys], dim=-1)
    return (scores.to(wide) * query.shape[-1] ** -0.5).softmax(dim=-1)


def depth_mix(weights: Float[Tensor, "#B #G #T M"], states: list[Float[Tensor, "B G T D"]]) -> Float[Tensor, "B G T D"]:
    """Σ_j α_j · state_j, one source after another, in the states' dtype."""
    weights = weights.to(states[0].dtype)
    mixed = weights[..., 0, None] * states[0]
    for j in range(1, len(states)):
        mixed = mixed + weights[..., j, None] * states[j]
    return mixed
