"""The decoder: one pre-norm transformer for the GPT-2, GPT-NeoX, Llama and Qwen3 families.

Read it from the bottom up for one forward pass: `Stack` runs the layers for a depth method, `Block` is one layer,
`Attention` and a method of the `feed_forward` section its two halves. Shapes: B batch, T tokens, d hidden, H query
heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.decoding.versions import CACHE_NAME
from fathom.models.configuration import FathomConfig
from fathom.models.registry import build_options, lookup
from fathom.models.token_facts import TokenFacts
from fathom.ops.biased_attention import KeyBias, biased_attention
from fathom.ops.cached_attention import Newest, newest_attention
from fathom.ops.eager_attention import eager_attention
from fathom.ops.range_attention import ranged_attention
from fathom.ops.token_blocks import TokenRanges


def make_norm(config: FathomConfig, width: int) -> nn.Module:
    """The family's norm: RMSNorm  w·x/√(mean x² + ε)  or LayerNorm, statistics in fp32 or wider."""
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return nn.RMSNorm(width, eps=config.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention with optional QK-norm; queries and keys go through the config's `positions` method.

        q, k, v = x W_q, x W_k, x W_v;   softmax(q kᵀ/√D + mask) v W_o

    The module keeps transformers' contract (projection names, `layer_idx`, keyword arguments, cache,
    `AttentionInterface`) because adapters, KV-compression tools and attention backends hook it there.
    """

    def __init__(self, config: FathomConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        method: Any = lookup("positions", config.positions["name"])
        options = build_options("positions", config.positions)
        self.rotate = functools.partial(method.rotate, options)
        self.expand = functools.partial(method.expand, options)
        self.score_channels = config.score_channels
        self.num_key_value_groups = config.heads_seen // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.is_causal  # what backends read where a forward's mask is None
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        seen_width = config.heads_seen * config.head_dim
        self.o_proj = nn.Linear(seen_width, config.hidden_size, bias=config.attention_output_bias)
        self.o_proj.writes_residual = True  # type: ignore[assignment]  # initialization.py
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = make_norm(config, config.head_dim)
            self.k_norm = make_norm(config, config.head_dim)
        mixer: Any = lookup("mixer", config.mixer["name"])
        after = mixer.k_norm_after_rotation(build_options("mixer", config.mixer))
        self.k_norm_after_rotation = config.qk_norm and after

    def forward(
        self,
        hidden_states: Float[Tensor, "B T d"],
        position_embeddings: tuple[Tensor, ...] | None,
        attention_mask: Any,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        cache_layer: int | None = None,
        mixer: Any = None,
        sources: tuple[tuple[Tensor, ...], ...] = (),
        read: Callable[..., Any] | None = None,
        earlier: Any = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B T d"], Tensor | None, tuple[Tensor, ...] | None, Any]:
        """The output, the attention weights (from backends that compute them), this layer's mixer state, and what
        `read` keeps for later steps.

        `cache_layer` is the index in the cache, pass·L + layer_idx; `sources` are earlier layers' mixer states;
        `read(key, value, earlier)` joins the keys and values of earlier steps (models/steps/stack.py).
        """
        batch, length, _ = hidden_states.shape
        heads = (batch, length, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads)
        key = self.k_proj(hidden_states).view(heads)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if self.qk_norm:
            query = self.q_norm(query)
            key = key if self.k_norm_after_rotation else self.k_norm(key)
        asked = None if mixer is None else mixer.ask(query, sources)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        asked = None if asked is None else asked.transpose(1, 2)
        if position_embeddings is not None:
            query, key, asked = self.rotate(position_embeddings, value.dtype, query, key, asked)
        if self.k_norm_after_rotation:
            key = self.k_norm(key)
        # Under autocast norms and rotation leave fp32, which attention rounds anyway: kept wide, keys would double what
        # the cache and a mixer's backward pass hold.
        query, key = query.to(value.dtype), key.to(value.dtype)

        state = None
        if mixer is not None:  # between the rotation and the cache write, so the cache holds what attention reads
            asked = query if asked is None else asked
            key, value, state = mixer(asked, key, value, sources, layer=self.layer_idx)
        query, key = self.expand(position_embeddings, query, key)

        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx if cache_layer is None else cache_layer)

        next_kv = None
        if read is not None:
            key, value, next_kv = read(key, value, earlier)
        if self.score_channels:  # keys have them: kernels want values of the same width
            value = F.pad(value, (0, self.score_channels))

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if isinstance(attention_mask, KeyBias):
            attend = functools.partial(biased_attention, attend)
        elif isinstance(attention_mask, TokenRanges):
            attend = ranged_attention
        elif isinstance(attention_mask, Newest):
            attend = newest_attention
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        if self.score_channels:
            output = output[..., : self.head_dim]
        return self.o_proj(output.reshape(batch, length, -1)), weights, state, next_kv


class Block(GradientCheckpointingLayer):
    """One layer: attention and MLP, each reading from and writing to the residual topology.

    With the standard topology:  x ← x + attention(norm₁ x);  x ← x + mlp(norm₂ x)
    (parallel residual:          x ← x + attention(norm₁ x) + mlp(norm₂ x)).
    """

    def __init__(self, config: FathomConfig, layer_idx: int):
        super().__init__()
        self.parallel = config.parallel_residual
        self.residual_dropout = config.residual_dropout
        self.self_attn = Attention(config, layer_idx)
        feed_forward = lookup("feed_forward", config.feed_forward["name"])
        self.mlp = feed_forward(config, build_options("feed_forward", config.feed_forward))
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.layer_idx = layer_idx
        # As numbers that stand there, and not made in a forward: compiled, layers that do not read them are one graph.
        self.first, self.second = 2 * layer_idx, 2 * layer_idx + 1

    def forward(
        self, stream: Any, residual: Any, tokens: TokenFacts | None = None, **attention_inputs: Any
    ) -> tuple[Any, ...]:
        """The stream with the layer added; attention weights, mixer state and slots for later steps; and the
        feed-forward network's tensors by name.

        `stream` is the residual stream (a tensor under the standard topology); `tokens` are facts about the tokens for
        a feed-forward network that reads them.
        """
        x, carry = residual.read(stream, self.first)
        attended, *found = self.self_attn(hidden_states=self.input_layernorm(x), **attention_inputs)
        attended = self.drop(attended)
        if self.parallel:
            fed, auxiliary = self.feed_forward(x, tokens)
            return residual.write(stream, self.first, attended + fed, carry), *found, auxiliary
        stream = residual.write(stream, self.first, attended, carry)
        x, carry = residual.read(stream, self.second)
        fed, auxiliary = self.feed_forward(x, tokens)
        return residual.write(stream, self.second, fed, carry), *found, auxiliary

    def feed_forward(self, x: Tensor, tokens: TokenFacts | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output of the second half, from its norm to its dropout, and its tensors by name."""
        x = self.post_attention_layernorm(x)
        out = self.mlp(x) if tokens is None else self.mlp(x, tokens)
        out, auxiliary = out if isinstance(out, tuple) else (out, {})
        return self.drop(out), auxiliary

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.residual_dropout, self.training) if self.residual_dropout else x


