"""A diffusers pipeline that makes a clip with sound from a caption and a first picture.

    z_v, z_a ~ N(0, 1);   for n: ṽ = guided(…), z ← z + ṽ (σ_{n+1} − σ_n), each modality with its own σ;   decode both

The expert of a step is chosen by σ_v. Without a picture the first frame is plain white, as MOVA makes clips of text
alone. `order="cascade"` is the baseline: the video first, by itself, then the sound of the finished video.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from fathom.audiovideo.base import audio_latents, latent_frames
from fathom.audiovideo.bridge import Bridge
from fathom.audiovideo.configuration import MovaConfig
from fathom.audiovideo.guidance import Branch, Pair, guided
from fathom.audiovideo.joint import condition, joint_forward, text_states
from fathom.audiovideo.scheduler import FlowMatchPairScheduler
from fathom.audiovideo.towers import AudioTower, VideoTower
from fathom.models.model_card import Published

PARTS: dict[str, Any] = {
    "video_dit": VideoTower,
    "video_dit_2": VideoTower,
    "audio_dit": AudioTower,
    "dual_tower_bridge": Bridge,
    "text_encoder": UMT5EncoderModel,
}
CODEC = "codec"
MIDDLE = 128  # of 0 … 255: what the pictures after the first are, before they are known
WHITE = 255


@dataclasses.dataclass
class MovaOutput:
    """Clips. Attributes:
    frames, audio: as pictures and samples, or latents where latents were asked for.
    frame_rate, sample_rate: per second; None of latents.
    """

    frames: UInt8[np.ndarray, "B F H W 3"] | Float[Tensor, "B C f h w"]
    audio: Float[np.ndarray, "B n"] | Float[Tensor, "B C l"]
    frame_rate: float
    sample_rate: int | None


def read_parts(folder: str | Path, dtype: torch.dtype | None = None) -> tuple[MovaConfig, dict[str, Any]]:
    """Config, towers, bridge and text encoder of a saved pipeline. What each is, its folder's name says."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; give the folder of a trained model, or see `read_release`")
    config: MovaConfig = MovaConfig.from_pretrained(folder)
    names = [name for name in PARTS if (folder / name).is_dir()]
    return config, {name: PARTS[name].from_pretrained(folder / name, torch_dtype=dtype).eval() for name in names}


