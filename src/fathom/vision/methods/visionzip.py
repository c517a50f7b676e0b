"""VisionZip (arXiv 2412.04467): keep the tokens that the CLS token attends to most, and merge the others to a few."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fathom.vision.base import TowerCompressor


@dataclasses.dataclass(frozen=True)
class VisionZip(TowerCompressor):
    """Dominant tokens by the attention of the CLS token, summed over heads, in the layer that wrote the features; of
    the others every ⌊r/c⌋-th is a target, to which the mean of those whose keys are most like its own is added.

    contextual: share of the kept tokens that are such targets, rounded; 10 of 64 in the paper.

    As the official code, which adds the mean and does not average with it. It also keeps the CLS token, which LLaVA's
    features do not have here. Kept tokens stand in their old order. Ties: the earlier token.
    """

    contextual: float = 0.15625

    name = "visionzip"
    paper = "VisionZip: Longer is Better but Not Necessary in Vision Language Models, arXiv 2412.04467"
    summary = "Keep the vision tokens that the CLS token attends to most, and merge the others to a few."
    equation = "D = top_{m−c} Σ_heads softmax(q_cls Kᵀ/√d);  y_t = x_t + mean{x_j : t = argmax_t' cos(k_j, k_t')}"
    invariants = ("identity", "linear", "channels", "scale")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.contextual < 1:
            raise self.refuse("contextual", self.contextual, "use a share in [0, 1)")

    def __call__(self, features, grid, seen=None):
        assert seen is not None
        count = self.count(grid)
        merged = min(round(self.contextual * count), count - 1)
        attention = seen.attention()
        keys = seen.keys[:, 1:].unflatten(-1, (seen.heads, -1)).to(attention.dtype).mean(2)  # [B, n, d]
        keys = F.normalize(keys, dim=-1)
        order = attention.sum(1).argsort(dim=-1, descending=True, stable=True)
        dominant, others = order[:, : count - merged], order[:, count - merged :].sort(-1).values
        if not merged:
            return _at(features, dominant.sort(-1).values)
        is_target = torch.zeros(others.shape[1], dtype=torch.bool, device=features.device)
        is_target[torch.arange(merged, device=features.device) * (others.shape[1] // merged)] = True
        targets, rest = others[:, is_target], others[:, ~is_target]
        nearest = (_at(keys, rest) @ _at(keys, targets).transpose(1, 2)).argmax(-1)  # [B, r]
        chosen = F.one_hot(nearest, merged).to(features.dtype)
        means = chosen.transpose(1, 2) @ _at(features, rest) / chosen.sum(1).clamp_min(1)[..., None]
        kept = torch.cat((_at(features, dominant), _at(features, targets) + means), 1)
        return _at(kept, torch.cat((dominant, targets), 1).argsort(-1))


def _at(values, places):
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))
