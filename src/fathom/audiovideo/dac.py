"""The audio autoencoder of MOVA's release: a continuous DAC, with strides that may be odd.

    snake(x) = x + sin²(αx)/(α + 1e-9)
    unit(x)  = x + conv₁(snake(conv₇,dilated(snake(x))))
    encoder: conv₇ → for each stride s: 3 units (dilations 1, 3, 9), snake, conv of 2s taps, stride s → snake → conv₃
    (mean, log variance) = quant_conv(h);  latents are the mean
    decoder: the mirror image of the encoder after post_quant_conv, with output padding s mod 2, then tanh

n samples → ⌈n/hop⌉ latents → ⌈n/hop⌉ · hop samples, hop = Π s. Module names are the release's, whose files keep weights
as `weight_g` and `weight_v`; both those and today's names are read.

transformers' `DacModel` has no output padding, so strides 3 and 5 shorten the sound; diffusers' `AutoencoderOobleck`
keeps log α and has an extra β. Neither reads these weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

DILATIONS = (1, 3, 9)
LEAST, MOST = -30.0, 20.0  # of the log variance


class Snake(nn.Module):
    """x + sin²(αx)/(α + 1e-9), α per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Float[Tensor, "B C l"]) -> Float[Tensor, "B C l"]:
        return x + torch.sin(self.alpha * x).square() / (self.alpha + 1e-9)


_RELEASED = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}


def from_release(name: str) -> str:
    """Our name of a weight: `weight_g` and `weight_v` are the length and direction that weight norm keeps."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.{_RELEASED[last]}" if last in _RELEASED else name


def to_release(name: str) -> str:
    """The release's name of a weight."""
    return next((name.removesuffix(ours) + old for old, ours in _RELEASED.items() if name.endswith(f".{ours}")), name)


def _initialized(conv: Any) -> Any:
    nn.init.trunc_normal_(conv.weight, std=0.02)
    nn.init.zeros_(conv.bias)
    return weight_norm(conv)


def _conv(inner: int, outer: int, taps: int, **options: Any) -> nn.Conv1d:
    return _initialized(nn.Conv1d(inner, outer, taps, **options))


class ResidualUnit(nn.Module):
    """x + conv₁(snake(conv₇(snake(x)))), the wide convolution dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        wide = _conv(channels, channels, 7, dilation=dilation, padding=3 * dilation)
        self.block = nn.Sequential(Snake(channels), wide, Snake(channels), _conv(channels, channels, 1))

    def forward(self, x: Float[Tensor, "B C l"]) -> Float[Tensor, "B C l"]:
        return x + self.block(x)


class EncoderBlock(nn.Module):
    """Residual units, then a convolution that shortens by `stride` and widens."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        units = [ResidualUnit(channels, dilation) for dilation in DILATIONS]
        down = _conv(channels, 2 * channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2))
        self.block = nn.Sequential(*units, Snake(channels), down)

    def forward(self, x: Float[Tensor, "B C l"]) -> Float[Tensor, "B D m"]:
        return self.block(x)


