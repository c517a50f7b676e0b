"""`range_attention` in PyTorch: every score written out, in fp32 or wider."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fathom.ops.token_blocks import TokenRanges


def range_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G keys D"],
    value: Float[Tensor, "1 G keys D"],
    ranges: TokenRanges,
    scaling: float,
    bias: Float[Tensor, " keys"] | None = None,
) -> Float[Tensor, "1 H N D"]:
    groups, keys = key.shape[1:3]
    place = torch.arange(keys, device=key.device)
    seen = ((place >= ranges.start[..., None]) & (place < ranges.stop[..., None])).any(0)
    scores = query.unflatten(1, (groups, -1)) @ key.unsqueeze(2).mT * scaling  # [1, G, h, N, keys]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)  # what sees nothing gives 0
    return (weights.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2)
