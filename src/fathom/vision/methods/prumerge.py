"""PruMerge (arXiv 2403.15388): keep the tokens that the CLS token attends to most, each merged with similar ones."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fathom.vision.base import TowerCompressor


@dataclasses.dataclass(frozen=True)
class PruMerge(TowerCompressor):
    """The m tokens of largest attention from the CLS token in the layer that reads the features; to each is added the
    sum of its nearest others by the cosine of keys, weighted by the attention that they get.

    neighbours: k.

    As the official code: attention over the whole width, not by head; neighbours are pruned tokens and kept ones alike;
    the weights are not normalised. There the count follows from outliers of the attention, and one more token sums what
    is pruned; here it is given, as for every method. Kept tokens stand in their old order. Ties: the earlier token.
    """

    neighbours: int = 32

    name = "prumerge"
    paper = "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models, arXiv 2403.15388"
    summary = "Keep the vision tokens that the CLS token attends to most, and add to each what has similar keys."
    equation = "S = top_m a,  a = softmax(q_cls Kᵀ/√C);  y_i = x_i + Σ_{j ∈ kNN(k_i)} a_j x_j"
    invariants = ("linear", "channels", "scale")

    next_layer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.neighbours) is not int or self.neighbours < 0:
            raise self.refuse("neighbours", self.neighbours, "use a whole number of at least 0")

    def __call__(self, features, grid, seen=None):
        assert seen is not None
        attention = seen.attention(heads=1)[:, 0]  # [B, n]
        index = attention.argsort(dim=-1, descending=True, stable=True)[:, : self.count(grid)].sort(-1).values
        unit = F.normalize(seen.keys[:, 1:].to(attention.dtype), dim=-1)
        rows = torch.arange(len(index), device=index.device)[:, None]
        similarity = unit[rows, index] @ unit.transpose(1, 2)  # [B, m, n]
        similarity = similarity.scatter(-1, index[..., None], -torch.inf)  # not itself
        near = similarity.topk(min(self.neighbours, features.shape[1] - 1), -1).indices  # [B, m, k]
        weights = torch.zeros_like(similarity).scatter(
            -1, near, attention[:, None].expand_as(similarity).gather(-1, near)
        )
        return features[rows, index] + (weights @ features.to(weights.dtype)).to(features.dtype)