class LayerGroup(nn.Module):
    """Consecutive layers as one function."""

    def __init__(self, layers: list[Block]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self, stream: Any, residual: Any, earlier: list[Any], *, weights: list[dict[str, Tensor]], **inputs: Any
    ) -> tuple[Any, list[Any], list[dict[str, Tensor]]]:
        """The stream, what `read` keeps of each layer (models/steps/stack.py), and the layers' tensors by name.

        weights: for each layer, tensors that replace its own parameters of these names.
        """
        next_kv, auxiliary = [], []
        for layer, slots, others in zip(self.layers, earlier, weights, strict=True):
            given = dict(inputs, earlier=slots)
            if others:
                stream, *_, kept, values = functional_call(layer, others, (stream, residual), given)
            else:
                stream, *_, kept, values = layer(stream, residual, **given)
            next_kv.append(kept)
            auxiliary.append(values)
        return stream, next_kv, auxiliary


class Decoder(nn.Module):
    """The parameters: input table, positions, layers, final norm, mixer and residual topology."""

    mixer: Any  # a Mixer or None
    residual: Any  # a ResidualTopology

    def __init__(self, config: FathomConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        positions: Any = lookup("positions", config.positions["name"])
        self.place, self.rotary_emb = positions.place, None  # caches look for rotary tables under this name
        setattr(self, self.place, positions(config, build_options("positions", config.positions)))
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)
        mixer = lookup("mixer", config.mixer["name"])
        self.mixer = mixer(config, build_options("mixer", config.mixer)) if config.mixer["name"] != "none" else None
        self.residual = lookup("residual", config.residual["name"])(config, build_options("residual", config.residual))

    @property
    def positions(self) -> Any:
        """The method of the `positions` section; checkpoints store it under another name."""
        return getattr(self, self.place)

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """embed_scale · W_in[x], without positions."""
        return self.scale(self.embed_tokens(input_ids))

    def scale(self, embeddings: Tensor) -> Tensor:
        return embeddings if self.config.embed_scale == 1.0 else embeddings * self.config.embed_scale


@torch.compiler.disable  # a number, by which the graph around it is chosen
def _largest(number: int, device: torch.device) -> int:
    """The largest of all processes' numbers."""
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest.item())


