"""Sparse-dLLM (arXiv 2508.02558): of the tokens outside the block, only those that its queries score highest are kept.

Once a block and layer, after `delay_steps` full passes, with q̄ the mean of the block's queries and g(h) the key head
of query head h:

    s_hj = q̄_h · k_g(h)j;   I_j = mean_h s_hj;   Ĩ = max-pool(I, kernel_size)        j outside the block
    kept = the ⌊keep_ratio · n⌋ of highest Ĩ among n;   later steps: K, V = [kept; fresh block]

All heads of a layer keep the same set. Among equal scores the earlier token stays. Pooling crosses the joint of prefix
and suffix unless `pool_across_seam` is false. Padding is never kept nor counted in n. The authors' code works for one
row.

On shifted models the block's first token is predicted by the column before it. `first_step` "official" reveals that
token, and it alone, in step 0; "extra_query" computes the column with the block, and keeps no other state of it.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.diffusion.base import BlockCache, BlockState, check_option
from fathom.diffusion.passes import Columns
from fathom.models.method import check_choice, check_range

SCORES = ("dot", "softmax", "snapkv", "nearest", "random")


@dataclasses.dataclass(frozen=True)
class SparseDLLM(BlockCache):
    """Keeps the keys and values outside the block that its queries score highest.

    keep_ratio: share of the tokens outside the block that a layer keeps, in [0, 1]; or one a layer.
    kernel_size: width of the max-pooling of scores, odd; None: no pooling.
    delay_steps: full passes of a block before the one that evicts.
    score: "dot", mean products with the block's mean query, as in the authors' code; "softmax", their softmax by head.
        Baselines: "snapkv", every query's own softmax; "nearest" to the block; "random".
    score_dtype: "float32" (or wider), or "model".
    pool_across_seam: pooling joins the last token before the block and the first after it.
    evict: "all", or "suffix", which keeps all tokens before the block.
    first_step: for shifted models, "official" or "extra_query".
    seed: of random scores.
    """

    keep_ratio: float | tuple[float, ...] = 0.5
    kernel_size: int | None = 3
    delay_steps: int = 1
    score: str = "dot"
    score_dtype: str = "float32"
    pool_across_seam: bool = True
    evict: str = "all"
    first_step: str = "official"
    seed: int = 0

    name = "sparse_dllm"
    paper = "2508.02558"
    summary = "Keep, outside the block, only the tokens that the block's queries score highest."
    equation = "kept = top ⌊r n⌋ of maxpool(mean_h q̄_h · k_j);  K, V = [kept; fresh block]"

    def __post_init__(self):
        ratios = self.keep_ratio if isinstance(self.keep_ratio, tuple | list) else (self.keep_ratio,)
        fine = bool(ratios) and all(0 <= ratio <= 1 for ratio in ratios)
        check_option(self.name, "keep_ratio", self.keep_ratio, fine, "between 0 and 1, or as many such as layers")
        if self.kernel_size is not None:
            check_range(self.name, "kernel_size", self.kernel_size, 1)
            fine = self.kernel_size % 2 == 1
            check_option(self.name, "kernel_size", self.kernel_size, fine, "odd, or None for no pooling")
        check_range(self.name, "delay_steps", self.delay_steps, 0)
        check_choice(self.name, "score", self.score, SCORES)
        check_choice(self.name, "score_dtype", self.score_dtype, ("float32", "model"))
        check_choice(self.name, "evict", self.evict, ("all", "suffix"))
        check_choice(self.name, "first_step", self.first_step, ("official", "extra_query"))

    def ratio(self, layer: int, layers: int) -> Fraction:
        """The kept ratio of a layer, counted pass·L + ℓ; exact, as 0.7 · 90 is 63."""
        ratios = self.keep_ratio
        return Fraction(str(ratios[layer % layers] if isinstance(ratios, tuple | list) else ratios))

    def check(self, block):
        if self.first_reveal(block, 0) and block.steps < 2:
            raise ValueError(
                f"first_step='official' with {block.steps} step a block: that step reveals one token, and others stay "
                "hidden; use more steps, or first_step='extra_query'"
            )

    def first_reveal(self, block, step):
        return block.shift and self.first_step == "official" and step == 0

    def new_state(self, passes):
        layers = passes.model.config.num_hidden_layers
        if isinstance(self.keep_ratio, tuple | list) and len(self.keep_ratio) != layers:
            raise ValueError(f"keep_ratio of {len(self.keep_ratio)} layers: the model has {layers}; give one a layer")
        return SparseState(self, passes)


@dataclasses.dataclass
class Kept:
    """The keys and values that a layer keeps, followed by room for the block's own; which of them are real (None: all),
    and their columns."""

    key: Float[Tensor, "R G m+n D"]
    value: Float[Tensor, "R G m+n D"]
    real: Bool[Tensor, "R m"] | None
    columns: Int[Tensor, "R m"]

    def alike(self, other: Kept) -> bool:
        """Whether the other has the same shapes."""
        return self.key.shape == other.key.shape and (self.real is None) == (other.real is None)

    def copy_(self, other: Kept) -> None:
        self.key.copy_(other.key)
        self.value.copy_(other.value)
        self.columns.copy_(other.columns)
        if self.real is not None:
            assert other.real is not None
            self.real.copy_(other.real)


class SparseState(BlockState):
    """Keys and values that were kept of the columns outside the block, layer by layer."""

    def __init__(self, method: SparseDLLM, passes: Any):
        super().__init__(method, passes)
        self.layers: list[Kept] = []

    def begin(self, block):
        self.block = block
        extra = block.shift and self.method.first_step == "extra_query"
        self.first = block.first if extra else block.start
        device = self.passes.real.device
        column = torch.arange(self.passes.length, device=device)
        self.outside = column[(column < self.first) | (column >= block.stop)]
        self.before = int(self.first)  # how many of them lie before the block
        self.real = self.passes.real[:, self.outside]
        self.sizes = self.real.sum(1).tolist()
        self.sizes_before = self.real[:, : self.before].sum(1).tolist()

    def states(self, canvas, hidden, step, quota):
        if step < self.method.delay_steps:
            return self.passes.full(canvas)
        if step == self.method.delay_steps:
            return self.passes.full(canvas, self.evict)
        columns = Columns.stretch(self.first, self.block.stop, len(canvas), canvas.device)
        return self.passes.run(canvas, columns, self.read, "block", fixed=True), columns

    def read(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values that a step of the block reads."""
        kept = self.layers[layer]
        size = kept.columns.shape[1]
        kept.key[:, :, size:], kept.value[:, :, size:] = key, value
        mask = None if kept.real is None else F.pad(kept.real, (0, query.shape[2]), value=True)[:, None, None]
        return kept.key, kept.value, mask

    def evict(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a full pass reads, that is everything; keeps the tokens that score highest."""
        ratio = self.method.ratio(layer, self.passes.model.config.num_hidden_layers)
        scores = self.scores(layer, query, key)
        if self.method.evict == "suffix":
            scores[:, : self.before] = torch.inf
            counts = [
                before + math.floor(ratio * (size - before))
                for size, before in zip(self.sizes, self.sizes_before, strict=True)
            ]
        else:
            counts = [math.floor(ratio * size) for size in self.sizes]
        scores = scores.masked_fill(~self.real, -torch.inf)
        most = max(counts)
        chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :most]
        columns = self.outside[chosen]
        real = None
        if min(counts) < most:
            real = torch.arange(most, device=chosen.device) < torch.tensor(counts, device=chosen.device)[:, None]
        index = columns[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        room = self.block.stop - self.first
        kept_key, kept_value = (F.pad(x.gather(2, index), (0, 0, 0, room)) for x in (key, value))
        self.keep(layer, Kept(kept_key, kept_value, real, columns))
        return key, value, self.passes.mask

    def keep(self, layer: int, new: Kept) -> None:
        """Keep new tensors, at the address of the last block's if they have the same shapes."""
        if layer == len(self.layers):
            self.layers.append(new)
        elif self.layers[layer].alike(new):
            self.layers[layer].copy_(new)
        else:
            self.layers[layer] = new
            self.passes.moved()

    def scores(
        self, layer: int, query: Float[Tensor, "R H L D"], key: Float[Tensor, "R G L D"]
    ) -> Float[Tensor, "R n"]:
        """Ĩ of the tokens outside the block."""
        method, rows = self.method, len(query)
        distance = torch.where(self.outside < self.first, self.first - self.outside, self.outside - self.block.stop + 1)
        if method.score == "nearest":
            return -distance.to(torch.float32).repeat(rows, 1)
        if method.score == "random":  # every row of a batch as alone: counted from the block, not from the padding
            generator = torch.Generator().manual_seed(method.seed + layer)
            noise = torch.rand(self.passes.length, 2, generator=generator).to(query.device)
            return noise[distance - 1, (self.outside >= self.block.stop).long()].repeat(rows, 1)
        if method.score_dtype == "float32":
            wide = torch.promote_types(query.dtype, torch.float32)
            query, key = query.to(wide), key.to(wide)
        query = query[:, :, self.block.start : self.block.stop].unflatten(1, (key.shape[1], -1))  # R G H/G n D
        key = key[:, :, self.outside]
        if method.score == "dot":
            # The mean over heads and queries is one product a key head.
            found = torch.einsum("rgd,rgjd->rj", query.mean((2, 3)), key) / key.shape[1]
        else:
            asked = query.mean(3, keepdim=True) if method.score == "softmax" else query
            products = torch.einsum("rghnd,rgjd->rghnj", asked, key) * query.shape[-1] ** -0.5
            products = products.masked_fill(~self.real[:, None, None, None], -torch.inf)
            found = products.softmax(-1).nan_to_num(0).mean((1, 2, 3))
        return self.pool(found.masked_fill(~self.real, -torch.inf))

    def pool(self, scores: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        width = self.method.kernel_size
        if width is None or width == 1 or not scores.shape[1]:
            return scores
        parts = [scores]
        if not self.method.pool_across_seam:
            parts = [part for part in scores.split([self.before, scores.shape[1] - self.before], dim=1) if part.numel()]
        return torch.cat([F.max_pool1d(part[:, None], width, 1, width // 2)[:, 0] for part in parts], dim=1)

    def nbytes(self):
        """Bytes of the kept keys and values, without the block's own."""
        return sum(
            x.numel() // x.shape[2] * kept.columns.shape[1] * x.element_size()
            for kept in self.layers
            for x in (kept.key, kept.value)
        )
