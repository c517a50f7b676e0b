"""MQT (arXiv 2405.19315): learned queries read the vision tokens, and any number of the first queries can be used."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from fathom.vision.base import Compressor


@dataclasses.dataclass(frozen=True)
class MQT(Compressor):
    """One layer of cross-attention from the first m of `queries` learned queries; its weights train with the model.

    queries: how many there are, a square.
    heads: of the attention.
    elastic: a training step draws how many queries it uses, from the even numbers up to `tokens`, so that a trained
        model serves any fewer tokens; else it always uses `tokens`.
    """

    queries: int = 256
    heads: int = 16
    elastic: bool = True

    name = "mqt"
    paper = "Matryoshka Query Transformer for Large Vision-Language Models, arXiv 2405.19315"
    summary = "The first m of a few learned queries read the vision tokens by one layer of cross-attention."
    equation = "Y = MHA(LN(Q_{1…m} + P_{1…m}), LN(P_grid), LN(X))"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.queries) is not int or math.isqrt(max(self.queries, 0)) ** 2 != self.queries or self.queries < 1:
            raise self.refuse("queries", self.queries, "use a square, such as 256")
        if self.tokens is not None and self.tokens > self.queries:
            raise self.refuse("tokens", self.tokens, f"there are {self.queries} queries; use at most that")

    def __call__(self, features, grid):
        raise self.refuse("tokens", self.tokens, "its queries are learned; they are part of a model (`resampler`)")

    def resampler(self, channels):
        return Resampler(self.queries, channels, self.heads)

    def in_training(self):
        if not self.elastic or self.tokens is None or self.tokens < 2:
            return self
        return dataclasses.replace(self, tokens=2 * int(torch.randint(1, self.tokens // 2 + 1, ())))


class Resampler(nn.Module):
    """The queries and the attention. As in the official code keys depend on positions alone, so the places that a query
    reads are learned and do not depend on the picture."""

    def __init__(self, queries: int, channels: int, heads: int):
        super().__init__()
        if channels % 4 or channels % heads:
            raise ValueError(
                f"MQT(heads={heads}): the tower has {channels} channels; they must divide by 4 and by heads"
            )
        self.side = math.isqrt(queries)
        self.query = nn.Embedding(queries, channels)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        nn.init.trunc_normal_(self.query.weight, std=0.02)
        self.norm_query, self.norm_key, self.norm_value = (nn.LayerNorm(channels, eps=1e-6) for _ in range(3))

    def forward(self, features, grid, count):
        positions = sines(self.side, features.shape[-1], features.dtype, features.device)
        image = positions.T.unflatten(-1, (self.side, self.side))[None]
        places = F.interpolate(image.float(), grid, mode="bicubic", align_corners=False).to(features)[0].flatten(1).T
        query = self.norm_query(self.query.weight[:count] + positions[:count]).expand(len(features), -1, -1)
        key = self.norm_key(places).expand(len(features), -1, -1)
        return self.attention(query, key, self.norm_value(features), need_weights=False)[0]


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept, and training may come after inference
def sines(side, channels, dtype, device):
    """Sines and cosines of columns, then of rows, of a square grid [side², channels]."""
    rates = 10_000.0 ** (-torch.arange(channels // 4, dtype=torch.float64) / (channels // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * rates
    one = torch.cat((angles.sin(), angles.cos()), -1)  # [side, C/2]
    return torch.cat((one.repeat(side, 1), one.repeat_interleave(side, 0)), -1).to(device, dtype)
