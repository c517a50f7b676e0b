"""Attention with a vector for each relation between two tokens (RASAT, arXiv 2205.06983, section 3.2).

    s_ij = c·q_i·(k_j + E_K[R_ij]) + b_ij,   a = softmax_j s,   o_i = Σ_j a_ij (v_j + E_V[R_ij])

R holds ids 0 … N. No vector of a pair is ever made: a query's scores are looked up in its N + 1 products with E_K, and
its weights are summed for each relation first:

    q_i·E_K[R_ij] = (q E_Kᵀ)[i, R_ij],      Σ_j a_ij E_V[R_ij] = (A E_V)_i,   A[i, r] = Σ_{j: R_ij = r} a_ij
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def relation_scores(
    query: Float[Tensor, "B H T D"], relations: Int[Tensor, "B T S"], table: Float[Tensor, "N D"]
) -> Float[Tensor, "B H T S"]:
    """q_i·E_K[R_ij] by a gather."""
    return (query @ table.T).gather(-1, _of_heads(relations, query.shape[1]))


def relation_mix(
    weights: Float[Tensor, "B H T S"], relations: Int[Tensor, "B T S"], table: Float[Tensor, "N D"]
) -> Float[Tensor, "B H T D"]:
    """Σ_j a_ij E_V[R_ij] by a histogram, whose sums are in the precision of the weights."""
    histogram = weights.new_zeros(*weights.shape[:3], len(table))
    histogram = histogram.scatter_add(-1, _of_heads(relations, weights.shape[1]), weights)
    return histogram.to(table.dtype) @ table


def relation_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H S D"],
    value: Float[Tensor, "B H S D"],
    relations: Int[Tensor, "B T S"],
    key_table: Float[Tensor, "N D"],
    value_table: Float[Tensor, "N D"],
    bias: Float[Tensor, "#B #H #T S"] | None = None,
    visible: Bool[Tensor, "#B #H #T S"] | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T S"]]:
    """o and a; scores and the softmax in fp32 or wider, a after dropout as it was used.

    Args:
        relations: ids, uint8 as they are stored or int64 as they are looked up.
        bias: b.
        visible: which keys a query sees; None: all.
        scaling: c; 1 in T5.
    """
    scores = query @ key.transpose(-2, -1)
    scores += relation_scores(query, relations, key_table)  # in place, as every copy of [B, H, T, S] is felt
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scaling != 1:
        scores *= scaling
    if bias is not None:
        scores += bias
    if visible is not None:
        scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout, dropout > 0)
    mixed = relation_mix(weights, relations, value_table)
    return weights.to(value.dtype) @ value + mixed.to(value.dtype), weights


def _of_heads(relations: Tensor, heads: int) -> Tensor:
    """The ids as an index of every head, without a copy for each."""
    return relations.long()[:, None].expand(-1, heads, -1, -1)
