"""Codecs in closed form: principal components of patches of pictures and of windows of sound.

    z = P (x − m) / s,   x̂ = Pᵀ (z s) + m        P: the first C eigenvectors of the covariance of x, m its mean

x is a patch of 8 × 8 pixels of the first picture or of the next 4, or 160 samples. Fitting takes one pass over some
clips, and the codecs are good enough to show what a bridge does. They lose what the left-out components hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathom.audiovideo.clips import Clip
from fathom.audiovideo.codecs import ClipCodec, check_frames

TIME, SIDE = 4, 8  # pictures and pixels of a patch


class Basis:
    """The first components of vectors x: the rows of `components`, the mean of x, and the deviation of P x."""

    def __init__(self, components: Float[Tensor, "C d"], mean: Float[Tensor, " d"], scale: Float[Tensor, " C"]) -> None:
        self.components, self.mean, self.scale = components, mean, scale

    @classmethod
    def of(cls, moments: Moments, channels: int) -> Basis:
        mean, covariance = moments.finished()
        if channels > len(mean):
            raise ValueError(f"{channels} channels: vectors of {len(mean)} numbers have at most that many components")
        values, vectors = torch.linalg.eigh(covariance)
        components = vectors.flip(1)[:, :channels].T
        components = torch.where(components.sum(1, keepdim=True) < 0, -components, components)  # their sign is free
        # components that hold nothing are noise of the arithmetic: divided by little they would stay noise
        scale = values.flip(0)[:channels].clamp(min=1e-6 * float(values[-1])).sqrt()
        return cls(components.float().contiguous(), mean.float(), scale.float())

    def encode(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... C"]:
        return (x - self.mean) @ self.components.T / self.scale

    def decode(self, z: Float[Tensor, "... C"]) -> Float[Tensor, "... d"]:
        return (z * self.scale) @ self.components + self.mean


class Moments:
    """Mean and covariance of vectors that come in parts."""

    def __init__(self, width: int) -> None:
        self.count, self.total = 0, torch.zeros(width, dtype=torch.float64)
        self.products = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Float[Tensor, "n d"]) -> None:
        self.count += len(x)
        self.total += x.double().sum(0)
        self.products += (x.T @ x).double()  # of one clip: float32 is enough

    def finished(self) -> tuple[Tensor, Tensor]:
        mean = self.total / self.count
        return mean, self.products / self.count - torch.outer(mean, mean)


class PcaCodec(ClipCodec):
    """Principal components; `PcaCodec.fit(clips)` makes one."""

    kind = "pca"
    video_strides = (TIME, SIDE, SIDE)

    def __init__(self, first: Basis, later: Basis, audio: Basis, frame_rate: float, sample_rate: int) -> None:
        self.first, self.later, self.audio = first, later, audio
        self.frame_rate, self.sample_rate = frame_rate, sample_rate
        self.video_channels, self.audio_stride = len(first.scale), audio.components.shape[1]
        self.audio_channels = len(audio.scale)

    @classmethod
    def fit(
        cls, clips: Iterable[Clip], video_channels: int = 16, audio_channels: int = 32, audio_stride: int = 160
    ) -> PcaCodec:
        """Components of these clips, all of one rate. Raises ValueError for clips that do not fit, or none."""
        width = 3 * SIDE * SIDE
        first, later, audio = Moments(width), Moments(TIME * width), Moments(audio_stride)
        rates: tuple[float, int] | None = None
        for clip in clips:
            rates = rates or (clip.frame_rate, clip.sample_rate)
            if rates != (clip.frame_rate, clip.sample_rate):
                raise ValueError(f"clips of rates {rates} and {(clip.frame_rate, clip.sample_rate)}: fit on one rate")
            check_frames((1, *clip.frames.shape), cls.video_strides)
            pictures = _levels(torch.from_numpy(clip.frames)[None])
            first.add(_patches(pictures[:, :1]).flatten(0, -2))
            later.add(_patches(pictures[:, 1:]).flatten(0, -2))
            sound = torch.from_numpy(clip.audio)
            audio.add(torch.nn.functional.pad(sound, (0, -len(sound) % audio_stride)).view(-1, audio_stride))
        if rates is None:
            raise ValueError("clips: none given; components need some")
        bases = (Basis.of(first, video_channels), Basis.of(later, video_channels), Basis.of(audio, audio_channels))
        return cls(*bases, *rates)

    def _encode_video(self, frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B C f h w"]:
        pictures = _levels(frames)
        parts = [self.first.encode(_patches(pictures[:, :1]))]
        if frames.shape[1] > 1:
            parts.append(self.later.encode(_patches(pictures[:, 1:])))
        return torch.cat(parts, dim=1).permute(0, 4, 1, 2, 3)

    def decode_video(self, latents: Float[Tensor, "B C f h w"]) -> UInt8[Tensor, "B F H W 3"]:
        z = latents.float().permute(0, 2, 3, 4, 1)
        parts = [_pictures(self.first.decode(z[:, :1]), 1)]
        if z.shape[1] > 1:
            parts.append(_pictures(self.later.decode(z[:, 1:]), TIME))
        return ((torch.cat(parts, dim=1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def _encode_audio(self, waveform: Float[Tensor, "B n"]) -> Float[Tensor, "B C l"]:
        return self.audio.encode(waveform.float().unflatten(1, (-1, self.audio_stride))).transpose(1, 2)

    def decode_audio(self, latents: Float[Tensor, "B C l"]) -> Float[Tensor, "B n"]:
        return self.audio.decode(latents.float().transpose(1, 2)).flatten(1)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        bases = {"first": self.first, "later": self.later, "audio": self.audio}
        tensors = {f"{name}.{part}": getattr(basis, part) for name, basis in bases.items() for part in basis.__dict__}
        save_file(tensors, folder / "components.safetensors")
        self._write_config(folder)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> PcaCodec:
        tensors = load_file(folder / "components.safetensors")
        first, later, audio = (
            Basis(*(tensors[f"{name}.{part}"] for part in ("components", "mean", "scale")))
            for name in ("first", "later", "audio")
        )
        return cls(first, later, audio, config["frame_rate"], config["sample_rate"])


def _levels(frames: UInt8[Tensor, "B F H W 3"]) -> Float[Tensor, "B F H W 3"]:
    return frames.float() / 127.5 - 1


def _patches(pictures: Float[Tensor, "B F H W 3"]) -> Float[Tensor, "B f h w d"]:
    """Patches of one picture, or of TIME of them."""
    batch, frames, height, width, _ = pictures.shape
    time = 1 if frames == 1 else TIME
    cut = pictures.view(batch, frames // time, time, height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return cut.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4)


def _pictures(patches: Float[Tensor, "B f h w d"], time: int) -> Float[Tensor, "B F H W 3"]:
    batch, frames, rows, columns, _ = patches.shape
    cut = patches.view(batch, frames, rows, columns, time, SIDE, SIDE, 3).permute(0, 1, 4, 2, 5, 3, 6, 7)
    return cut.reshape(batch, frames * time, rows * SIDE, columns * SIDE, 3)
