"""The bridge: cross-attention in both directions between two towers, at the layers that both have.

    ŷ = LayerNorm(y);   q = RMSNorm(Wq x),  k = RMSNorm(Wk ŷ),  v = Wv ŷ        (norms over the whole width)
    x ← x + scale · Wo softmax(R(p_x) q · (R(p_y) k)ᵀ / √d) v

x is the receiving stream, which is not normalised first, y the sending one. Both directions read the states from before
the exchange, so their order does not matter. `scale` is 1, or 0 for the clips of a batch whose bridge is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from jaxtyping import Float
from torch import Tensor, nn

from fathom.audiovideo.mova import Mova
from fathom.audiovideo.rotary import Table, clock_table, frame_positions, turn

EPS = 1e-6


class CrossAttention(nn.Module):
    """Attention of x on y, of two widths and one head_dim."""

    def __init__(self, width: int, other: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(other, width), nn.Linear(other, width)
        self.norm_q, self.norm_k = nn.RMSNorm(width, eps=EPS), nn.RMSNorm(width, eps=EPS)

    def forward(
        self, x: Float[Tensor, "B L D"], y: Float[Tensor, "B M K"], of_x: Table | None, of_y: Table | None
    ) -> Float[Tensor, "B L D"]:
        query, key, value = (
            states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for states in (self.norm_q(self.q(x)), self.norm_k(self.k(y)), self.v(y))
        )
        if of_x is not None and of_y is not None:
            query, key = turn(query, of_x), turn(key, of_y)
        read = F.scaled_dot_product_attention(query, key, value)
        return self.o(read.transpose(1, 2).flatten(2))


class FramePooling(nn.Module):
    """AdaLN of the audio states by the video: a learned query pools each frame, and pooled frames are interpolated in
    time to the audio tokens."""

    def __init__(self, width: int, other: int, head_dim: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, other))
        self.attention = CrossAttention(other, other, head_dim)
        self.norm = nn.LayerNorm(width, eps=EPS, elementwise_affine=False)
        self.linear = nn.Linear(other, 2 * width)

    def forward(self, x: Float[Tensor, "B L D"], y: Float[Tensor, "B M K"], frames: int) -> Float[Tensor, "B L D"]:
        of_frames = y.unflatten(1, (frames, -1)).flatten(0, 1)
        probe = self.probe.expand(len(of_frames), 1, -1).type_as(y)
        pooled = self.attention(probe, of_frames, None, None).view(len(y), frames, -1)
        pooled = F.interpolate(pooled.transpose(1, 2), size=x.shape[1], mode="linear").transpose(1, 2)
        shift, scale = self.linear(F.silu(pooled)).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class BridgeBlock(nn.Module):
    """One direction at one layer: what is added to x from y."""

    def __init__(self, width: int, other: int, head_dim: int, pooled: bool) -> None:
        super().__init__()
        self.y_norm = nn.LayerNorm(other, eps=EPS)
        self.inner = CrossAttention(width, other, head_dim)
        self.pooling = FramePooling(width, other, head_dim) if pooled else None

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        y: Float[Tensor, "B M K"],
        of_x: Table | None,
        of_y: Table | None,
        frames: int,
    ) -> Float[Tensor, "B L D"]:
        y = self.y_norm(y)
        if self.pooling is not None:
            x = self.pooling(x, y, frames)
        return self.inner(x, y, of_x, of_y)


Blocks = tuple[BridgeBlock | None, BridgeBlock | None]


class Bridge(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """All blocks of the bridge, named by the layer before which they exchange.

    Args:
        video_layers, audio_layers, video_width, audio_width, head_dim: of the towers.
        frame_rate: pictures per second.
        video_stride: pictures of a latent frame.
        audio_rate: audio latents per second.
        strategy, layers, directions, rotary, pooled_adaln, bridge_init: see `Mova`.
    """

    config: Any
    _no_split_modules = ("BridgeBlock",)
    _repeated_blocks = ("BridgeBlock",)
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        video_layers: int,
        audio_layers: int,
        video_width: int,
        audio_width: int,
        head_dim: int,
        frame_rate: float = 24.0,
        video_stride: int = 4,
        audio_rate: float = 50.0,
        strategy: str = "full",
        layers: Sequence[int] = Mova.layers,
        directions: str = "both",
        rotary: str = "aligned",
        pooled_adaln: bool = False,
        bridge_init: str = "default",
    ) -> None:
        super().__init__()
        for name, width in (("video_width", video_width), ("audio_width", audio_width)):
            if width % head_dim:
                raise ValueError(f"{name}={width}: must be a multiple of head_dim={head_dim}, which the towers share")
        if audio_layers > video_layers:
            raise ValueError(f"audio_layers={audio_layers}: at most video_layers={video_layers}; use fewer")
        method = Mova(
            strategy=strategy, layers=tuple(layers), directions=directions, rotary=rotary, pooled_adaln=pooled_adaln,
            bridge_init=bridge_init,
        )  # fmt: skip
        places = method.exchanges(audio_layers)
        self.audio_to_video_conditioners, self.video_to_audio_conditioners = nn.ModuleDict(), nn.ModuleDict()
        for layer in map(str, places):
            if directions in ("both", "a2v"):
                self.audio_to_video_conditioners[layer] = BridgeBlock(video_width, audio_width, head_dim, False)
            if directions in ("both", "v2a"):
                self.video_to_audio_conditioners[layer] = BridgeBlock(audio_width, video_width, head_dim, pooled_adaln)
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Initialise the probe of a pooling as N(0, 1)/√K, and with "zero_out" the output matrices as 0; all other
        layers keep PyTorch's own rule.
        """
        for block in self.modules():
            if isinstance(block, FramePooling):
                nn.init.normal_(block.probe, std=1 / math.sqrt(block.probe.shape[-1]))
            if isinstance(block, BridgeBlock) and self.config.bridge_init == "zero_out":
                nn.init.zeros_(block.inner.o.weight)
                nn.init.zeros_(block.inner.o.bias)

    def exchanges(self, layer: int) -> bool:
        """Whether the towers exchange before this layer."""
        return any(block is not None for block in self.blocks(layer))

    def blocks(self, layer: int) -> Blocks:
        """The blocks of the exchange before this layer, a→v and v→a; None where there is none."""
        to_video: Any = dict(self.audio_to_video_conditioners)
        to_audio: Any = dict(self.video_to_audio_conditioners)
        return to_video.get(str(layer)), to_audio.get(str(layer))

    def tables(
        self, frames: int, tokens: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Table | None, Table | None]:
        """Rotary tables of `tokens` video tokens in `frames` latent frames, and of `length` audio tokens."""
        if self.config.rotary == "none":
            return None, None
        positions = frame_positions(
            frames, self.config.rotary, self.config.video_stride, self.config.frame_rate, self.config.audio_rate, device
        )
        positions = positions.repeat_interleave(tokens // frames)
        of_audio = torch.arange(length, dtype=torch.float64, device=device)
        head_dim = self.config.head_dim
        return clock_table(positions, head_dim, dtype), clock_table(of_audio, head_dim, dtype)

    def forward(
        self,
        layer: int,
        video: Float[Tensor, "B L D"],
        audio: Float[Tensor, "B M K"],
        tables: tuple[Table | None, Table | None],
        frames: int,
        scale: Float[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B M K"]]:
        """The states of both towers after the exchange before `layer`. `scale`: of every clip; None is 1."""
        return exchange(self.blocks(layer), video, audio, tables, frames, scale)


def exchange(
    blocks: Blocks,
    video: Float[Tensor, "B L D"],
    audio: Float[Tensor, "B M K"],
    tables: tuple[Table | None, Table | None],
    frames: int,
    scale: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B M K"]]:
    """The states of both towers after these blocks, of which each reads what was there before. See `Bridge.forward`."""
    of_video, of_audio = tables
    received = []
    for block, x, y, of_x, of_y in (
        (blocks[0], video, audio, of_video, of_audio),
        (blocks[1], audio, video, of_audio, of_video),
    ):
        if block is not None:
            out = block(x, y, of_x, of_y, frames)
            x = x + (out if scale is None else scale.to(out.dtype)[:, None, None] * out)
        received.append(x)
    return received[0], received[1]
