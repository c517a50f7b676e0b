"""The host's own encoder, every layer on every token: the baseline of the other methods."""

from __future__ import annotations

from typing import ClassVar

from fathom.encoders.base import Encoder
from fathom.models.registry import register


@register("encoder", "full")
class Full(Encoder):
    """BART's and the decoder's blocks with full attention; LongT5 with its own, which its config names."""

    summary = "The encoder as it is: all layers on all tokens."
    equation = "x ← layer_ℓ(x),  ℓ = 1 … L"
    hosts: ClassVar[tuple[str, ...]] = ("decoder", "bart", "longt5")

    @classmethod
    def flops(cls, config, options, length):
        return config.own_flops(length) if config.host == "longt5" else super().flops(config, options, length)
