"""The seam to codecs, which turn pixels and samples into the latents that the towers see; and counts of latents.

F pictures → 1 + (F − 1)/4 latent frames (the first is one picture alone);   n samples → ⌈n / hop⌉ latents
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Protocol

from jaxtyping import Float, UInt8
from torch import Tensor


class Codec(Protocol):
    """A codec: it turns pictures, sound or both into latents.

    Attributes:
        frame_rate, sample_rate: of the clips that it was made for.
        video_strides: pictures of a latent frame, pixels of a latent row and column.
        audio_stride: samples of an audio latent.
        video_channels, audio_channels: of the latents.
    """

    frame_rate: float
    sample_rate: int
    video_strides: tuple[int, int, int]
    audio_stride: int
    video_channels: int
    audio_channels: int

    def encode_video(self, frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B C f h w"]: ...
    def decode_video(self, latents: Float[Tensor, "B C f h w"]) -> UInt8[Tensor, "B F H W 3"]: ...
    def encode_audio(self, waveform: Float[Tensor, "B n"]) -> Float[Tensor, "B C l"]: ...
    def decode_audio(self, latents: Float[Tensor, "B C l"]) -> Float[Tensor, "B n"]: ...


def latent_frames(frames: int, stride: int) -> int:
    """The number of latent frames of a clip. Raises ValueError, with the nearest length, if `stride` does not divide
    frames − 1.
    """
    if frames < 1 or (frames - 1) % stride:
        near = max(0, round((frames - 1) / stride)) * stride + 1
        raise ValueError(f"frames={frames}: must be 1 more than a multiple of {stride}; the nearest is {near}")
    return 1 + (frames - 1) // stride


def audio_latents(frames: int, frame_rate: float, audio_rate: float) -> int:
    """The number of audio latents that last as long as `frames` pictures."""
    seconds = Fraction(frames) / Fraction(frame_rate).limit_denominator(100_000)
    return math.ceil(seconds * Fraction(audio_rate).limit_denominator(100_000))
