"""Masks for slots that are not in the order of their tokens: a query sees the keys of tokens up to its own.

    slot q sees slot s   iff   first_q ≤ token_s ≤ token_q

`token_block_mask`: FlexAttention skips a block of keys whose tokens all lie outside that range for all queries of the
block, and computes the rule only in blocks that it cuts. The extremes of a block tell which is which.
`token_ranges`: where keys come in segments, each in the order of its tokens, what a query sees of a segment is a range
of places, for the kernels of `range_attention`. Nothing of size queries × keys is made in either.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fathom.ops.visibility import CAUSAL

BLOCK = 128
RUN = 32  # keys whose readers are listed together
ROWS = 64  # queries times heads of a listed block, at most
NOWHERE = 2**30  # a number that no token, and a place that no key has


def sees(
    query: Int[Tensor, "B S"], key: Int[Tensor, "B keys"], first: Int[Tensor, "B S"] | None = None
) -> Bool[Tensor, "B S keys"]:
    """The rule, written out: the reference. It is the causal visibility of token numbers, within a document."""
    visible = CAUSAL(query[:, :, None], key[:, None])
    return visible if first is None else visible & (key[:, None] >= first[:, :, None])


def token_block_mask(
    query: Int[Tensor, "B S"], key: Int[Tensor, "B keys"], first: Int[Tensor, "B S"] | None = None
) -> BlockMask:
    """The rule as a block mask. `query`, `key`: token numbers of the slots; `first`: of every query's document."""
    query_low, query_high = _extremes(query)
    key_low, key_high = _extremes(key)
    some = key_low[:, None] <= query_high[..., None]
    every = key_high[:, None] <= query_low[..., None]
    if first is not None:
        first_low, first_high = _extremes(first)
        some &= key_high[:, None] >= first_low[..., None]
        every &= key_low[:, None] >= first_high[..., None]
    if key.shape[1] % BLOCK:  # the last block holds keys that are not there
        every[..., -1] = False

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, s: Tensor) -> Tensor:
        visible = key[batch, s] <= query[batch, q]
        return visible if first is None else visible & (key[batch, s] >= first[batch, q])

    some &= ~every
    by_key: tuple[Tensor | None, Tensor | None] = (None, None)
    full_by_key = by_key
    if torch.is_grad_enabled():  # the backward pass goes by key
        by_key, full_by_key = _listed(some.mT.contiguous()), _listed(every.mT.contiguous())  # kernels want it
    lengths = (query.shape[1], key.shape[1])
    return BlockMask(
        lengths, *_listed(some), *_listed(every), *by_key, *full_by_key, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod
    )


def _extremes(tokens: Int[Tensor, "B S"]) -> tuple[Int[Tensor, "B blocks"], Int[Tensor, "B blocks"]]:
    """Smallest and largest of every block."""
    if tokens.shape[1] % BLOCK:
        filling = tokens[:, -1:].expand(-1, -tokens.shape[1] % BLOCK)
        tokens = torch.cat((tokens, filling), dim=1)
    low, high = tokens.unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
    return low, high