class MovaPipeline(Published, DiffusionPipeline):
    """A pipeline that makes clips with sound.

    Args:
        video_dit, video_dit_2: experts for high and low noise; the second may be None.
        dual_tower_bridge: None: towers without an exchange.
        audio_dit, scheduler, tokenizer, text_encoder: the other parts, named as in the release.
        settings: sizes and rates; None: those of the parts, and the release's where parts have none.
        codec: between latents and pictures and sound (base.py); None: the pipeline makes only latents.
    """

    model_cpu_offload_seq = "text_encoder->video_dit->video_dit_2"
    # A step needs one expert, the audio tower and the bridge together; the chain above holds one part at a time.
    _exclude_from_cpu_offload = ("audio_dit", "dual_tower_bridge")
    _optional_components = ("video_dit_2", "dual_tower_bridge")

    def __init__(
        self,
        video_dit: VideoTower,
        audio_dit: AudioTower,
        scheduler: FlowMatchPairScheduler,
        tokenizer: Any,
        text_encoder: Any,
        dual_tower_bridge: Bridge | None = None,
        video_dit_2: VideoTower | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            video_dit=video_dit, video_dit_2=video_dit_2, audio_dit=audio_dit, dual_tower_bridge=dual_tower_bridge,
            scheduler=scheduler, tokenizer=tokenizer, text_encoder=text_encoder,
        )  # fmt: skip
        self.settings = settings_of(video_dit, audio_dit, dual_tower_bridge, video_dit_2)
        self.codec: Any = None

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype | None = None, **kwargs: Any) -> MovaPipeline:
        """The pipeline that `save_pretrained` wrote, with its codec if it has one."""
        folder = Path(folder)
        settings, parts = read_parts(folder, dtype)
        scheduler = FlowMatchPairScheduler.from_pretrained(folder / "scheduler")
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        made = cls(**{**parts, "scheduler": scheduler, "tokenizer": tokenizer, **kwargs})
        made.settings = settings
        settings.name_or_path = str(folder)  # where the facts of its training lie, which go on with its weights
        if (folder / CODEC).is_dir():
            from fathom.audiovideo.codecs import load_codec

            made.codec = load_codec(folder / CODEC)
        return made

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """A diffusers folder, with the settings as config.json and the codec in a folder of its own."""
        self.settings.save_pretrained(save_directory)
        if self.codec is not None:
            self.codec.save(Path(save_directory) / CODEC)
        super().save_pretrained(str(save_directory), *args, **kwargs)  # with the card, and last: it may upload all

    @property
    def card_config(self) -> MovaConfig:
        return self.settings

    @property
    def parameter_count(self) -> int:
        models = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
        return sum(weight.numel() for part in models for weight in part.parameters())

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str = "",
        image: UInt8[np.ndarray, "H W 3"] | Float[Tensor, "B C f h w"] | None = None,
        *,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        steps: int = 50,
        text_scale: float = 5.0,
        bridge_scale: float = 3.5,
        video_shift: float | None = None,
        audio_shift: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batched: bool = True,
        order: str = "joint",
        output: str = "clip",
    ) -> MovaOutput:
        """Clips from captions, one for each.

        Args:
            negative_prompt: the text that stands for ∅ in guidance.
            image: the first picture of every clip, of any size: it is cropped and resized. None: white. Or
                their latents (`first_latents`).
            frames, height, width: of a clip; None: the settings'.
            steps: Euler steps.
            text_scale, bridge_scale: s_T and s_B (guidance.py).
            video_shift, audio_shift: None: the scheduler's.
            generator: one a clip, so that a clip does not depend on the others of its batch; or one for all.
            batched: the branches of guidance are evaluated as one batch; False: in turn, with less memory.
            order: "joint", or "cascade" for models whose audio tower reads the video and not the reverse.
            output: "clip" or "latent".

        Raises ValueError for sizes that do not fit the codec's strides, with the nearest that do.
        """
        captions = [prompt] if isinstance(prompt, str) else list(prompt)
        made = {"frames": frames, "height": height, "width": width}
        made = {name: getattr(self.settings, name) if value is None else value for name, value in made.items()}
        settings = MovaConfig.from_dict({**self.settings.to_dict(), **made})
        for name, value, allowed in (("order", order, ("joint", "cascade")), ("output", output, ("clip", "latent"))):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
        if order == "cascade" and settings.method.directions != "v2a":
            raise ValueError(
                f"order='cascade': the model has directions={settings.method.directions!r}; it needs one trained with "
                "'v2a', whose video does not depend on its sound"
            )
        if self.codec is None and (image is not None or output == "clip"):
            raise ValueError("codec=None: a pipeline without a codec makes latents alone; use output='latent'")
        device = self._execution_device
        z_v, z_a = self._noise(len(captions), settings, generator, device)
        text, null = (self.encode_text(some, device) for some in (captions, [negative_prompt] * len(captions)))
        given = condition(self.encode_image(image, settings, len(captions)).to(device), settings.video_strides[0])
        self.scheduler.set_timesteps(steps, device, video_shift, audio_shift)
        scales = (text_scale, bridge_scale, batched)
        if order == "joint":
            for n, tau in enumerate(self.progress_bar(self.scheduler.timesteps.tolist())):
                found = self._velocity(z_v, z_a, given, text, null, tau, *scales)
                z_v, z_a = self.scheduler.step(found, n, (z_v, z_a))
        else:
            times = self.scheduler.timesteps.tolist()
            for n, (tau, _) in enumerate(self.progress_bar(times)):  # the sound is noise, which the video cannot see
                found = self._velocity(z_v, z_a, given, text, null, (tau, 1000.0), text_scale, 1.0, batched)
                z_v, _ = self.scheduler.step(found, n, (z_v, z_a))
            for n, (_, tau) in enumerate(self.progress_bar(times)):
                found = self._velocity(z_v, z_a, given, text, null, (0.0, tau), *scales)
                _, z_a = self.scheduler.step(found, n, (z_v, z_a))
        if output == "latent":
            return MovaOutput(z_v, z_a, settings.frame_rate, None)
        rate = self.codec.sample_rate
        place = self._codec_device()
        pictures = self.codec.decode_video(z_v.to(place)).cpu().numpy()
        samples = self.codec.decode_audio(z_a.to(place)).float().cpu().numpy()
        length = math.floor(Fraction(rate) * settings.frames / Fraction(settings.frame_rate).limit_denominator(100_000))
        return MovaOutput(pictures, np.clip(samples[:, :length], -1, 1), settings.frame_rate, rate)

    def _velocity(
        self,
        z_v: Tensor,
        z_a: Tensor,
        given: Tensor,
        text: Tensor,
        null: Tensor,
        tau: Sequence[float],
        text_scale: float,
        bridge_scale: float,
        batched: bool,
    ) -> Pair:
        """ṽ of both modalities at τ_v and τ_a."""
        clips, dtype = len(z_v), self.audio_dit.dtype
        tower = self.video_dit
        if self.video_dit_2 is not None and tau[0] < 1000 * self.settings.method.boundary:
            tower = self.video_dit_2
        conditioned = torch.cat([z_v, given.to(z_v)], dim=1)

        def evaluate(asked: tuple[Branch, ...]) -> list[Pair]:
            many = len(asked)
            states = torch.cat([text if branch.text else null for branch in asked])
            on = [branch.bridge for branch in asked]
            scale = None if all(on) else torch.tensor(on, dtype=dtype, device=z_v.device).repeat_interleave(clips)
            video, audio = joint_forward(
                tower,
                self.audio_dit,
                self.dual_tower_bridge if any(on) else None,
                conditioned.to(dtype).repeat(many, 1, 1, 1, 1),
                z_a.to(dtype).repeat(many, 1, 1),
                states.to(dtype),
                torch.full((many * clips,), tau[0], device=z_v.device),
                torch.full((many * clips,), tau[1], device=z_v.device),
                scale,
            )
            return list(zip(video.float().chunk(many), audio.float().chunk(many), strict=True))

        return guided(evaluate, text_scale, bridge_scale, batched)

    def _noise(self, clips: int, settings: MovaConfig, generator: Any, device: torch.device) -> Pair:
        """Noise of both modalities in fp32, clip after clip."""
        many = list(generator) if isinstance(generator, Sequence) else [generator] * clips
        if len(many) != clips:
            raise ValueError(f"generator: {len(many)} for {clips} clips; give one a clip, or one for all")
        channels, _, rows, columns = settings.video_shape
        time = latent_frames(settings.frames, settings.video_strides[0])
        length = audio_latents(settings.frames, settings.frame_rate, settings.audio_rate)
        shapes = ((channels, time, rows, columns), (settings.audio_channels, length))
        drawn = [
            [torch.randn(shape, generator=one, device="cpu" if one is None else one.device) for shape in shapes]
            for one in many
        ]
        video, audio = (torch.stack(parts).to(device) for parts in zip(*drawn, strict=True))
        return video, audio

    def encode_text(self, captions: Sequence[str], device: torch.device) -> Float[Tensor, "B T C"]:
        """States of captions, cut to the settings' length, zero after their end."""
        ids, mask = tokenized(self.tokenizer, captions, self.settings.text_length)
        return text_states(self.text_encoder, ids.to(device), mask.to(device))

    def encode_image(self, image: Any, settings: MovaConfig, clips: int) -> Float[Tensor, "B C f h w"]:
        """Latents of the first picture followed by nothing; without a codec, zeros."""
        if isinstance(image, Tensor):
            return image
        if self.codec is None:
            return torch.zeros(clips, *settings.video_shape)
        if image is None:
            image = np.full((settings.height, settings.width, 3), WHITE, np.uint8)
        picture = torch.from_numpy(fitted_picture(image, settings.height, settings.width))
        latents = first_latents(self.codec, picture[None], settings.frames, self._codec_device())
        return latents.expand(clips, *[-1] * 4)

    def _codec_device(self) -> torch.device:
        return getattr(getattr(self.codec, "video", None), "device", torch.device("cpu"))


