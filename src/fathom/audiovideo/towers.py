"""The towers: diffusion transformers of Wan's blocks (diffusers), for video latents and for audio latents.

    s₁, k₁, g₁, s₂, k₂, g₂ = table + time
    x ← x + g₁ · SelfAttention(LN(x) (1 + k₁) + s₁)
    x ← x + CrossAttention(LN(x), text)
    x ← x + g₂ · FFN(LN(x) (1 + k₂) + s₂)

A tower is read in three parts, so that two of them can be run layer by layer side by side (joint.py): what comes before
the blocks, `blocks`, and the head. Without a `part` it runs alone. Parameters have diffusers' names: the weights of a
`WanTransformer3DModel` load into `VideoTower` as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding, WanTransformerBlock
from jaxtyping import Float
from torch import Tensor, nn

from fathom.audiovideo.rotary import Table, grid_table


@dataclasses.dataclass
class Stream:
    """A tower's states between its blocks.

    Attributes:
        hidden: of the tokens.
        text: states of the caption in the tower's width.
        time, modulation: of the noise level, for the head and for the blocks.
        rotary: of the tower's own attention.
        sizes: tokens along each axis: (frames, rows, columns) or (length,).
    """

    hidden: Float[Tensor, "B L D"]
    text: Float[Tensor, "B T D"]
    time: Float[Tensor, "B D"]
    modulation: Float[Tensor, "B 6 D"]
    rotary: Table
    sizes: tuple[int, ...]

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments of every block beside the states."""
        return self.text, self.modulation, self.rotary


class Tower(ModelMixin, ConfigMixin, PeftAdapterMixin, AttentionMixin):
    """Base of the towers. A subclass makes `patch_embedding` and defines the shape of its latents and patches."""

    config: Any
    _no_split_modules = ("WanTransformerBlock",)
    _repeated_blocks = ("WanTransformerBlock",)
    _supports_gradient_checkpointing = True
    _skip_layerwise_casting_patterns = ("patch_embedding", "condition_embedder", "norm")
    _keep_in_fp32_modules = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")

    def build(
        self, heads: int, head_dim: int, text_dim: int, freq_dim: int, ffn_dim: int, layers: int, eps: float, out: int
    ) -> None:
        """Makes everything but the patch embedding; `out`: numbers of a token that the head gives."""
        width = heads * head_dim
        self.condition_embedder = WanTimeTextImageEmbedding(
            dim=width, time_freq_dim=freq_dim, time_proj_dim=6 * width, text_embed_dim=text_dim
        )
        self.blocks = nn.ModuleList(
            WanTransformerBlock(width, ffn_dim, heads, "rms_norm_across_heads", True, eps) for _ in range(layers)
        )
        self.norm_out = FP32LayerNorm(width, eps, elementwise_affine=False)
        self.proj_out = nn.Linear(width, out)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, width) / math.sqrt(width))
        self.gradient_checkpointing = False
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Matrices Xavier-uniform, biases 0, matrices of time and text N(0, 0.02), the head 0; tables N(0, 1)/√D and
        norms 1, as they were made. A tower from scratch so begins by predicting 0."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv3d):
                if name.startswith(("condition_embedder.time_embedder", "condition_embedder.text_embedder")):
                    nn.init.normal_(module.weight, std=0.02)
                else:
                    nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # all have one
        nn.init.zeros_(self.proj_out.weight)

    def sizes(self, latents: Tensor) -> tuple[int, ...]:
        """Tokens along each axis of the latents."""
        raise NotImplementedError  # abstract

    def unpatchify(self, patches: Float[Tensor, "B L P"], sizes: tuple[int, ...]) -> Tensor:
        """Latents of what the head says of each token."""
        raise NotImplementedError  # abstract

    def forward(
        self,
        latents: Tensor | None = None,
        timestep: Float[Tensor, " B"] | None = None,
        text: Float[Tensor, "B T C"] | None = None,
        stream: Stream | None = None,
        part: str = "all",
    ) -> Any:
        """The velocity of noisy latents [B, C, …]; or with `part="begin"` the stream before the blocks, and with
        `part="end"` the velocity of a stream after them.

        Args:
            timestep: τ = 1000 σ of every clip.
            text: states of the caption. Those after its end must be zero; they are attended to.
        """
        if part == "end":
            assert stream is not None
            return self._end(stream)
        assert latents is not None and timestep is not None and text is not None
        sizes = self.sizes(latents)
        hidden = self.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
        time, modulation, context, _ = self.condition_embedder(timestep, text)
        rotary = grid_table(self.config.attention_head_dim, sizes, hidden.dtype, hidden.device)
        stream = Stream(hidden, context, time, modulation.unflatten(1, (6, -1)), rotary, sizes)
        if part == "begin":
            return stream
        for block in self.blocks:
            self.run(block, stream)
        return self._end(stream)

    def run(self, block: nn.Module, stream: Stream) -> None:
        """One block; its activations are computed again in the backward pass where checkpointing is on."""
        given = (stream.hidden, *stream.given)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            stream.hidden = self._gradient_checkpointing_func(block, *given)
        else:
            stream.hidden = block(*given)

    def _end(self, stream: Stream) -> Tensor:
        # [1, 2, D] + [B, 1, D]: without the new axis, two clips of a batch would take each other's shift and scale
        shift, scale = (self.scale_shift_table + stream.time[:, None]).chunk(2, dim=1)
        hidden = (self.norm_out(stream.hidden.float()) * (1 + scale) + shift).type_as(stream.hidden)
        return self.unpatchify(self.proj_out(hidden), stream.sizes)


class VideoTower(Tower):
    """A video expert. Its latents [B, in, frames, rows, columns] are the noisy ones, the mask and the first picture's;
    its velocity has `out_channels`."""

    @register_to_config
    def __init__(
        self,
        patch_size: Sequence[int] = (1, 2, 2),
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        in_channels: int = 36,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        patch: Any = tuple(patch_size)
        width = num_attention_heads * attention_head_dim
        self.patch_embedding = nn.Conv3d(in_channels, width, patch, patch)
        out = out_channels * math.prod(patch)
        self.build(num_attention_heads, attention_head_dim, text_dim, freq_dim, ffn_dim, num_layers, eps, out)

    def sizes(self, latents):
        for axis, size, patch in zip(("frames", "rows", "columns"), latents.shape[2:], self.config.patch_size):
            if size % patch:
                near = max(1, round(size / patch)) * patch
                raise ValueError(f"latents have {size} {axis}: must be a multiple of {patch}; the nearest is {near}")
        return tuple(size // patch for size, patch in zip(latents.shape[2:], self.config.patch_size))

    def unpatchify(self, patches, sizes):
        time, high, wide = self.config.patch_size
        x = patches.view(len(patches), *sizes, time, high, wide, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class AudioTower(Tower):
    """The audio tower, on latents [B, C, length]."""

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 128,
        out_channels: int = 128,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv1d(in_channels, num_attention_heads * attention_head_dim, 1)
        self.build(num_attention_heads, attention_head_dim, text_dim, freq_dim, ffn_dim, num_layers, eps, out_channels)

    def sizes(self, latents):
        return (latents.shape[2],)

    def unpatchify(self, patches, sizes):
        return patches.transpose(1, 2)
