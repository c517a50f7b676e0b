"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys turn by an angle that grows with the position.

y = x · cos(n·ω) + rotate_half(x) · sin(n·ω)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from fathom.models.registry import register
from fathom.ops.rotary import signed, turn
from fathom.positions.base import Counts, Positions


@register("positions", "rotary")
class Rotary(Positions):
    """cos and sin of position · frequency, for every RoPE type that transformers supports for Llama.

    `rope_parameters` of the config name the type. The frequencies come from transformers' own initialisation functions;
    "dynamic" and "longrope" update them with the longest position seen.
    """

    summary = "Queries and keys turn by an angle that grows with the position."
    paper = "2104.09864"
    place: ClassVar[str] = "rotary_emb"

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.initial_frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def initial_frequencies(self) -> tuple[Tensor, float]:
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, None)
        width = int(self.config.head_dim * self.config.rope_parameters["partial_rotary_factor"])
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        return self.config.rope_parameters["rope_theta"] ** -exponent, 1.0

    def initialize_parameters(self) -> None:
        """The frequencies are in no checkpoint: made anew after a model was built without memory."""
        frequencies, self.attention_scaling = self.initial_frequencies()
        for name in ("inv_freq", "original_inv_freq"):
            getattr(self, name).copy_(frequencies)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """cos, sin: [B, T, rotary width], computed in fp32 (or float64 for a float64 model), returned in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(wide) * self.inv_freq.to(x.device, wide)
        angles = torch.cat((angles, angles), dim=-1)
        return (
            (angles.cos() * self.attention_scaling).to(x.dtype),
            (angles.sin() * self.attention_scaling).to(x.dtype),
        )

    def tables(self, x, position_ids):
        return self(x, position_ids)

    @staticmethod
    def rotate(options, tables, dtype, *states):
        cos, sin = tables[0], signed(tables[1])
        return tuple(None if x is None else turn(x, cos, sin, dtype) for x in states)

    @classmethod
    def turned_channels(cls, config, options):
        return int(config.head_dim * config.rope_parameters["partial_rotary_factor"])

    @classmethod
    def counts(cls, config, options) -> Counts:
        heads = config.num_attention_heads + config.num_key_value_heads
        return Counts(elementwise=config.num_hidden_layers * heads * 3 * cls.turned_channels(config, options))

    @classmethod
    def unsupported(cls, config, options):
        kinds = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind != "default"))
        rope = config.rope_parameters
        if rope["rope_type"] not in kinds:
            return f"rope_parameters={rope!r}: rope_type must be one of {', '.join(kinds)}"
        if not rope["rope_theta"] > 0:
            return f"rope_parameters={rope!r}: rope_theta must be positive"
        turned = int(config.head_dim * rope.get("partial_rotary_factor", config.partial_rotary_factor))
        if turned < 2 or turned % 2:
            return f"head_dim={config.head_dim}: rotary positions turn {turned} of its channels; use an even number"
        return None
