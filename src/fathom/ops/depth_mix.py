"""The mix of Depth-Attention (arXiv 2606.05014): a softmax over layers, at one token, that mixes values.

    q̄      = mean of the g query heads of a key/value head
    α_j    = softmax_j( <q̄, k_j> / √D ),   j over the sources and the layer itself
    out    = Σ_j α_j · v_j

K and V of the sources are never stacked: only the scores are, [B, G, T, M].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

Weights = tuple[Float[Tensor, "#B #G #T 1"], ...]  # α_j, one tensor a candidate


def depth_weights(
    query: Float[Tensor, "B H T D"], keys: Sequence[Float[Tensor, "B G T D"]], wide_scores: bool = False
) -> Weights:
    """α over the M candidates, in fp32 or wider. `wide_scores` takes the dot products in fp32 too."""
    groups = query.shape[1] // keys[0].shape[1]
    mean_query = query.unflatten(1, (-1, groups)).mean(2) if groups > 1 else query
    wide = torch.promote_types(query.dtype, torch.float32)
    if wide_scores:
        mean_query, keys = mean_query.to(wide), [key.to(wide) for key in keys]
    scores = torch.cat([(mean_query * key).sum(-1, keepdim=True) for key in keys], dim=-1)
    # Compiled, a kernel takes the scores and another mixes. As one kernel over all candidates (a softmax over a list)
    # the step was slower: 1.146 for 1.078 × vanilla with all sources at 768 × 12, 1.049 for 1.039 with the default.
    return (scores.to(wide) * query.shape[-1] ** -0.5).softmax(dim=-1).split(1, dim=-1)


def depth_mix(weights: Weights, states: Sequence[Float[Tensor, "B G T D"]]) -> Float[Tensor, "B G T D"]:
    """Σ_j α_j · state_j, one source after another, in the states' dtype."""
    # as [B, T, G, D]: compiled, the values' gradients then lie as their projection wants them, without a copy
    pairs = (
        (w.to(state.dtype).transpose(1, 2), state.transpose(1, 2)) for w, state in zip(weights, states, strict=True)
    )
    return reduce(torch.add, (w * state for w, state in pairs)).transpose(1, 2)
