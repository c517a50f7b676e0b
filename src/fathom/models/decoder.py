"""The decoder: one pre-norm transformer for the GPT-2, GPT-NeoX, Llama and Qwen3 families.

Read it from the bottom up for one forward pass: `Stack` runs the layers for a depth method, `Block` is one layer,
`Attention` and `MLP` its two halves. Shapes: B batch, T tokens, d hidden, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.models.configuration import FathomConfig
from fathom.models.hf_versions import CACHE_NAME
from fathom.models.registry import build_options, lookup
from fathom.ops.biased_attention import KeyBias, biased_attention
from fathom.ops.eager_attention import eager_attention
from fathom.ops.rotary import signed, turn
from fathom.ops.token_blocks import TokenRanges, ranged_attention


def make_norm(config: FathomConfig, width: int) -> nn.Module:
    """The family's norm: RMSNorm  w·x/√(mean x² + ε)  or LayerNorm, statistics in fp32 or wider."""
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return nn.RMSNorm(width, eps=config.norm_eps)


class InFloat64(TorchFunctionMode):
    """Calls of torch in here that ask for fp32 get float64, and so do quotients of integers: transformers builds rotary
    frequencies in fp32 only."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        out = (Tensor.double if func is Tensor.float else func)(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            out = func(*(x.double() if isinstance(x, Tensor) else x for x in args), **kwargs)
        return out


class RotaryEmbedding(nn.Module):
    """cos and sin of position · frequency, for every RoPE type that transformers supports for Llama.

    The frequencies come from transformers' own initialisation functions; "dynamic" and "longrope" update them with the
    longest position seen.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: FathomConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.initial_frequencies(torch.get_default_dtype())
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def initial_frequencies(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Built in fp32, or in float64 for a float64 model; and the factor of cos and sin."""
        with InFloat64() if dtype == torch.float64 else contextlib.nullcontext():
            if self.rope_type != "default":
                return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, None)
            width = int(self.config.head_dim * self.config.rope_parameters["partial_rotary_factor"])
            exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
            return self.config.rope_parameters["rope_theta"] ** -exponent, 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """As of any module, but fp32 frequencies do not become float64 ones by a cast: those are built anew."""
        before = self.inv_freq.dtype
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != before and self.inv_freq.dtype in (torch.float32, torch.float64):
            inv_freq, self.attention_scaling = self.initial_frequencies(self.inv_freq.dtype)
            self.inv_freq = inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
            self.max_seq_len_cached = self.original_max_seq_len
            self.long_inv_freq = None
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """cos, sin: [B, T, rotary width], computed in fp32 (or float64 for a float64 model), returned in x's dtype."""
        if x.dtype == torch.float64:  # "dynamic" and "longrope" may build frequencies in here
            with InFloat64():
                return self.cos_sin(x, position_ids)
        return self.cos_sin(x, position_ids)

    @dynamic_rope_update
    def cos_sin(self, x: Tensor, position_ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(wide) * self.inv_freq.to(x.device, wide)
        angles = torch.cat((angles, angles), dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )


class Attention(nn.Module):
    """Grouped-query attention with optional QK-norm and rotary positions.

        q, k, v = x W_q, x W_k, x W_v;   softmax(q kᵀ/√D + mask) v W_o

    The module keeps transformers' contract (projection names, `layer_idx`, keyword arguments, cache,
    `AttentionInterface`) because adapters, KV-compression tools and attention backends hook it there.
    """

    def __init__(self, config: FathomConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_output_bias)
        self.o_proj.writes_residual = True  # type: ignore[assignment]  # initialization.py
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = make_norm(config, config.head_dim)
            self.k_norm = make_norm(config, config.head_dim)
        # Depth-Attention checkpoints normalise keys after the rotation (methods/depth_attention)
        self.k_norm_after_rotation = config.qk_norm and config.mixer.get("k_norm_position") == "post_rope"

    def forward(
        self,
        hidden_states: Float[Tensor, "B T d"],
        position_embeddings: tuple[Tensor, Tensor] | None,
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
        """Returns the output, the attention weights (backends that compute them), the mixer's state of this layer, and
        what `read` leaves for later steps.

        `cache_layer` is the index in the cache, pass·L + layer_idx; `sources` are earlier layers' mixer states;
        `read(key, value, earlier)` joins the keys and values of earlier steps (models/steps.py).
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
            cos, sin = position_embeddings[0], signed(position_embeddings[1])
            query, key = turn(query, cos, sin, value.dtype), turn(key, cos, sin, value.dtype)
            asked = None if asked is None else turn(asked, cos, sin, value.dtype)
        if self.k_norm_after_rotation:
            key = self.k_norm(key)
        # Under autocast norms and rotation leave fp32, which attention rounds anyway: kept wide, keys would double what
        # the cache and a mixer's backward pass hold.
        query, key = query.to(value.dtype), key.to(value.dtype)

        state = None
        if mixer is not None:  # between the rotation and the cache write, so the cache holds what attention reads
            asked = query if asked is None else asked
            key, value, state = mixer(asked, key, value, sources, layer=self.layer_idx)

        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx if cache_layer is None else cache_layer)

        left = None
        if read is not None:
            key, value, left = read(key, value, earlier)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if isinstance(attention_mask, KeyBias):
            attend = functools.partial(biased_attention, attend)
        elif isinstance(attention_mask, TokenRanges):
            attend = ranged_attention
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
        return self.o_proj(output.reshape(batch, length, -1)), weights, state, left


class MLP(nn.Module):
    """down(act(gate x) · up x) when gated, down(act(up x)) otherwise."""

    def __init__(self, config: FathomConfig):
        super().__init__()
        self.gated = config.gated_mlp
        if config.gated_mlp:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.down_proj.writes_residual = True  # type: ignore[assignment]  # initialization.py
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x) if self.gated else self.act_fn(self.up_proj(x))
        return self.down_proj(hidden)


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
        self.mlp = MLP(config)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.layer_idx = layer_idx

    def forward(self, stream: Any, residual: Any, **attention_inputs: Any) -> tuple[Any, ...]:
        """`stream` is the residual stream (a tensor under the standard topology). Returns it with the layer added, and
        attention's weights, mixer state and slots for later steps."""
        first, second = 2 * self.layer_idx, 2 * self.layer_idx + 1
        x, carry = residual.read(stream, first)
        attended, *found = self.self_attn(hidden_states=self.input_layernorm(x), **attention_inputs)
        attended = self.drop(attended)
        if self.parallel:
            both = attended + self.drop(self.mlp(self.post_attention_layernorm(x)))
            return residual.write(stream, first, both, carry), *found
        stream = residual.write(stream, first, attended, carry)
        x, carry = residual.read(stream, second)
        stream = residual.write(stream, second, self.drop(self.mlp(self.post_attention_layernorm(x))), carry)
        return stream, *found

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.residual_dropout, self.training) if self.residual_dropout else x


class LayerGroup(nn.Module):
    """Some layers in a row as one function."""

    def __init__(self, layers: list[Block]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self, stream: Any, residual: Any, earlier: list[Any], *, weights: list[dict[str, Tensor]], **inputs: Any
    ) -> tuple[Any, list[Any]]:
        """Returns the stream, and what `read` leaves of each layer (models/steps.py). `weights`: of each layer, what
        stands for its own of that name."""
        left = []
        for layer, slots, others in zip(self.layers, earlier, weights, strict=True):
            given = dict(inputs, earlier=slots)
            if others:
                stream, *_, kept = functional_call(layer, others, (stream, residual), given)
            else:
                stream, *_, kept = layer(stream, residual, **given)
            left.append(kept)
        return stream, left


class Decoder(nn.Module):
    """The parameters: input table, learned positions (GPT-2), layers, final norm, mixer and residual topology."""

    mixer: Any  # a Mixer or None
    residual: Any  # a ResidualTopology

    def __init__(self, config: FathomConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.rotary_emb = None
        else:
            self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)
        mixer = lookup("mixer", config.mixer["name"])
        self.mixer = mixer(config, build_options("mixer", config.mixer)) if config.mixer["name"] != "none" else None
        self.residual = lookup("residual", config.residual["name"])(config, build_options("residual", config.residual))

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """embed_scale · W_in[x], without positions."""
        return self.scale(self.embed_tokens(input_ids))

    def scale(self, embeddings: Tensor) -> Tensor:
        return embeddings if self.config.embed_scale == 1.0 else embeddings * self.config.embed_scale


@dataclasses.dataclass
class Stack:
    """The layer stack, bound to the positions, mask and cache of one forward: what a depth method calls, pass by pass.

    All passes see the same positions and mask; pass r of layer ℓ has its own cache layer r·L + ℓ.
    """

    decoder: Decoder
    position_ids: Int[Tensor, "B T"]
    position_embeddings: tuple[Tensor, Tensor] | None
    attention_mask: Any
    cache: Cache | None = None
    layer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    hidden_states: list[Tensor] | None = None  # filled when asked for: the input of every layer executed
    attentions: list[Tensor | None] | None = None
    mixed: dict[int, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)  # mixer states by pass·L + layer
    slot_ids: Int[Tensor, "B T"] | None = None  # what backends read as positions where slots share a token's
    read: Callable[..., Any] | None = None  # joins the slots of earlier steps, `earlier` by layer (steps.py)
    earlier: list[Any] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)  # what it leaves for later steps, by layer
    groups: list[Callable[..., Any]] | None = None  # run instead of the decoder's layers: them, compiled by groups
    targets: Int[Tensor, "B T"] | None = None  # what the tokens are to predict, −100 for nothing; None: unknown

    def __call__(self, embeddings: Float[Tensor, "B T d"], pass_index: int = 0) -> Float[Tensor, "B T d"]:
        """F(E) = norm(layers(E + positions)): one complete forward of the stack."""
        return self.normalize(self.layers(self.add_positions(embeddings), pass_index))

    def add_positions(self, embeddings: Tensor) -> Tensor:
        """Learned positions (GPT-2), then embedding dropout; rotary families add nothing here."""
        if self.decoder.rotary_emb is None:
            embeddings = embeddings + self.decoder.embed_positions(self.position_ids)
        rate = self.decoder.config.embedding_dropout
        return F.dropout(embeddings, rate, self.decoder.training) if rate else embeddings

    def layers(self, hidden_states: Tensor, pass_index: int = 0) -> Tensor:
        """The L layers, without input positions and final norm."""
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
            if mixer is not None:
                inputs.update(mixer=mixer, sources=tuple(self.mixed[j] for j in mixer.source_layers(index)))
            if self.read is not None:
                inputs.update(read=self.read, earlier=self.earlier[number])
            stream, weights, state, left = layer(
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
                self.kept.append(left)
            if self.attentions is not None:
                self.attentions.append(weights)
        return residual.finish(stream)

    def grouped(self, stream: Any) -> Any:
        """The layers by compiled groups; nothing of them is wanted but the stream and what `read` leaves."""
        together = len(self.decoder.layers) // len(self.groups)  # type: ignore[arg-type]
        for number, group in enumerate(self.groups):  # type: ignore[arg-type]
            stream, left = group(
                stream,
                self.decoder.residual,
                self.earlier[number * together : (number + 1) * together],
                position_embeddings=self.position_embeddings,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids if self.slot_ids is None else self.slot_ids,
                read=self.read,
                **self.layer_kwargs,
            )
            self.kept += left
        return stream

    def normalize(self, hidden_states: Tensor) -> Tensor:
        """The final norm."""
        return self.decoder.norm(hidden_states)
