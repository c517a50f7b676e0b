"""The tree and attention over it with gathered nodes: obviously right, and as large as all scores."""

from __future__ import annotations

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fathom.ops.fovea_attention.nodes import Reads, levels_of


@dataclasses.dataclass(frozen=True)
class Tree:
    """Keys and values of all nodes, level after level.

    Attributes:
        key, value: [B, M, L, h, d].
        count: how many real tokens a vector stands for [B, M, L].
        offsets: where each level begins.
    """

    key: Float[Tensor, "B M L h d"]
    value: Float[Tensor, "B M L h d"]
    count: Float[Tensor, "B M L"]
    offsets: tuple[int, ...]


def grow(
    key: Float[Tensor, "B N h d"],
    value: Float[Tensor, "B N h d"],
    real: Bool[Tensor, "B N"],
    block_len: int,
    stop_level: int,
    pool: str,
) -> Tree:
    """The tree over N tokens, N a multiple of `block_len`.

    `pool` "count" is the mean of a node's real tokens. "pairwise" is the official code's: the mean of two halves,
    but for a half whose first channel is 0, taken for padding; a padding token of its own embedding counts as a token.
    """
    blocks = key.shape[1] // block_len
    counts = real.to(key.dtype)
    if pool == "count":
        key, value = key * counts[..., None, None], value * counts[..., None, None]
    keys, values, numbers = ([x.unflatten(1, (blocks, block_len))] for x in (key, value, counts))
    for level in range(1, levels_of(blocks, stop_level)):
        half = 2 ** (level - 1)

        def join(x: Tensor, half: int = half) -> Tensor:
            return torch.cat((x[:, :-half], x[:, half:]), dim=2)  # the halved nodes j and j + half side by side

        number = numbers[-1].unflatten(2, (-1, 2)).sum(3)
        numbers.append(join(number))
        for kept in (keys, values):
            pairs = kept[-1].unflatten(2, (-1, 2))
            total = pairs.sum(3)
            if pool == "pairwise":
                empty = pairs.flatten(4)[..., 0] == 0
                total = total / (2 - empty.sum(3) % 2).to(total.dtype)[..., None, None]
            kept.append(join(total))
    offsets = (0, *itertools.accumulate(x.shape[1] for x in keys[:-1]))
    count = torch.cat(numbers, dim=1)
    key, value = torch.cat(keys, dim=1), torch.cat(values, dim=1)
    if pool == "count":
        share = 1 / count.clamp(min=1)[..., None, None]
        key, value = key * share, value * share
    return Tree(key, value, count, offsets)


def fovea_attention(
    query: Float[Tensor, "B N h d"],
    key: Float[Tensor, "B N h d"],
    value: Float[Tensor, "B N h d"],
    bias: Float[Tensor, "h 2*D+1"],
    reads: Reads,
    *,
    block_len: int,
    stop_level: int,
    pool: str,
    preserve_mass: bool,
    dropout: float = 0.0,
) -> Float[Tensor, "B N h d"]:
    """The equation, over N tokens in whole blocks."""
    batch, length, heads, width = query.shape
    blocks = length // block_len
    real = torch.ones(batch, length, dtype=torch.bool, device=query.device) if reads.real is None else reads.real
    tree = grow(key, value, real.expand(batch, -1), block_len, stop_level, pool)
    starts = torch.tensor(tree.offsets, device=query.device)
    index = torch.where(reads.level < 0, -1, starts[reads.level.clamp(min=0)] + reads.start)
    slot = torch.arange(index.shape[2], device=query.device) - reads.own[..., None]

    def read(x: Tensor) -> Tensor:
        """x of every block's nodes: [B, S, n·L, …]."""
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        return x[rows, index.clamp(min=0)].flatten(2, 3)

    within = torch.arange(block_len, device=query.device)
    distance = (slot[..., None] * block_len + within).flatten(2)[:, :, None] - within[:, None]  # [R, S, L, n·L]
    farthest = bias.shape[1] // 2
    biases = bias[:, distance.clamp(-farthest, farthest) + farthest].movedim(0, 2)  # [R, S, h, L, n·L]
    scores = torch.einsum("bsqhd,bskhd->bshqk", query.unflatten(1, (blocks, block_len)), read(tree.key)) + biases
    count = read(tree.count) * (index >= 0).repeat_interleave(block_len, dim=2)
    if preserve_mass:
        scores = scores + count.clamp(min=1).log().to(scores.dtype)[:, :, None, None]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill((count == 0)[:, :, None, None], torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(-1), dropout).to(value.dtype)
    out = torch.einsum("bshqk,bskhd->bsqhd", weights, read(tree.value))
    return out.reshape(batch, length, heads, width)
