"""Fovea Transformer (arXiv 2311.07102): attention whose resolution falls with the distance, on LongT5's encoder.

    y_b = softmax(q_b K_bᵀ + bias) V_b,   K_b = own block and neighbours in full, then means of 2, 4, … tokens

The equation of the tree and of the choice of nodes is in ops/fovea_attention. Conventions are T5's: no scaling, and one
bias table, in the first layer, for all layers. Distances are counted in slots, so if block_len ≥
`relative_attention_max_distance`, all but direct neighbours get the bias of the farthest bucket.

The official code lets padding into the means of real tokens (`pool` "pairwise"), builds its lists in every forward, and
chooses nodes by the length of the batch; here a row's nodes depend on its own length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention

from fathom.encoders.base import Encoder
from fathom.models.method import check_choice, check_range
from fathom.models.registry import build_options, register
from fathom.ops.fovea_attention import Reads, fovea_attention, mean_nodes, reads


@register("encoder", "fovea")
class Fovea(Encoder):
    """Fine-to-coarse attention in every encoder layer; no parameters of its own."""

    summary = "Near blocks of keys in full, farther ones as means of 2, 4, 8, … tokens: N·log N keys."
    equation = "y_b = softmax(q_b K_bᵀ + bias) V_b,  K_b the nodes of block b in a tree of means"
    paper = "2311.07102"
    variants = ({"block_len": 8}, {"block_len": 8, "wing_size": 2, "boundary": "fill", "preserve_mass": True})
    hosts: ClassVar[tuple[str, ...]] = ("longt5",)

    @dataclasses.dataclass(frozen=True)
    class Options:
        """wing_size: w, nodes of every level on each side, at least 1.
        block_len: L, tokens of a block; even.
        stop_level: levels of the tree, at least 1; 1 is full attention.
        steps: "gradual" goes from level to level; "two", the control, from full resolution to the coarsest level.
        boundary: tokens at the ends that no whole node covers: "drop" leaves them unseen, "fill" covers them by
            smaller nodes.
        pool: "count" makes a node the mean of its real tokens; "pairwise", as in the official code, the mean of its two
            halves, padding included.
        preserve_mass: a mean of n tokens weighs as n tokens.
        """

        wing_size: int = 1
        block_len: int = 128
        stop_level: int = 20
        boundary: str = "drop"
        steps: str = "gradual"
        pool: str = "count"
        preserve_mass: bool = False

        def __post_init__(self):
            check_range("fovea", "wing_size", self.wing_size, 1)
            check_range("fovea", "block_len", self.block_len, 2)
            check_range("fovea", "stop_level", self.stop_level, 1)
            if self.block_len % 2:
                raise ValueError(f"fovea option block_len={self.block_len!r}: must be even, as nodes are halved")
            check_choice("fovea", "boundary", self.boundary, ("drop", "fill"))
            check_choice("fovea", "steps", self.steps, ("gradual", "two"))
            check_choice("fovea", "pool", self.pool, ("count", "pairwise"))

    def attention(self, config, has_relative_attention_bias):
        return FoveaAttention(config, has_relative_attention_bias)

    @classmethod
    def flops(cls, config, options, length):
        """FLOPs of the layers: scores and weighted values take 4·N·L·n̄·h·d each layer, n̄ the mean nodes
        of a block.
        """
        size = options.block_len
        blocks = -(-length // size)
        nodes = mean_nodes(blocks, options.wing_size, options.stop_level, options.boundary, options.steps)
        layer = config.layer_flops(length, 0) + 4 * blocks * size * size * nodes * config.inner
        return config.num_layers * layer


class FoveaAttention(LongT5LocalAttention):
    """LongT5's projections and bias table with fine-to-coarse attention between them."""

    def __init__(self, config: Any, has_relative_attention_bias: bool = False):
        super().__init__(config, has_relative_attention_bias=has_relative_attention_bias)
        options = dataclasses.asdict(build_options("encoder", config.encoder))
        self.attend: Any = functools.partial(fovea_attention, **options)
        self.lists: Any = functools.partial(
            reads, **{name: options[name] for name in ("block_len", "wing_size", "stop_level", "boundary", "steps")}
        )

    def bias_by_distance(self) -> Tensor:
        """The bias table read at every distance −D … D; beyond, all distances share the last bucket."""
        farthest = self.relative_attention_max_distance
        distance = torch.arange(-farthest, farthest + 1, device=self.relative_attention_bias.weight.device)
        bucket = self._relative_position_bucket(
            distance, num_buckets=self.relative_attention_num_buckets, max_distance=farthest
        )
        return self.relative_attention_bias(bucket).T

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: tuple[Tensor, Reads] | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Reads]]:
        """The output, and what the first layer makes for all layers: the bias by distance, and the lists of nodes.
        `mask` [B, N]."""
        if output_attentions:
            raise ValueError("output_attentions=True with encoder='fovea': weights are of means, not of tokens")
        if position_bias is None:
            real = None if mask is None else mask.bool()
            lists = self.lists(real, hidden_states.shape[1], hidden_states.device)
            position_bias = self.bias_by_distance(), lists
        heads = (*hidden_states.shape[:2], self.n_heads, self.key_value_proj_dim)
        query, key, value = (part(hidden_states).view(heads) for part in (self.q, self.k, self.v))
        bias, lists = position_bias
        out = self.attend(query, key, value, None, bias, lists=lists, dropout=self.dropout if self.training else 0.0)
        return self.o(out.flatten(2)), position_bias
