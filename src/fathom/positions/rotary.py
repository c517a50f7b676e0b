"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys turn by an angle that grows with the position.

y = x · cos(n·ω) + rotate_half(x) · sin(n·ω)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from fathom.models.registry import register
from fathom.ops.rotary import signed, turn
from fathom.positions.base import Counts, Positions


class InFloat64(TorchFunctionMode):
    """A mode in which calls of torch that ask for fp32, and quotients of integers, give float64. transformers builds
    rotary frequencies in fp32 only."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        out = (Tensor.double if func is Tensor.float else func)(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            out = func(*(x.double() if isinstance(x, Tensor) else x for x in args), **kwargs)
        return out


def yarn_by_turns(config: Any) -> tuple[Tensor, float]:
    """The frequencies of YaRN as RoPE++'s authors compute them, and its factor of cos and sin.

        ω ← (1−γ)·ω/s + γ·ω,   γ = clip((r − β_slow)/(β_fast − β_slow), 0, 1),   r = turns in the original positions

    The ramp is linear in r; transformers' "yarn" has it linear in the number of the pair. The factor is 0.1·ln s + 1.
    """
    rope = config.rope_parameters
    width = int(config.head_dim * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    slow, fast = rope.get("beta_slow", 1), rope.get("beta_fast", 32)
    turns = rope.get("original_max_position_embeddings", config.max_position_embeddings) * frequencies / (2 * math.pi)
    kept = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return (1 - kept) * frequencies / rope["factor"] + kept * frequencies, 0.1 * math.log(rope["factor"]) + 1


OWN_TYPES = {"yarn_by_turns": yarn_by_turns}  # beside transformers'


@register("positions", "rotary")
class Rotary(Positions):
    """cos and sin of position · frequency, for every RoPE type that transformers supports for Llama, and `OWN_TYPES`.

    `rope_parameters` of the config name the type. The frequencies come from transformers' own initialisation functions;
    "dynamic" and "longrope" update them with the longest position seen.
    """

    summary = "Queries and keys turn by an angle that grows with the position."
    equation = "q_n = R(n·ω) q,  k_m = R(m·ω) k,  so that q·k reads n − m"
    paper = "2104.09864"
    place: ClassVar[str] = "rotary_emb"

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: Any, options: Any):
        super().__init__(config, options)
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.initial_frequencies(torch.get_default_dtype())
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def initial_frequencies(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        """The frequencies in fp32, or in float64 for a float64 model; and the factor of cos and sin."""
        with InFloat64() if dtype == torch.float64 else contextlib.nullcontext():
            if self.rope_type in OWN_TYPES:
                return OWN_TYPES[self.rope_type](self.config)
            if self.rope_type != "default":
                return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, None)
            width = int(self.config.head_dim * self.config.rope_parameters["partial_rotary_factor"])
            exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
            return self.config.rope_parameters["rope_theta"] ** -exponent, 1.0

    @torch.no_grad()
    def initialize_parameters(self) -> None:
        """Make the frequencies, which are in no checkpoint, after the model was built on the meta device."""
        frequencies, self.attention_scaling = self.initial_frequencies(self.inv_freq.dtype)
        for name in ("inv_freq", "original_inv_freq"):
            getattr(self, name).copy_(frequencies)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """As for any module, except that a cast to float64 builds the frequencies anew instead of casting fp32 ones."""
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
        kinds = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind != "default"), *OWN_TYPES)
        rope = config.rope_parameters
        if rope["rope_type"] not in kinds:
            return f"rope_parameters={rope!r}: rope_type must be one of {', '.join(kinds)}"
        if not rope["rope_theta"] > 0:
            return f"rope_parameters={rope!r}: rope_theta must be positive"
        fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
        if rope["rope_type"] in OWN_TYPES and not (rope.get("factor", 0) >= 1 and fast > slow):
            return f"rope_parameters={rope!r}: needs a factor of at least 1, and beta_fast above beta_slow"
        turned = int(config.head_dim * rope.get("partial_rotary_factor", config.partial_rotary_factor))
        if turned < 2 or turned % 2:
            return f"head_dim={config.head_dim}: rotary positions turn {turned} of its channels; use an even number"
        return None
