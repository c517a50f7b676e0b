"""DivPrune (arXiv 2503.02175): keep the tokens that differ most from one another."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fathom.vision.base import Compressor


@dataclasses.dataclass(frozen=True)
class DivPrune(Compressor):
    """Greedy max-min diversity: distances are 1 − cosine of the features.

    The first token is the one whose nearest neighbour is farthest; each next one is farthest from those chosen. Kept
    tokens stand in their old order. Ties: the earlier token.
    """

    name = "divprune"
    paper = "DivPrune: Diversity-based Visual Token Pruning, arXiv 2503.02175"
    summary = "Keep the subset of vision tokens whose smallest distance to one another is largest (greedy)."
    equation = "S ← S ∪ {argmax_i min_{j ∈ S} (1 − cos(x_i, x_j))}"
    invariants = ("identity", "scale", "subset")

    def __call__(self, features, grid):
        count = self.count(grid)
        unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
        distance = 1 - unit @ unit.transpose(-1, -2)  # [B, n, n]
        others = distance.masked_fill(
            torch.eye(distance.shape[-1], dtype=torch.bool, device=features.device), torch.inf
        )
        chosen = others.min(-1).values.argmax(-1)  # [B]
        picks, nearest = [chosen], torch.full_like(distance[:, 0], torch.inf)
        rows = torch.arange(features.shape[0], device=features.device)
        for _ in range(count - 1):
            nearest = torch.minimum(nearest, distance[rows, chosen]).scatter(-1, chosen[:, None], -torch.inf)
            chosen = nearest.argmax(-1)
            picks.append(chosen)
        index = torch.stack(picks, -1).sort(-1).values
        return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))
