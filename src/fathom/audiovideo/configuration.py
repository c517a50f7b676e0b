"""Sizes of MOVA's parts, and presets of them. Light: imports neither diffusers nor a model."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import PreTrainedConfig

from fathom.audiovideo.mova import Mova

_SMALL = {"video_channels": 16, "patch_size": [1, 2, 2], "text_length": 32, "freq_dim": 256}
_RELEASE = {
    "video_layers": 40, "video_heads": 40, "video_ffn": 13824, "audio_layers": 30, "audio_heads": 12, "audio_ffn": 8960,
    "head_dim": 128, "video_channels": 16, "audio_channels": 128, "text_dim": 4096, "freq_dim": 256, "text_length": 512,
    "patch_size": [1, 2, 2], "frames": 193,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_SMALL, "video_layers": 3, "video_heads": 4, "video_ffn": 128, "audio_layers": 2, "audio_heads": 2,
        "audio_ffn": 64, "head_dim": 16, "audio_channels": 16, "text_dim": 32, "text_layers": 1,
    },
    "small": {
        **_SMALL, "video_layers": 8, "video_heads": 8, "video_ffn": 1024, "audio_layers": 6, "audio_heads": 4,
        "audio_ffn": 512, "head_dim": 32, "audio_channels": 32, "text_dim": 256,
    },
    "base": {
        **_SMALL, "video_layers": 16, "video_heads": 12, "video_ffn": 3072, "audio_layers": 12, "audio_heads": 6,
        "audio_ffn": 1536, "head_dim": 64, "audio_channels": 64, "text_dim": 768,
    },
    "mova-360p": {**_RELEASE, "height": 352, "width": 640},
    "mova-720p": {**_RELEASE, "height": 720, "width": 1280},
}  # fmt: skip


class MovaConfig(PreTrainedConfig):
    """Sizes of a MOVA model.

    Attributes:
        preset: "tiny", "small", "base", "mova-360p" or "mova-720p": defaults of all other fields.
        video_layers, video_heads, video_ffn: of each video expert, whose width is heads · head_dim.
        audio_layers, audio_heads, audio_ffn: of the audio tower.
        head_dim: of both, since they meet in the bridge.
        video_channels, audio_channels: of the latents.
        patch_size: latent frames, rows and columns of a video token.
        text_dim, text_length: width of the text encoder's states, and how many a caption has.
        text_layers: of the text encoder that a model from scratch has, UMT5 with random weights that stay as they are.
        vocab_size, pad_token_id, eos_token_id: of the text encoder.
        freq_dim: width of the embedding of a noise level.
        frame_rate: pictures per second.
        frames, height, width: of a clip, in pictures and pixels.
        video_strides: pictures of a latent frame, and pixels of a latent row and column. The first latent frame is one
            picture.
        audio_rate: audio latents per second.
        mova: the options of `Mova`, as a mapping.

    Raises:
        ValueError: more audio layers than video layers; an odd or too small head_dim; an unknown preset or option.
    """

    model_type = "fathom_mova"

    preset: str = "small"
    video_layers: Any = None
    video_heads: Any = None
    video_ffn: Any = None
    audio_layers: Any = None
    audio_heads: Any = None
    audio_ffn: Any = None
    head_dim: Any = None
    video_channels: Any = None
    audio_channels: Any = None
    patch_size: Any = None
    text_dim: Any = None
    text_length: Any = None
    text_layers: Any = None
    vocab_size: int = 256
    pad_token_id: Any = 0
    eos_token_id: Any = 1
    freq_dim: Any = None
    frame_rate: float = 24.0
    frames: Any = None
    height: Any = None
    width: Any = None
    video_strides: Any = None
    audio_rate: float = 50.0
    mova: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: must be one of {', '.join(map(repr, PRESETS))}")
        defaults = {"frames": 49, "height": 64, "width": 64, "text_layers": 2, "video_strides": [4, 8, 8]}
        for name, value in {**defaults, **PRESETS[self.preset]}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.patch_size, self.video_strides = list(self.patch_size), list(self.video_strides)
        method = Mova.from_section(self.mova)
        self.mova = method.to_section()
        if self.audio_layers > self.video_layers:
            raise ValueError(
                f"audio_layers={self.audio_layers}: at most video_layers={self.video_layers}, which they are paired "
                "with; use fewer"
            )
        if self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(f"head_dim={self.head_dim}: an even number of at least 6; the bridge turns pairs")
        method.exchanges(self.audio_layers)

    @property
    def method(self) -> Mova:
        return Mova.from_section(self.mova)

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers that reports show for a model."""
        return self.video_layers

    @property
    def video_width(self) -> int:
        return self.video_heads * self.head_dim

    @property
    def audio_width(self) -> int:
        return self.audio_heads * self.head_dim

    @property
    def video_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of a clip's video latents."""
        from fathom.audiovideo.base import latent_frames

        time, rows, columns = self.video_strides
        frames = latent_frames(self.frames, time)
        for name, size, stride in (("height", self.height, rows), ("width", self.width, columns)):
            step = stride * self.patch_size[1 if name == "height" else 2]
            if size % step:
                raise ValueError(f"{name}={size}: must be a multiple of {step}; the nearest is {nearest(size, step)}")
        return self.video_channels, frames, self.height // rows, self.width // columns

    @property
    def audio_shape(self) -> tuple[int, int]:
        """Channels and length of a clip's audio latents: ⌈seconds · audio_rate⌉."""
        from fathom.audiovideo.base import audio_latents

        return self.audio_channels, audio_latents(self.frames, self.frame_rate, self.audio_rate)

    @property
    def tokens(self) -> tuple[int, int]:
        """Video and audio tokens of a clip."""
        _, frames, rows, columns = self.video_shape
        time, high, wide = self.patch_size
        return frames // time * (rows // high) * (columns // wide), self.audio_shape[1]

    @classmethod
    def types(cls) -> dict[str, Any]:
        return inspect.get_annotations(cls, eval_str=False)


def nearest(size: int, step: int) -> int:
    """The multiple of `step` closest to `size`, at least one."""
    return max(1, round(size / step)) * step


@functools.cache
def fields() -> tuple[str, ...]:
    """The fields of a model that a recipe may set."""
    return tuple(MovaConfig.types())
