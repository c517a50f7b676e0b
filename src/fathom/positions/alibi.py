"""ALiBi (arXiv 2108.12409): no rotation; a head's score falls by its slope for every token between query and key.

    score_h(n, m) = q·k/√D − s_h·(n − m),     s_h = 2^(−8h/H),  h = 1 … H

If H is no power of two, the first heads have the slopes of the next smaller power P, and the others every second slope
of 2P heads, as in the authors' release.

The bias is part of the product: [q, s·√D·(1, 1, 256), −s·√D·n] · [k, (c, 256b, 256a), 1] with the key's position
m = c + 256b + 65536a. The digits are exact in every precision; −s·√D·n, which depends on the query alone, is split into
three terms of the product's precision. Keys thus carry their position, in the cache too, and any kernel adds the bias.
The channels to append are made once a forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.models.registry import register
from fathom.positions.base import Positions

CHANNELS = 8  # three digits, three terms, and two more: kernels want a multiple of eight


def slopes(heads: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " H"]:
    """s_1 … s_H."""
    power = 2 ** math.floor(math.log2(heads))
    h = torch.arange(1, 2 * power + 1, dtype=dtype, device=device)
    first, between = torch.exp2(-8 / power * h[:power]), torch.exp2(-4 / power * h[::2])
    return torch.cat((first, between[: heads - power]))


@register("positions", "alibi")
class Alibi(Positions):
    """Linear biases on attention scores, with a slope for each head."""

    summary = "Every head's scores fall linearly with the distance, each with a slope of its own."
    equation = "score_h(n, m) = q·k/√D − s_h·(n − m),  s_h = 2^(−8h/H)"
    paper = "2108.12409"

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        self.heads_of_model, self.head_dim = config.num_attention_heads, config.head_dim

    @classmethod
    def channels(cls, config, options):
        return CHANNELS

    def tables(self, x: Tensor, position_ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """The channels that queries and keys get: [B, T, H, channels] and [B, T, 1, channels]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        digits = (position_ids % 256, position_ids // 256 % 256 * 256, position_ids // 65536 * 256)
        keys = torch.stack((*digits, *3 * [torch.ones_like(position_ids)]), dim=-1).to(x.dtype)
        # rounded first, so that query and key are held against one slope
        slope = (slopes(self.heads_of_model, wide, x.device) * self.head_dim**0.5).to(x.dtype)
        terms, rest = [slope, slope, 256 * slope], -position_ids[..., None].to(wide) * slope.to(wide)
        terms = [term.expand(rest.shape) for term in terms]
        for _ in range(3):
            terms.append(rest.to(x.dtype))
            rest = rest - terms[-1]
        queries = torch.stack(terms, dim=-1)
        return F.pad(queries, (0, CHANNELS - 6)), F.pad(keys, (0, CHANNELS - 6))[:, :, None]

    @staticmethod
    def expand(options, tables, query, key):
        ours, theirs = (table.transpose(1, 2).to(query.dtype) for table in tables)
        query = torch.cat((query, ours.expand(len(query), -1, -1, -1)), dim=-1)
        return query, torch.cat((key, theirs.expand(*key.shape[:3], -1)), dim=-1)
