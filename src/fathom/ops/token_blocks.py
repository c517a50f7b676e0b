"""Block masks for slots that are not in the order of their tokens: a query sees the keys of tokens up to its own.

    slot q sees slot s   iff   first_q ≤ token_s ≤ token_q

FlexAttention skips a block of keys whose tokens all lie outside that range for all queries of the block, and computes
the rule only in blocks that it cuts. The extremes of a block tell which is which, so nothing of size queries × keys is
made.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def sees(
    query: Int[Tensor, "B S"], key: Int[Tensor, "B keys"], first: Int[Tensor, "B S"] | None = None
) -> Bool[Tensor, "B S keys"]:
    """The rule, written out: the reference."""
    visible = key[:, None] <= query[:, :, None]
    return visible if first is None else visible & (key[:, None] >= first[:, :, None])


def token_block_mask(
    query: Int[Tensor, "B S"], key: Int[Tensor, "B keys"], first: Int[Tensor, "B S"] | None = None
) -> BlockMask:
    """The rule as a block mask. `query`, `key`: token numbers of the slots; `first`: of every query's document."""
    start = torch.zeros_like(query) if first is None else first
    query_low, query_high = _extremes(query)
    key_low, key_high = _extremes(key)
    start_low, start_high = _extremes(start)
    some = (key_low[:, None] <= query_high[..., None]) & (key_high[:, None] >= start_low[..., None])
    every = (key_high[:, None] <= query_low[..., None]) & (key_low[:, None] >= start_high[..., None])
    if key.shape[1] % BLOCK:  # the last block holds keys that are not there
        every[..., -1] = False

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, s: Tensor) -> Tensor:
        visible = key[batch, s] <= query[batch, q]
        return visible if first is None else visible & (key[batch, s] >= first[batch, q])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(query.shape[1], key.shape[1]),
    )


def _extremes(tokens: Int[Tensor, "B S"]) -> tuple[Int[Tensor, "B blocks"], Int[Tensor, "B blocks"]]:
    """Smallest and largest of every block."""
    filling = tokens[:, -1:].expand(-1, -tokens.shape[1] % BLOCK)
    blocks = torch.cat((tokens, filling), dim=1).unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _listed(
    blocks: Bool[Tensor, "B queries keys"],
) -> tuple[Int[Tensor, "B 1 queries"], Int[Tensor, "B 1 queries keys"]]:
    """Per row of blocks: how many are chosen, and their numbers first."""
    order = (~blocks).to(torch.uint8).argsort(dim=-1, stable=True)
    return blocks.sum(-1).to(torch.int32)[:, None], order.to(torch.int32)[:, None]
