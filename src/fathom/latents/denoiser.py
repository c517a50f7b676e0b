"""The denoiser D(x_t, t, x̂_prev): the decoder's blocks without a causal mask; every layer gets the time t.

    h = W_in x_t (+ positions);   τ = mlp(sin and cos of t)
    layer ℓ reads h + W_ℓ τ + S_ℓ x̂_prev + (second half) the output of layer L − 1 − ℓ

With `time="adaln"` τ instead scales, shifts and gates the two halves of a layer. Without an estimate of the last step
x̂_prev is zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from fathom.latents.codar import CoDAR
from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Block, make_norm
from fathom.models.initialization import initialize
from fathom.models.registry import build_options, lookup
from fathom.ops.visibility import BIDIRECTIONAL

FREQUENCIES = 128  # of the time's sines and cosines each
SCALE = 1000.0  # t counts as this many steps, which the frequencies were made for


class Denoiser(PreTrainedModel):
    """The map from vectors [B, L, k] at times t [B] to what the process predicts, [B, L, k]."""

    config_class = FathomConfig
    config: FathomConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FathomConfig, width: int, options: CoDAR):
        super().__init__(config)
        d, layers = config.hidden_size, config.num_hidden_layers
        self.width, self.options = width, options
        joined = 2 * width if options.self_conditioning == "concat" else width
        self.input = nn.Linear(joined, d)
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        parts = 6 if options.time == "adaln" else 1
        self.time_layers = nn.Linear(d, layers * parts * d)
        self.time_layers.starts_at_zero = options.time == "adaln"  # type: ignore[assignment]
        if options.self_conditioning == "add":
            self.previous = nn.Linear(width, layers * d, bias=False)
        positions: Any = lookup("positions", config.positions["name"])
        self.positions = positions(config, build_options("positions", config.positions))
        self.residual = lookup("residual", "standard")(config, build_options("residual", config.residual))
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(layers))
        self.norm = make_norm(config, d)
        self.output = nn.Linear(d, width)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)
        if getattr(module, "starts_at_zero", False):  # layers begin as if there were no gates: 1 + 0
            init.zeros_(module.weight)  # type: ignore[arg-type]

    def forward(
        self,
        x: Float[Tensor, "B L k"],
        t: Float[Tensor, " B"],
        previous: Float[Tensor, "B L k"] | None = None,
        mask: Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L k"]:
        """The prediction. mask: vectors that are no padding; positions count these, so left padding changes nothing."""
        config, options, count = self.config, self.options, len(self.layers)
        dtype = self.input.weight.dtype
        x = x.to(dtype)
        previous = None if previous is None else previous.to(dtype)
        if options.self_conditioning == "concat":
            x = torch.cat([x, torch.zeros_like(x) if previous is None else previous], dim=-1)
        h = self.input(x).to(dtype)  # under autocast the residual stream stays wide, as the decoder's does
        if position_ids is None:
            if mask is None:
                position_ids = torch.arange(x.shape[1], device=x.device)[None]
            else:
                position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
        h = self.positions.add(h, position_ids)
        times = self.time_layers(self.time(sines(t, dtype))).unflatten(-1, (count, -1))[:, None]
        added = None
        if options.self_conditioning == "add" and previous is not None:
            added = self.previous(previous).unflatten(-1, (count, -1))
        attention_mask = hf_versions.visible_mask(config, h, mask, None, None, BIDIRECTIONAL)
        inputs = {"position_embeddings": self.positions.tables(h, position_ids), "attention_mask": attention_mask}
        kept: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if options.skips and number >= count - count // 2:
                h = h + kept[count - 1 - number]
            if added is not None:
                h = h + added[:, :, number]
            if options.time == "layer":
                h = layer(h + times[:, :, number], residual=self.residual, **inputs)[0]
            else:
                h = modulated(layer, h, times[:, :, number], inputs)
            if options.skips and number < count // 2:
                kept.append(h)
        return self.output(self.norm(h))


def sines(t: Float[Tensor, " B"], dtype: torch.dtype) -> Float[Tensor, "B n"]:
    """cos and sin of 1000·t times frequencies from 1 to 1/10000, computed in fp32 or wider."""
    wide = torch.promote_types(t.dtype, torch.float32)
    steps = torch.arange(FREQUENCIES, device=t.device, dtype=wide) / FREQUENCIES
    angles = SCALE * t.to(wide)[:, None] * torch.exp(-math.log(10_000) * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def modulated(layer: Any, h: Float[Tensor, "B L d"], said: Float[Tensor, "B 1 6d"], inputs: dict[str, Any]) -> Tensor:
    """A layer under adaLN: each half reads (1 + scale)·norm(h) + shift, and its output times (1 + gate) is added."""
    scale, shift, gate, scale_ff, shift_ff, gate_ff = said.chunk(6, dim=-1)
    read = layer.input_layernorm(h) * (1 + scale) + shift
    h = h + (1 + gate) * layer.drop(layer.self_attn(hidden_states=read, **inputs)[0])
    read = layer.post_attention_layernorm(h) * (1 + scale_ff) + shift_ff
    return h + (1 + gate_ff) * layer.drop(layer.mlp(read))