@dataclasses.dataclass
class Stack:
    """The layer stack with the positions, mask and cache of one forward; a depth method calls it pass by pass.

    All passes see the same positions and mask; pass r of layer ℓ has its own cache layer r·L + ℓ.
    """

    decoder: Decoder
    position_ids: Int[Tensor, "B T"]
    position_embeddings: tuple[Tensor, ...] | None
    attention_mask: Any
    cache: Cache | None = None
    layer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    hidden_states: list[Tensor] | None = None  # filled when asked for: the input of every layer executed
    attentions: list[Tensor | None] | None = None
    mixed: dict[int, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)  # mixer states by pass·L + layer
    slot_ids: Int[Tensor, "B T"] | None = None  # what backends read as positions where slots share a token's
    read: Callable[..., Any] | None = None  # joins the slots of earlier steps, `earlier` by layer (steps.py)
    earlier: list[Any] = dataclasses.field(default_factory=list)
    next_kv: list[Any] = dataclasses.field(default_factory=list)  # what it leaves for later steps, by layer
    groups: list[Callable[..., Any]] | None = None  # run instead of the decoder's layers: them, compiled by groups
    # What layers say beside their outputs, by name: a tensor for every layer that ran, in order.
    auxiliary: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)
    tokens: TokenFacts | None = None  # for feed-forward networks that read it
    targets: Int[Tensor, "B T"] | None = None  # what the tokens are to predict, −100 for nothing; None: unknown

    def __call__(self, embeddings: Float[Tensor, "B T d"], pass_index: int = 0) -> Float[Tensor, "B T d"]:
        """F(E) = norm(layers(E + positions)): one complete forward of the stack."""
        return self.normalize(self.layers(self.add_positions(embeddings), pass_index))

    def add_positions(self, embeddings: Tensor) -> Tensor:
        """The embeddings plus what positions add (rotary ones add nothing), then embedding dropout."""
        embeddings = self.decoder.positions.add(embeddings, self.position_ids)
        rate = self.decoder.config.embedding_dropout
        return F.dropout(embeddings, rate, self.decoder.training) if rate else embeddings

    def layers(self, hidden_states: Tensor, pass_index: int = 0) -> Tensor:
        """The output of the L layers, without input positions and final norm."""
        decoder = self.decoder
        residual, mixer = decoder.residual, decoder.mixer
        stream = residual.start(hidden_states)
        if self.groups is not None:
            return residual.finish(self.grouped(stream))
        for number, layer in enumerate(decoder.layers):
            index = pass_index * len(decoder.layers) + number
            if self.hidden_states is not None:
                self.hidden_states.append(residual.read(stream, 2 * number)[0])
            inputs = dict(self.layer_kwargs, cache_layer=index)
            if self.tokens is not None:
                inputs.update(tokens=self.tokens)
            if mixer is not None:
                inputs.update(mixer=mixer, sources=tuple(self.mixed[j] for j in mixer.source_layers(index)))
            if self.read is not None:
                inputs.update(read=self.read, earlier=self.earlier[number])
            stream, weights, state, next_kv, auxiliary = layer(
                stream,
                residual=residual,
                position_embeddings=self.position_embeddings,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids if self.slot_ids is None else self.slot_ids,
                **{CACHE_NAME: self.cache},
                **inputs,
            )
            if mixer is not None and mixer.is_source(index):
                self.mixed[index] = state
            if self.read is not None:
                self.next_kv.append(next_kv)
            if self.attentions is not None:
                self.attentions.append(weights)
            self.note(auxiliary)
        return residual.finish(stream)

    def grouped(self, stream: Any) -> Any:
        """The output of the layers as compiled groups, which return only the stream and what `read` keeps."""
        together = len(self.decoder.layers) // len(self.groups)  # type: ignore[arg-type]
        facts = {} if self.tokens is None else {"tokens": self.tokens}
        for number, group in enumerate(self.groups):  # type: ignore[arg-type]
            stream, next_kv, auxiliary = group(
                stream,
                self.decoder.residual,
                self.earlier[number * together : (number + 1) * together],
                position_embeddings=self.position_embeddings,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids if self.slot_ids is None else self.slot_ids,
                read=self.read,
                **facts,
                **self.layer_kwargs,
            )
            self.next_kv += next_kv
            for values in auxiliary:
                self.note(values)
        return stream

    def needed(self, number: int) -> int:
        """The number of calls of the layers that are needed, or whether another is: the one place where methods ask, if
        their data decides.

        It is the number itself, unless processes must call the layers equally often: sharded layers (FSDP2) gather
        their weights in every call, others sum up facts. Then it is the largest of all processes' numbers, and calls
        that only others need must change nothing here. All processes must ask equally often, too.
        """
        layer: Any = self.decoder.layers[0]
        if isinstance(layer, FSDPModule) or layer.mlp.communicates:
            return _largest(number, self.position_ids.device)
        return number

    def note(self, auxiliary: dict[str, Tensor]) -> None:
        """Keep the tensors by name that a layer returns beside its output."""
        for name, value in auxiliary.items():
            self.auxiliary.setdefault(name, []).append(value)

    def normalize(self, hidden_states: Tensor) -> Tensor:
        """The final norm."""
        return self.decoder.norm(hidden_states)
