"""The contextual decoder p(y_i | y_<i, z): the decoder's blocks, each with cross-attention to all vectors z of a row.

    x ← x + self_attention(norm x);   x ← x + cross_attention(norm x, memory);   x ← x + feed_forward(norm x)
    memory = W z;   keys and values of it are computed once, by `read`

Row i of the memory belongs to the prediction of token i; both count from 0, and the start token stands before the first
token. With `memory_positions="rotary"` keys are rotated by i and queries by their own position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fathom.latents.codar import CoDAR
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Block, make_norm
from fathom.models.registry import build_options, lookup


@dataclasses.dataclass(frozen=True)
class Memory:
    """The vectors in the form that the decoder's layers read.

    Attributes:
        layers: keys and values of every layer, each [B, G, L, D].
        mask: rows that are seen, [B, 1, 1, L]; None: all.
        added: what is added to the decoder's inputs, by row of the memory [B, L, d]; None: nothing.
        first: columns of padding before the first row of each text, [B].
    """

    layers: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    added: Float[Tensor, "B L d"] | None
    first: Int[Tensor, " B"]


class CrossAttention(nn.Module):
    """softmax(q kᵀ/√D) v W_o, with queries of the text and keys and values of the memory."""

    def __init__(self, config: FathomConfig, options: CoDAR):
        super().__init__()
        self.head_dim = config.head_dim
        self.placed = options.memory_positions
        method: Any = lookup("positions", config.positions["name"])
        self.rotate = functools.partial(method.rotate, build_options("positions", config.positions))
        wide, narrow = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_output_bias)
        self.o_proj.writes_residual = True  # type: ignore[assignment]  # models/initialization.py

    def heads(self, x: Tensor, tables: Any) -> Tensor:
        """x [B, T, H·D] as heads [B, H, T, D], rotated by position if there are tables."""
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.placed == "rotary" and tables is not None:
            (x,) = self.rotate(tables, x.dtype, x)
        return x

    def keys_values(self, states: Float[Tensor, "B L d"], tables: Any) -> tuple[Tensor, Tensor]:
        value = self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.heads(self.k_proj(states), tables).to(value.dtype), value

    def forward(self, x: Float[Tensor, "B T d"], key: Tensor, value: Tensor, mask: Any, tables: Any) -> Tensor:
        query = self.heads(self.q_proj(x), tables).to(value.dtype)
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class CrossBlock(Block):
    """A layer of the decoder with cross-attention between its halves; without a memory the ordinary layer."""

    def __init__(self, config: FathomConfig, layer_idx: int, options: CoDAR):
        super().__init__(config, layer_idx)
        self.cross_attn = CrossAttention(config, options)
        self.cross_layernorm = make_norm(config, config.hidden_size)

    def forward(self, stream, residual, tokens=None, memory=None, places=None, **attention_inputs):  # type: ignore[override]
        attended, *found = self.self_attn(hidden_states=self.input_layernorm(stream), **attention_inputs)
        stream = stream + self.drop(attended)
        if memory is not None:
            read = self.cross_layernorm(stream)
            read = read if places is None else read + places
            key, value = memory.layers[self.layer_idx]
            tables = attention_inputs["position_embeddings"]
            stream = stream + self.drop(self.cross_attn(read, key, value, memory.mask, tables))
        fed, auxiliary = self.feed_forward(stream, tokens)
        return stream + fed, *found, auxiliary


class ContextualDecoder(FathomForCausalLM):
    """The decoder. `read` makes a `Memory` from vectors; `forward`, and `generate` within `reading`, read it."""

    def __init__(self, config: FathomConfig, width: int, options: CoDAR):
        super().__init__(config)
        self.options = options
        self.memory: Memory | None = None
        self.model.layers = nn.ModuleList(
            CrossBlock(config, layer, options) for layer in range(config.num_hidden_layers)
        )
        self.project = nn.Linear(width, config.hidden_size)
        if options.memory_positions == "learned":
            self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if options.diagonal:
            self.diagonal = nn.Linear(width, config.hidden_size, bias=False)
        if options.memory_positions == "rotary" and config.positions["name"] != "rotary":
            raise ValueError(
                f"codar option memory_positions='rotary': the decoder has {config.positions['name']!r} positions; use "
                "'learned'"
            )
        self.post_init()

    def read(
        self,
        z: Float[Tensor, "B L k"],
        mask: Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
    ) -> Memory:
        """The memory of vectors: keys and values of all layers.

        mask: rows that are seen; positions count them from the first one on. position_ids: other positions.
        """
        z = z.to(self.project.weight.dtype)
        states = self.project(z)
        if position_ids is None:
            shape = (len(z), z.shape[1])
            start = z.new_zeros(len(z), dtype=torch.long) if mask is None else mask.int().argmax(1)
            position_ids = (torch.arange(shape[1], device=z.device) - start[:, None]).clamp(min=0)
        if self.options.memory_positions == "learned":
            states = states + self.places(position_ids)
        tables = self.model.positions.tables(states, position_ids)
        layers: Any = self.model.layers
        return Memory(
            [layer.cross_attn.keys_values(states, tables) for layer in layers],
            None if mask is None else mask[:, None, None],
            self.diagonal(z) if self.options.diagonal else None,
            z.new_zeros(len(z), dtype=torch.long) if mask is None else mask.int().argmax(1),
        )

    def forward(  # type: ignore[override]
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        memory: Memory | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As in FathomForCausalLM, given tokens and a memory; without a memory it is a plain language model.

        `input_ids` start with the start token; logits [:, i] predict token i.
        """
        memory = self.memory if memory is None else memory
        given: dict[str, Any] = {"input_ids": input_ids}
        if memory is not None:
            kwargs["memory"] = memory
            added, learned = memory.added, self.options.memory_positions == "learned"
            if added is not None or learned:
                assert input_ids is not None
                seen = 0 if (held := cache if cache is not None else past_key_values) is None else held.get_seq_length()
                places = self.places_of(input_ids, attention_mask, position_ids, seen)
                if learned:
                    kwargs["places"] = self.places(places)
                if added is not None:
                    row = (memory.first[:, None] + places).clamp(max=added.shape[1] - 1)
                    extra = added.gather(1, row[..., None].expand(-1, -1, added.shape[-1]))
                    given = {"inputs_embeds": self.model.embed_tokens(input_ids) + extra}
        return super().forward(
            attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values, cache=cache,
            logits_to_keep=logits_to_keep, **given, **kwargs,
        )  # fmt: skip

    def places_of(self, input_ids: Tensor, attention_mask: Any, position_ids: Any, seen: int) -> Int[Tensor, "B T"]:
        """The number of each new token in its text, as FathomForCausalLM counts them."""
        rows, length = input_ids.shape
        if position_ids is not None:
            return position_ids.expand(rows, -1)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        return (torch.arange(length, device=input_ids.device) + seen).expand(rows, -1)

    @contextlib.contextmanager
    def reading(self, memory: Memory | None) -> Iterator[None]:
        """A context in which forward and generate() read this memory."""
        before, self.memory = self.memory, memory
        try:
            yield
        finally:
            self.memory = before