def tokenized(tokenizer: Any, captions: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, length], each caption with its end token; the empty caption is the end token alone."""
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.full((len(captions), length), pad)
    mask = torch.zeros_like(ids)
    for row, caption in enumerate(captions):
        found = [*tokenizer(caption, add_special_tokens=False)["input_ids"][: length - 1], end]
        ids[row, : len(found)] = torch.tensor(found)
        mask[row, : len(found)] = 1
    return ids, mask


def first_latents(
    codec: Any, pictures: UInt8[Tensor, "B H W 3"], frames: int, device: torch.device | str = "cpu"
) -> Float[Tensor, "B C f h w"]:
    """Latents of clips that are their first picture and grey from then on."""
    clips = torch.full((len(pictures), frames, *pictures.shape[1:]), MIDDLE, dtype=torch.uint8)
    clips[:, 0] = pictures
    return codec.encode_video(clips.to(device)).float()


def fitted_picture(image: Any, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """A picture cropped around its centre to the proportions, and resized."""
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        image = np.asarray(image)
        if image.dtype != np.uint8:
            raise ValueError(f"image of {image.dtype}: give RGB as uint8, 0 … 255, or a PIL image")
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    upright = ImageOps.exif_transpose(picture)
    return np.array(ImageOps.fit(upright.convert("RGB"), (width, height), Image.Resampling.LANCZOS))


def settings_of(video: VideoTower, audio: AudioTower, bridge: Bridge | None, second: VideoTower | None) -> MovaConfig:
    """Sizes from the parts' configs, and the release's where these have none."""
    v, a = video.config, audio.config
    if bridge is None:
        rates: dict[str, Any] = {"video_strides": [v.in_channels - 2 * v.out_channels, 8, 8]}
        method: dict[str, Any] = {"directions": "off"}
    else:
        b = bridge.config
        rates = {"frame_rate": b.frame_rate, "video_strides": [b.video_stride, 8, 8], "audio_rate": b.audio_rate}
        method = {name: b[name] for name in ("strategy", "layers", "directions", "rotary", "pooled_adaln")}
    return MovaConfig(
        preset="mova-360p", video_layers=v.num_layers, video_heads=v.num_attention_heads, video_ffn=v.ffn_dim,
        audio_layers=a.num_layers, audio_heads=a.num_attention_heads, audio_ffn=a.ffn_dim,
        head_dim=v.attention_head_dim, video_channels=v.out_channels, audio_channels=a.out_channels,
        patch_size=list(v.patch_size), text_dim=v.text_dim, freq_dim=v.freq_dim,
        mova={**method, "experts": 1 if second is None else 2}, **rates,
    )  # fmt: skip
