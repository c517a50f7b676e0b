"""ToMe (arXiv 2210.09461): merge the most similar pairs of tokens until few are left."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from fathom.vision.base import Compressor


@dataclasses.dataclass(frozen=True)
class ToMe(Compressor):
    """Bipartite soft matching on the tower's output, in as many rounds as it takes.

    In each round the tokens are split in turn into A and B; every token of A names its most similar one in B; of these
    pairs the most similar are merged to means that count how many tokens each stands for. A round merges at most all of
    A. The paper merges inside the tower, layer by layer; here, as for every method of this wing, after it.
    """

    name = "tome"
    paper = "Token Merging: Your ViT But Faster, arXiv 2210.09461"
    summary = "Merge the most similar vision tokens to their means, by bipartite matching in rounds."
    equation = "x_j ← (s_i x_i + s_j x_j)/(s_i + s_j) for the pairs (i ∈ A, j ∈ B) of largest cosine"
    invariants = ("identity", "scale")

    def __call__(self, features, grid):
        count = self.count(grid)
        x = features.to(torch.promote_types(features.dtype, torch.float32))
        size, place = x.new_ones(x.shape[:2]), torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        while x.shape[1] > count:
            unit = F.normalize(x, dim=-1)
            similarity = unit[:, ::2] @ unit[:, 1::2].transpose(-1, -2)  # [B, |A|, |B|]
            merged = min(x.shape[1] - count, x.shape[1] // 2)
            best, partner = similarity.max(-1)
            order = best.argsort(dim=-1, descending=True, stable=True)
            gone, stay = order[:, :merged], order[:, merged:].sort(-1).values
            partner = partner.gather(1, gone)
            wide = (-1, -1, x.shape[-1])
            weighted = x * size[..., None]
            a, b = weighted[:, ::2], weighted[:, 1::2].contiguous()
            b = b.scatter_add(1, partner[..., None].expand(wide), a.gather(1, gone[..., None].expand(wide)))
            size_a, size_b = size[:, ::2], size[:, 1::2].contiguous()
            size_b = size_b.scatter_add(1, partner, size_a.gather(1, gone))
            x = torch.cat((a.gather(1, stay[..., None].expand(wide)), b), 1)
            size = torch.cat((size_a.gather(1, stay), size_b), 1)
            place = torch.cat((place[:, ::2].gather(1, stay), place[:, 1::2]), 1)
            order = place.argsort(dim=-1, stable=True)  # the old order of those that others were merged into
            place, size = place.gather(1, order), size.gather(1, order)
            x = x.gather(1, order[..., None].expand(wide)) / size[..., None]
        return x.to(features.dtype)