def _listed(
    blocks: Bool[Tensor, "B rows columns"],
) -> tuple[Int[Tensor, "B 1 rows"], Int[Tensor, "B 1 rows columns"]]:
    """Per row of blocks: how many are chosen, and their numbers first."""
    order = (~blocks).to(torch.uint8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


@dataclasses.dataclass(frozen=True)
class TokenRanges:
    """The rule as ranges of places among the keys, int32.

    Attributes:
        start, stop: what each query sees of each segment.
        readers: of each run of `RUN` keys, by segment: the first query that sees its first key, the first that sees its
            last or a later one, and one after the last that sees its first and its last. None where no gradient is
            wanted.
        blocks: the first query, and the number, of each block of queries that a program takes. None: as many to each,
            from the last to the first.
    """

    start: Int[Tensor, "segments N"]
    stop: Int[Tensor, "segments N"]
    readers: Int[Tensor, "4 segments runs"] | None
    blocks: Int[Tensor, "2 blocks"] | None = None


def token_ranges(
    query: Int[Tensor, " N"], segments: list[Int[Tensor, " keys"]], first: Int[Tensor, " N"], most: int
) -> TokenRanges:
    """`query`, `first`, and each of the segments: token numbers that do not fall. `most`: rows of the result, empty
    ranges behind those of the segments, so that compiled graphs meet one shape."""
    bounds = torch.zeros(2, most, len(query), dtype=torch.int32, device=query.device)
    before = 0
    for number, segment in enumerate(segments):
        bounds[0, number] = torch.searchsorted(segment, first) + before
        bounds[1, number] = torch.searchsorted(segment, query, right=True) + before
        before += len(segment)
    start, stop = bounds
    if not torch.is_grad_enabled():
        return TokenRanges(start, stop, None)
    return TokenRanges(start, stop, readers_of(start, stop, before))


def places_seen(runs: Bool[Tensor, " tokens"], first: Int[Tensor, " tokens"], before: int) -> Int[Tensor, "2 tokens"]:
    """From where and to where each token sees those that run, from its `first` one to itself, `before` slots being
    before theirs."""
    until = runs.cumsum(0, dtype=torch.int32)
    return torch.stack(((until - runs.int()).index_select(0, first), until)) + before


def ranges_of_some(
    bounds: Int[Tensor, "2 segments tokens"],
    index: Int[Tensor, " N"],
    by_row: Int[Tensor, " B"],
    heads: int | None,
    apart: bool,
) -> tuple[Int[Tensor, "segments N"], Int[Tensor, "segments N"], Int[Tensor, "2 blocks"] | None]:
    """`TokenRanges` of queries of these tokens, without readers; those that are more than all rows have see nothing.

    Args:
        bounds: from where and to where each token sees each segment.
        by_row: how many of the tokens are of each row.
        heads: of a key/value head, for which blocks are listed; None: they are not.
        apart: queries of two rows do not share a block, as most of what one of them sees the other does not.
    """
    until = by_row.cumsum(0).clamp(max=len(index))  # more went on than was foreseen: nobody will read what these make
    by_row, total = until.diff(prepend=until.new_zeros(1)), until[-1:]
    query = torch.arange(len(index), device=index.device)
    live = query < total
    # ends must not fall, nor reach beyond what others see
    start, stop = bounds.index_select(2, index.index_select(0, torch.minimum(query, total - 1).clamp(min=0)))
    start = torch.where(live, start, NOWHERE)
    return start, stop, None if heads is None else listed_blocks(start, stop, heads, by_row if apart else total)


def listed_blocks(
    start: Int[Tensor, "segments N"], stop: Int[Tensor, "segments N"], heads: int, counts: Int[Tensor, " rows"]
) -> Int[Tensor, "2 blocks"]:
    """`TokenRanges.blocks`, for so many heads of a key/value head. `counts`: after how many queries a block ends, each
    time; those behind all these see nothing.

    Programs that begin last should be short, or most of the GPU waits for a few: rows of tokens end with their longest.
    """
    size, queries = ROWS // heads, start.shape[1]
    counts = torch.cat((counts, queries - counts.sum(0, keepdim=True)))
    number = (counts + (size - 1)) // size
    until, begin = number.cumsum(0), counts.cumsum(0) - counts
    block = torch.arange(queries // size + len(counts), device=start.device)  # those that are too many are empty
    row = torch.searchsorted(until, block, right=True).clamp(max=len(counts) - 1)
    before = (block - (until - number).index_select(0, row)) * size
    first = (begin.index_select(0, row) + before).clamp(max=queries - 1)
    count = (counts.index_select(0, row) - before).clamp(0, size)
    last = first + (count - 1).clamp(min=0)
    seen = (stop.index_select(1, last) - start.index_select(1, first)).clamp(min=0).sum(0, dtype=torch.int32)
    order = seen.masked_fill(count == 0, -1).argsort(descending=True)
    return torch.stack((first, count)).index_select(1, order).int()


def readers_of(
    start: Int[Tensor, "segments N"], stop: Int[Tensor, "segments N"], keys: int
) -> Int[Tensor, "4 segments runs"]:
    """`TokenRanges.readers`.

    Not to be compiled: what PyTorch 2.11 makes for GPUs searches a part of a larger tensor, as `stop` may be, from the
    whole's beginning (pytorch issue 182343).
    """
    run = torch.arange(0, keys, RUN, dtype=torch.int32, device=start.device).expand(len(start), -1).contiguous()
    last = run + (RUN - 1)
    ends = [torch.searchsorted(ends, key, right=True) for ends in (stop, start) for key in (run, last)]
    return torch.stack(ends).int()
