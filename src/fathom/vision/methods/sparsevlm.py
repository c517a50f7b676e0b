"""SparseVLM (arXiv 2410.04417): text tokens rate vision tokens, and some of what goes is merged."""

from __future__ import annotations

import dataclasses
import math

import torch

from fathom.vision.base import LanguageCompressor


@dataclasses.dataclass(frozen=True)
class SparseVLM(LanguageCompressor):
    """In each of `layers` the attention of the raters scores vision tokens, and fewer stay.

    Raters are the text tokens after the pictures, or the last token, that the vision tokens are closest to: r with
    mean_v softmax_t(x_v · x_t)[r] above its mean over text tokens, of the embeddings. Of the tokens that go, the best
    30 % by score are clustered (density peaks: the distance to a denser point times density) to one mean a cluster, a
    tenth as many, at the place of the cluster's centre. Kept and merged together are the count of a stage.

    layers: after which the count falls, as shares of the depth; 2, 6 and 15 of 32 in the paper.

    The paper's counts of stages are tables for LLaVA-1.5; here they fall from all to `tokens` in equal ratios. Kept
    tokens keep their positions, where the official code numbers them anew.
    """

    layers: tuple[float, ...] = (0.0625, 0.1875, 0.46875)

    name = "sparsevlm"
    paper = "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference, arXiv 2410.04417"
    summary = "In some layers keep the vision tokens that relevant text attends to, and merge some of the others."
    equation = "S_ℓ = top mean_{r ∈ R} A_ℓ[r, :];  R = {t : mean_v softmax_t(x_v·x_t) > mean}"
    invariants = ("identity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(not 0 <= share < 1 for share in self.layers):
            raise self.refuse("layers", self.layers, "use shares of the depth in [0, 1)")

    def stages(self, tokens, layers):
        at = sorted({math.floor(share * layers) for share in self.layers})
        if at[-1] >= layers - 1:
            raise self.refuse(
                "layers", self.layers, f"the last of {layers} layers has none after it; use smaller shares"
            )
        counts = [round(tokens * (self.tokens / tokens) ** ((i + 1) / len(at))) for i in range(len(at))]
        return dict(zip(at, counts))

    def raters(self, embeddings, image):
        after = torch.arange(len(image), device=image.device) > image.nonzero().max()
        if not after.any():
            return super().raters(embeddings, image)
        relevance = (embeddings[image] @ embeddings[after].T).float().softmax(-1).mean(0)
        chosen = relevance > relevance.mean() if len(relevance) > 1 else torch.ones_like(relevance, dtype=torch.bool)
        return after.nonzero()[:, 0][chosen if chosen.any() else slice(None)]

    def keep(self, scores, states, count):
        order = scores.argsort(descending=True, stable=True)
        gone = len(order) - count
        clusters = min(int(0.3 * gone) // 10 + 1, count - 1) if gone else 0
        stay, rest = order[: count - clusters], order[count - clusters :]
        if not clusters:
            return stay.sort().values, states[stay.sort().values]
        best = rest[: max(int(0.3 * gone) + 1, clusters)]
        centres, means = merged(states[best], clusters)
        index = torch.cat((stay, best[centres]))
        kept = torch.cat((states[stay], means))
        return index.sort().values, kept[index.argsort()]


def merged(states, count):
    """The places of the centres of `count` clusters, and the clusters' means (DPC-KNN). Ties: the earlier token."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    distance = torch.cdist(wide, wide) / math.sqrt(states.shape[-1])
    nearest = distance.topk(min(count, len(states)), largest=False).values
    density = (-nearest.square().mean(-1)).exp()
    denser = density[None] > density[:, None]
    apart = torch.where(denser, distance, distance.max()).min(-1).values
    centres = (apart * density).argsort(descending=True, stable=True)[:count]
    belongs = distance[:, centres].argmin(-1)
    belongs[centres] = torch.arange(count, device=states.device)
    chosen = torch.nn.functional.one_hot(belongs, count).to(wide.dtype)
    return centres, (chosen.T @ wide / chosen.sum(0)[:, None]).to(states.dtype)
