"""The mix of Depth-Attention (arXiv 2606.05014): a softmax over layers, at one token, that mixes values.

    q̄      = mean of the g query heads of a key/value head
    α_j    = softmax_j( <q̄, k_j> / √D ),   j over the sources and the layer itself
    out    = Σ_j α_j · v_j

K and V of the sources are never stacked. Compiled, nothing is: weights are one tensor a candidate, so that rotation,
scores, softmax and mix become one kernel over the rows, forward and backward.
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
    scale = query.shape[-1] ** -0.5
    return softmax([(mean_query * key).sum(-1, keepdim=True).to(wide) * scale for key in keys])


def softmax(scores: Sequence[Float[Tensor, "B G T 1"]]) -> Weights:
    """exp(s_j − max s) / Σ_i exp(s_i − max s) over the list."""
    if not torch.compiler.is_compiling():  # three kernels, however many scores
        return torch.cat(tuple(scores), dim=-1).softmax(dim=-1).split(1, dim=-1)
    top = reduce(torch.maximum, scores).detach()  # any shift gives the same weights, so none needs a gradient
    powers = [(score - top).exp() for score in scores]
    total = reduce(torch.add, powers)
    return tuple(power / total for power in powers)


def depth_mix(weights: Weights, states: Sequence[Float[Tensor, "B G T D"]]) -> Float[Tensor, "B G T D"]:
    """Σ_j α_j · state_j, one source after another, in the states' dtype."""
    return reduce(torch.add, (w.to(state.dtype) * state for w, state in zip(weights, states, strict=True)))
