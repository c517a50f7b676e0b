"""Attention in which every query sees one range of keys in each of a few segments.

    o_q = Σ_s p_qs v_s,   p_qs = softmax_s(scaling · q·k_s + b_s)   over   s ∈ ∪_i [start_iq, stop_iq)

The bias b of the keys is one for all heads, and may be left out. Its gradient, with those that flash attention knows:

    δ_q = do_q·o_q,   ds_qs = p_qs (do_q·v_s − δ_q),   db_s = Σ_q ds_qs   over the queries and all heads

Both ends of segment i's range must not fall from one query to the next, as with queries and each segment's keys in the
order of their tokens. Then the keys that some queries in a row may see are again a range, and so are the queries that
read some keys in a row: nothing is looked up per score, and what nobody sees is not visited. A query that sees no key
gives 0.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fathom.ops.kernels import has_kernel
from fathom.ops.range_attention import plain
from fathom.ops.token_blocks import TokenRanges


def serves(device: str, width: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether a kernel takes heads of so many channels, so many of a key/value head: the plain form writes out every
    score, so whoever has another layout to choose asks first."""
    if not has_kernel(device):
        return False
    from fathom.ops.range_attention import kernel

    return kernel.serves(width, heads, dtype)


def range_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G keys D"],
    value: Float[Tensor, "1 G keys D"],
    ranges: TokenRanges,
    scaling: float,
    bias: Float[Tensor, " keys"] | None = None,
) -> Float[Tensor, "1 H N D"]:
    """o. The ends of the ranges are places among all keys; gradients need `ranges.readers`. `bias`: of every key.

    Raises:
        ValueError: tensors of different widths or dtypes.
    """
    if not query.shape[3] == key.shape[3] == value.shape[3] or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value have {query.shape[3]}, {key.shape[3]} and {value.shape[3]} channels in "
            f"{query.dtype}, {key.dtype} and {value.dtype}; the kernels read one width and one dtype"
        )
    if serves(query.device.type, query.shape[3], query.shape[1] // key.shape[1], query.dtype):
        from fathom.ops.range_attention import kernel

        return kernel.range_attention(query, key, value, ranges, scaling, bias)
    return plain.range_attention(query, key, value, ranges, scaling, bias)


def ranged_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G keys D"],
    value: Float[Tensor, "1 G keys D"],
    mask: TokenRanges,
    scaling: float,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    """`range_attention` as a function of transformers' `AttentionInterface`."""
    return range_attention(query, key, value, mask, scaling).transpose(1, 2), None
