"""Codecs, which turn pictures and sound into latents and back.

    frames [B, F, H, W, 3] ⇄ [B, C, 1 + (F − 1)/t, H/h, W/w]     the first latent is one picture, each other one is t
    waveform [B, n] ⇄ [B, C, ⌈n/hop⌉]                            filled with silence at its end

`PcaCodec` (pca_codecs.py) is in closed form; `NeuralCodec` is diffusers' `AutoencoderKLWan` with our DAC (dac.py). Both
give latents of mean 0 and variance 1 in every video channel, as the statistics that they hold say.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fathom.audiovideo.clips import Clip, fitted
from fathom.writing import write_json

CONFIG = "codec.json"


class ClipCodec(ABC):
    """Base of the codecs.

    Attributes:
        kind: of codec.json.
        frame_rate, sample_rate: of the clips that it was made for.
        video_strides: pictures of a latent frame, pixels of a latent row and column.
        audio_stride: samples of an audio latent.
        video_channels, audio_channels: of the latents.
    """

    kind: ClassVar[str]
    frame_rate: float
    sample_rate: int
    video_strides: tuple[int, int, int]
    audio_stride: int
    video_channels: int
    audio_channels: int

    def encode_video(self, frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B C f h w"]:
        """Latents of pictures. Raises ValueError where length or sides do not fit the strides, with the nearest."""
        check_frames(tuple(frames.shape), self.video_strides)
        return self._encode_video(frames)

    def encode_audio(self, waveform: Float[Tensor, "B n"]) -> Float[Tensor, "B C l"]:
        """Latents of sound, which is filled with silence to a multiple of the stride."""
        if waveform.ndim != 2 or not waveform.shape[1]:
            raise ValueError(f"waveform of shape {tuple(waveform.shape)}: give [B, samples], one channel")
        return self._encode_audio(torch.nn.functional.pad(waveform, (0, -waveform.shape[1] % self.audio_stride)))

    @abstractmethod
    def decode_video(self, latents: Float[Tensor, "B C f h w"]) -> UInt8[Tensor, "B F H W 3"]: ...

    @abstractmethod
    def decode_audio(self, latents: Float[Tensor, "B C l"]) -> Float[Tensor, "B n"]: ...

    @abstractmethod
    def _encode_video(self, frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B C f h w"]: ...

    @abstractmethod
    def _encode_audio(self, waveform: Float[Tensor, "B n"]) -> Float[Tensor, "B C l"]: ...

    def check_rates(self, clip: Clip) -> None:
        """Raise ValueError for a clip of other rates than the codec's."""
        for name in ("frame_rate", "sample_rate"):
            if abs(getattr(clip, name) - getattr(self, name)) > 1e-3:
                raise ValueError(
                    f"clip of {name}={getattr(clip, name):g}: the codec was made for {getattr(self, name):g}; resample "
                    f"the clip (read_clip(…, {name}={getattr(self, name):g})) or take another codec"
                )

    @torch.no_grad()
    def encode(self, clip: Clip) -> tuple[Float[Tensor, "C f h w"], Float[Tensor, "C l"]]:
        """Latents of a clip. Raises ValueError for another frame or sample rate."""
        self.check_rates(clip)
        return self.encode_video(torch.from_numpy(clip.frames)[None])[0], self.encode_audio(
            torch.from_numpy(clip.audio)[None]
        )[0]

    @torch.no_grad()
    def through(self, clip: Clip) -> Clip:
        """The clip encoded and decoded, which shows what the latents preserve."""
        video, audio = self.encode(clip)
        frames = self.decode_video(video[None])[0].cpu().numpy()
        samples = self.decode_audio(audio[None])[0].float().cpu().numpy()
        return dataclasses.replace(clip, frames=frames, audio=fitted(np.clip(samples, -1, 1), len(clip.audio)))

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights beside codec.json. `load_codec` reads them."""

    def _write_config(self, folder: Path) -> None:
        rates = {"frame_rate": self.frame_rate, "sample_rate": self.sample_rate}
        write_json(folder / CONFIG, {"kind": self.kind, **rates})


def check_frames(shape: tuple[int, ...], strides: tuple[int, int, int]) -> None:
    """Raise ValueError unless [B, F, H, W, 3] has F − 1, H and W in multiples of the strides."""
    if len(shape) != 5 or shape[-1] != 3:
        raise ValueError(f"frames of shape {shape}: give RGB pictures as [B, F, H, W, 3]")
    frames, *sides = shape[1:4]
    time, *space = strides
    if (frames - 1) % time:
        near = max(0, round((frames - 1) / time)) * time + 1
        raise ValueError(f"frames={frames}: must be 1 more than a multiple of {time}; the nearest is {near}")
    if any(side % stride for side, stride in zip(sides, space)):
        fitting = " × ".join(str(max(1, round(side / stride)) * stride) for side, stride in zip(sides, space))
        raise ValueError(
            f"pictures of {sides[0]} × {sides[1]}: sides must be multiples of {space[0]} and {space[1]}; the nearest "
            f"are {fitting}"
        )


def load_codec(folder: Path) -> ClipCodec:
    """The codec of a folder that `ClipCodec.save` wrote. Raises FileNotFoundError, and ValueError for an unknown kind.

    The kind is looked up in a table: nothing is imported by a name that a file says.
    """
    from fathom.audiovideo.pca_codecs import PcaCodec

    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder / CONFIG}: no such file; give the folder of a codec")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kinds: dict[str, Any] = {kind.kind: kind for kind in (PcaCodec, NeuralCodec)}
    kind = config.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"{folder / CONFIG}: kind={kind!r} is none of {', '.join(kinds)}")
    return kinds[kind].load(folder, config)


class NeuralCodec(ClipCodec):
    """diffusers' `AutoencoderKLWan` for pictures and `Dac` for sound; latents are modes, without noise.

    Video latents are normalised by the mean and deviation of the autoencoder's config, audio latents are not. Sound is
    coded in float32, under autocast too.
    """

    kind = "neural"

    def __init__(self, video: Any, audio: Any, frame_rate: float) -> None:
        self.video, self.audio = video.eval(), audio.eval()
        self.frame_rate, self.sample_rate = frame_rate, audio.config.sample_rate
        halvings = sum(video.config.temperal_downsample)
        space = 2 ** (len(video.config.dim_mult) - 1) * (video.config.patch_size or 1)
        self.video_strides = (2**halvings, space, space)
        self.audio_stride = audio.hop
        self.video_channels, self.audio_channels = video.config.z_dim, audio.config.latent_dim

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = self.video.config.latents_mean, self.video.config.latents_std
        return tuple(torch.tensor(values).to(like).view(1, -1, 1, 1, 1) for values in (mean, deviation))  # type: ignore

    def _encode_video(self, frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B C f h w"]:
        pictures = frames.to(self.video.device).permute(0, 4, 1, 2, 3).to(self.video.dtype) / 127.5 - 1
        latents = self.video.encode(pictures).latent_dist.mode()
        mean, deviation = self._statistics(latents)
        return (latents - mean) / deviation

    def decode_video(self, latents: Float[Tensor, "B C f h w"]) -> UInt8[Tensor, "B F H W 3"]:
        mean, deviation = self._statistics(latents)
        pictures = self.video.decode((latents * deviation + mean).to(self.video.dtype)).sample.float()
        return ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1)

    def _encode_audio(self, waveform: Float[Tensor, "B n"]) -> Float[Tensor, "B C l"]:
        return self.audio.encode(waveform.to(self.audio.device)[:, None])

    def decode_audio(self, latents: Float[Tensor, "B C l"]) -> Float[Tensor, "B n"]:
        return self.audio.decode(latents.to(self.audio.device))[:, 0]

    def save(self, folder: Path, halves: tuple[str, ...] = ("video", "audio")) -> None:
        """Write weights beside codec.json; of `halves` alone where another run writes the other."""
        for half in halves:
            getattr(self, half).save_pretrained(folder / f"{half}_vae")
        self._write_config(folder)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> NeuralCodec:
        from diffusers import AutoencoderKLWan

        from fathom.audiovideo.dac import Dac

        video = AutoencoderKLWan.from_pretrained(folder / "video_vae")
        return cls(video, Dac.from_pretrained(folder / "audio_vae"), config["frame_rate"])
