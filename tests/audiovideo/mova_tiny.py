"""A MOVA of seconds, with no weight at 0, and a batch for it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils import logging

from fathom.audiovideo import MovaConfig, MovaModel
from fathom.audiovideo.joint import make_parts

logging.set_verbosity_error()
SIZES: dict[str, Any] = {
    "preset": "tiny", "video_layers": 4, "audio_layers": 3, "audio_channels": 6, "video_channels": 4, "freq_dim": 32,
    "text_length": 6, "frames": 9, "height": 32, "width": 48,
}  # fmt: skip


def config(**mova: Any) -> MovaConfig:
    fields = {key: mova.pop(key) for key in tuple(mova) if key in MovaConfig.types() and key != "mova"}
    return MovaConfig(**{**SIZES, **fields}, mova=mova)


def filled(module: torch.nn.Module, seed: int = 0, std: float = 0.2) -> Any:
    """The module with every weight drawn anew, norms around 1: a head that starts at 0 would hide everything."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            around = 1.0 if name.split(".")[-2:-1] and "norm" in name.split(".")[-2] and "weight" in name else 0.0
            weight.copy_(around + std * torch.randn(weight.shape, generator=generator))
    return module.eval()


def parts(**mova: Any) -> tuple[MovaConfig, dict[str, Any]]:
    made = config(**mova)
    return made, {name: filled(part, seed) for seed, (name, part) in enumerate(make_parts(made).items())}


def model(**mova: Any) -> MovaModel:
    torch.manual_seed(0)
    made = MovaModel(config(**mova))
    for seed, (name, part) in enumerate(made.named_children()):
        if name != "text_encoder":
            filled(part, seed)
    return made


def batch(made: MovaConfig, clips: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """What MovaModel's forward takes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(clips, *shape, generator=generator)

    length = made.text_length
    ends = torch.arange(clips) % (length - 2) + 2
    null = torch.zeros(clips, length, dtype=torch.long)
    null[:, 0] = made.eos_token_id
    return {
        "video": normal(*made.video_shape),
        "audio": normal(*made.audio_shape),
        "first": normal(*made.video_shape),
        "input_ids": torch.randint(2, made.vocab_size, (clips, length), generator=generator),
        "attention_mask": (torch.arange(length) < ends[:, None]).long(),
        "null_ids": null,
        "null_mask": (torch.arange(length) < 1).long().expand(clips, -1),
        "video_noise": normal(*made.video_shape),
        "audio_noise": normal(*made.audio_shape),
        "uniform": torch.rand(clips, 4, generator=generator),
    }


def inputs(made: MovaConfig, clips: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """What joint_forward takes after the parts: video with its condition, audio, text, τ_v, τ_a."""
    generator = torch.Generator().manual_seed(seed)
    channels, *grid = made.video_shape
    video = torch.randn(clips, 2 * channels + made.video_strides[0], *grid, generator=generator)
    audio = torch.randn(clips, *made.audio_shape, generator=generator)
    text = torch.randn(clips, made.text_length, made.text_dim, generator=generator)
    text[:, 3:] = 0
    # small enough that a sinusoid made in fp32, as diffusers', is exact to 1e-6
    return video, audio, text, *(8 * torch.rand(2, clips, generator=generator))
