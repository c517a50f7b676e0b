"""Attention with a bias per key, and with other rules than "earlier slots" for which slot sees which.

    o_q = Σ_s p_qs v_s,   p_qs = softmax_s(scaling · q·k_s + b_s)   over the keys s that query q sees

Four equal forms:

    dense    b where a key is seen, the lowest number elsewhere, as a tensor that any backend adds. The reference.
    flex     FlexAttention adds b score by score; a block mask says what is seen. Compiled on a GPU, where gradients
             reach b; uncompiled on a CPU, forward only.
    channel  [q, 1] · [k, b/scaling]: a plain causal kernel (flash) computes the bias as part of the product.
    range    Kernels of our own (ops/range_attention) over the rows of a batch end to end, plain causal: what a slot
             sees is a range of them. On a GPU, in 16 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fathom.ops.range_attention import range_attention, serves
from fathom.ops.token_blocks import TokenRanges, readers_of
from fathom.ops.visibility import Visibility

# A bias that hides a key: exp(−4000) is 0 in every precision, and 4000/scaling is finite in fp16 up to 256 channels.
MASKED = -4000.0


def dense_mask(
    bias: Float[Tensor, "B keys"], seen: Bool[Tensor, "#B S keys"], dtype: torch.dtype
) -> Float[Tensor, "B 1 S keys"]:
    """The number that the dense form adds to each score; a query that sees nothing reads all keys evenly, not NaN."""
    return torch.where(seen, bias[:, None], torch.finfo(dtype).min)[:, None].to(dtype)


def block_mask(sees: Visibility, queries: int, keys: int, device: torch.device) -> BlockMask:
    """The block mask of `sees` for the last `queries` of `keys` slots, made once per shape."""
    if torch.compiler.is_compiling():  # part of the graph; a cache that outlives it cannot be
        return _block_mask.__wrapped__(sees, queries, keys, device)
    return _block_mask(sees, queries, keys, device)


@functools.lru_cache(maxsize=64)
def _block_mask(sees: Visibility, queries: int, keys: int, device: torch.device) -> BlockMask:
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query + (keys - queries), key)

    return create_block_mask(mask_mod, None, None, queries, keys, device=device)  # type: ignore[arg-type]


def causal_ranges(rows: int, slots: int, device: torch.device) -> TokenRanges:
    """Plain causal, the rows end to end: slot s of row r sees [r·S, r·S + s]."""
    index = torch.arange(rows * slots, dtype=torch.int32, device=device)[None]
    start, stop = index // slots * slots, index + 1
    return TokenRanges(start, stop, readers_of(start, stop, rows * slots))


@dataclasses.dataclass(frozen=True)
class KeyBias:
    """The bias b of every key, fp32 or wider; which subclass says the form that adds it."""

    bias: Float[Tensor, "B keys"] | None


class ChannelBias(KeyBias):
    """The channel form, plain causal."""


@dataclasses.dataclass(frozen=True)
class RangeBias(KeyBias):
    """The range form; the channel form where its kernels do not serve.

    Attributes:
        ranges: `causal_ranges`.
    """

    ranges: TokenRanges


@dataclasses.dataclass(frozen=True)
class FlexBias(KeyBias):
    """The flex form.

    Attributes:
        bias: None: 0.
        blocks: what is seen.
        documents: of every key; a query sees its own document.
        tile: queries and keys that the forward kernel takes at a time, in 16 bits; None: as it likes.
    """

    blocks: BlockMask
    documents: Int[Tensor, "B keys"] | None = None
    tile: int | None = None


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention as a kernel, compiled once; uncompiled it would build every score."""
    return torch.compile(flex_attention)


def flex_biased_attention(
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B G keys D"],
    value: Float[Tensor, "B G keys D"],
    mask: FlexBias,
    scaling: float,
) -> Float[Tensor, "B H S D"]:
    """The flex form."""
    bias, documents, offset = mask.bias, mask.documents, key.shape[2] - query.shape[2]

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[batch, key_index]
        if documents is not None:
            same = documents[batch, query_index + offset] == documents[batch, key_index]
            score = torch.where(same, score, MASKED)
        return score

    compiled = query.is_cuda and not torch.compiler.is_compiling()
    attend: Any = compiled_flex_attention() if compiled else flex_attention
    grouped = query.shape[1] != key.shape[1]
    change = None if bias is None and documents is None else score_mod
    options = None
    if mask.tile is not None and query.is_cuda and query.element_size() == 2:
        options = {"BLOCK_M": mask.tile, "BLOCK_N": mask.tile}
    return attend(query, key, value, change, mask.blocks, scaling, grouped, kernel_options=options)


def range_biased_attention(
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    mask: RangeBias,
    scaling: float,
) -> Float[Tensor, "B H S D"]:
    """The range form. The rows lie end to end, without a copy, where slots come before heads in memory."""
    assert mask.bias is not None
    rows = len(query)
    query, key, value = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (query, key, value))
    output = range_attention(query, key, value, mask.ranges, scaling, mask.bias.flatten())
    return output[0].transpose(0, 1).unflatten(0, (rows, -1)).transpose(1, 2)


def ranges_serve(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the range form does: in 32 bits, products without tensor cores cost more than channels."""
    one_kind = query.dtype == key.dtype == value.dtype and query.shape[3] == value.shape[3]
    if query.element_size() != 2 or not one_kind:
        return False
    return serves(query.device.type, query.shape[3], query.shape[1] // key.shape[1], query.dtype)


def append_bias_channels(
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B G keys D"],
    value: Float[Tensor, "B G keys D"],
    bias: Float[Tensor, "B keys"],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value of the channel form, all of one width, a multiple of 8 as flash kernels want.

    b/scaling is split into three terms of the keys' precision, one channel each, so that the bias is as exact in bf16
    as in fp32. Scores keep the `scaling` of the original width; the output's last channels are zero.
    """
    width = 8 + -query.shape[-1] % 8
    rest, terms = (bias / scaling)[:, None, :, None], []
    for _ in range(3):
        terms.append(rest.to(key.dtype))
        rest = rest - terms[-1]
    channels = torch.cat(terms, dim=-1).expand(-1, key.shape[1], -1, -1)
    ones = torch.ones_like(query[..., :1]).expand(*query.shape[:-1], 3)
    return (
        F.pad(torch.cat((query, ones), dim=-1), (0, width - 3)),
        F.pad(torch.cat((key, channels), dim=-1), (0, width - 3)),
        F.pad(value, (0, width)),
    )


def biased_attention(
    attend: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B G keys D"],
    value: Float[Tensor, "B G keys D"],
    mask: KeyBias,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B S H D"], None]:
    """The mask's form; `attend`, of transformers' `AttentionInterface`, is the causal kernel under channels."""
    if isinstance(mask, FlexBias):
        return flex_biased_attention(query, key, value, mask, scaling).transpose(1, 2), None
    if isinstance(mask, RangeBias) and ranges_serve(query, key, value) and not dropout:
        return range_biased_attention(query, key, value, mask, scaling).transpose(1, 2), None
    assert mask.bias is not None
    width = value.shape[-1]
    query, key, value = append_bias_channels(query, key, value, mask.bias, scaling)
    output, _ = attend(module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs)
    return output[..., :width], None