class DecoderBlock(nn.Module):
    """A convolution that lengthens by `stride` and narrows, then residual units."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        up = nn.ConvTranspose1d(
            channels, channels // 2, 2 * stride, stride, padding=math.ceil(stride / 2), output_padding=stride % 2
        )
        units = [ResidualUnit(channels // 2, dilation) for dilation in DILATIONS]
        self.block = nn.Sequential(Snake(channels), _initialized(up), *units)

    def forward(self, x: Float[Tensor, "B C l"]) -> Float[Tensor, "B D m"]:
        return self.block(x)


class Encoder(nn.Module):
    """Sound [B, 1, n] to states [B, latent_dim, n / Π strides]."""

    def __init__(self, width: int, strides: tuple[int, ...], latent_dim: int) -> None:
        super().__init__()
        widths = [width * 2**n for n in range(len(strides) + 1)]
        blocks = [EncoderBlock(wide, stride) for wide, stride in zip(widths, strides)]
        last = [Snake(widths[-1]), _conv(widths[-1], latent_dim, 3, padding=1)]
        self.block = nn.Sequential(_conv(1, width, 7, padding=3), *blocks, *last)

    def forward(self, x: Float[Tensor, "B 1 n"]) -> Float[Tensor, "B C l"]:
        return self.block(x)


class Decoder(nn.Module):
    """Latents [B, latent_dim, n / Π strides] to sound [B, 1, n]."""

    def __init__(self, latent_dim: int, width: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        widths = [width // 2**n for n in range(len(strides) + 1)]
        blocks = [DecoderBlock(wide, stride) for wide, stride in zip(widths, strides)]
        last = [Snake(widths[-1]), _conv(widths[-1], 1, 7, padding=3), nn.Tanh()]
        self.model = nn.Sequential(_conv(latent_dim, width, 7, padding=3), *blocks, *last)

    def forward(self, x: Float[Tensor, "B C l"]) -> Float[Tensor, "B 1 n"]:
        return self.model(x)


class Dac(ModelMixin, ConfigMixin):  # type: ignore[misc]  # as diffusers' own models
    """The autoencoder. The defaults are the release's: 48 kHz, 50 latents per second.

    Options:
        encoder_dim: channels before the first stride, doubled by each.
        encoder_rates: strides of the encoder.
        latent_dim: channels of a latent.
        decoder_dim: channels after the decoder's first convolution, halved by each stride.
        decoder_rates: strides of the decoder, whose product is the encoder's.
        sample_rate: of the sound, in Hz.
    """

    @register_to_config
    def __init__(
        self,
        encoder_dim: int = 128,
        encoder_rates: tuple[int, ...] = (2, 3, 4, 5, 8),
        latent_dim: int = 128,
        decoder_dim: int = 2048,
        decoder_rates: tuple[int, ...] = (8, 5, 4, 3, 2),
        sample_rate: int = 48_000,
    ) -> None:
        super().__init__()
        self.hop = math.prod(encoder_rates)
        if math.prod(decoder_rates) != self.hop:
            raise ValueError(
                f"decoder_rates={tuple(decoder_rates)}: their product must be the encoder's, {self.hop}, such as "
                f"{tuple(reversed(encoder_rates))}"
            )
        if decoder_dim % 2 ** len(decoder_rates):
            raise ValueError(f"decoder_dim={decoder_dim}: must be a multiple of {2 ** len(decoder_rates)}")
        self.encoder = Encoder(encoder_dim, tuple(encoder_rates), latent_dim)
        self.quant_conv = nn.Conv1d(latent_dim, 2 * latent_dim, 1)
        self.post_quant_conv = nn.Conv1d(latent_dim, latent_dim, 1)
        self.decoder = Decoder(latent_dim, decoder_dim, tuple(decoder_rates))

    @classmethod
    def from_release(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Dac:
        """The autoencoder of a release's config and weights, under old names or today's.

        Raises ValueError for a field that the config lacks and for weights that are missing, too many or of another
        shape. What the config says beyond our options is about codebooks, which a continuous DAC has not.
        """
        fields = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        missing = [name for name in fields if name not in config]
        if missing:
            raise ValueError(f"config of the DAC: {missing[0]!r} is missing; it has {', '.join(config)}")
        model = cls(**{name: config[name] for name in fields})
        try:
            model.load_state_dict({from_release(name): weight for name, weight in weights.items()})
        except RuntimeError as error:
            raise ValueError(f"weights of the DAC do not fit its config: {error}") from error
        return model

    def released(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(config, weights) as a release has them."""
        config = {name: value for name, value in self.config.items() if not name.startswith("_")}
        return config, {to_release(name): weight for name, weight in self.state_dict().items()}

    def moments(self, waveform: Float[Tensor, "B 1 n"]) -> tuple[Float[Tensor, "B C l"], Float[Tensor, "B C l"]]:
        """Mean and log variance of the latents of sound, which is filled with silence to a multiple of the hop."""
        with torch.autocast(waveform.device.type, enabled=False):
            filled = nn.functional.pad(waveform.float(), (0, -waveform.shape[-1] % self.hop))
            mean, log_variance = self.quant_conv(self.encoder(filled)).chunk(2, dim=1)
        return mean, log_variance.clamp(LEAST, MOST)

    def encode(self, waveform: Float[Tensor, "B 1 n"]) -> Float[Tensor, "B C l"]:
        """The mode of the latents."""
        return self.moments(waveform)[0]

    def decode(self, latents: Float[Tensor, "B C l"]) -> Float[Tensor, "B 1 n"]:
        """Sound of l · hop samples."""
        with torch.autocast(latents.device.type, enabled=False):
            return self.decoder(self.post_quant_conv(latents.float()))

    def forward(self, waveform: Float[Tensor, "B 1 n"]) -> Float[Tensor, "B 1 m"]:
        return self.decode(self.encode(waveform))
