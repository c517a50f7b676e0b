"""FoPE, Fourier position embedding (arXiv 2412.17739): every pair of channels turns by a short Fourier series.

    cos_p(n) = Σ_f C_fp cos(n·ω_f),   sin_p(n) = Σ_f S_fp sin(n·ω_f)          instead of cos(n·ω_p), sin(n·ω_p)
    y = x · cos(n) + rotate_half(x) · sin(n)

C and S are drawn near the identity, once for every key/value head and separately for sines and cosines, and are not
trained. A frequency that completes no period within the training length carries no information about positions there:
it is zeroed, and so are the pairs that it turned.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import initialization as init

from fathom.models.method import check_choice, check_number
from fathom.models.registry import register
from fathom.positions.rotary import Rotary


@register("positions", "fope")
class FoPE(Rotary):
    """Rotary positions whose pairs of channels mix all frequencies with a whole period in the training length."""

    summary = "Rotary positions whose pairs turn by a Fourier series of the frequencies that training sees a period of."
    equation = "y = x·Σ_f C_fp cos(n·ω_f) + rotate_half(x)·Σ_f S_fp sin(n·ω_f),  C, S near the identity"
    paper = "2412.17739"
    place = "position_method"  # caches that turn keys themselves look for rotary tables, and these are none
    variants = ({}, {"zeroed": "fill"})

    @dataclasses.dataclass(frozen=True)
    class Options:
        """zeroed: pairs of zeroed frequencies: "drop" leaves them unrotated (cos = 1, sin = 0), "fill" sets cos = 1 and
            sin = 1, as the authors' code pads them.
        gain: of the Xavier-normal numbers added to the identity.
        train_length: tokens of a training text; None: `max_position_embeddings`.
        """

        zeroed: str = "drop"
        gain: float = 0.3
        train_length: int | None = None

        def __post_init__(self):
            check_choice("fope", "zeroed", self.zeroed, ("drop", "fill"))
            check_number("fope", "gain", self.gain, 0.0)
            if self.train_length is not None and self.train_length < 1:
                raise ValueError(f"fope option train_length={self.train_length!r}: must be at least 1")

    cosines: Tensor
    sines: Tensor

    def __init__(self, config, options):
        super().__init__(config, options)
        self.kept = kept(config, options)
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(config.num_key_value_heads, self.kept, self.kept))

    @torch.no_grad()
    def initialize_parameters(self) -> None:
        super().initialize_parameters()
        for mixing in (self.cosines, self.sines):
            drawn = torch.eye(self.kept, dtype=mixing.dtype, device=mixing.device).repeat(len(mixing), 1, 1)
            std = self.options.gain * math.sqrt(2 / (2 * self.kept))  # Xavier: of a matrix, its two sides
            init.copy_(mixing, drawn + std * torch.randn(mixing.shape, dtype=mixing.dtype, device=mixing.device))

    def tables(self, x: Tensor, position_ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
        """The two series of every key/value head, [B, T, G, rotary width]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(wide) * self.inv_freq[: self.kept].to(x.device, wide)
        pairs = len(self.inv_freq)

        def series(waves: Tensor, mixing: Tensor, otherwise: float) -> Tensor:
            mixing, mixed = mixing.to(x.device, wide), waves.new_zeros(())
            for f in range(self.kept):  # wave by wave: all products at once would be `kept` tables
                mixed = torch.addcmul(mixed, waves[..., f, None, None], mixing[:, f])
            mixed = F.pad(mixed, (0, pairs - self.kept), value=otherwise)
            return (torch.cat((mixed, mixed), dim=-1) * self.attention_scaling).to(x.dtype)

        cos = series(angles.cos(), self.cosines, 1.0)
        return cos, series(angles.sin(), self.sines, float(self.options.zeroed == "fill"))

    @classmethod
    def unsupported(cls, config, options):
        reason = super().unsupported(config, options)
        if reason:
            return reason
        if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
            return (
                f"rope_type={config.rope_parameters['rope_type']!r} changes its frequencies with the text; which are "
                "zeroed is fixed: use another type"
            )
        if kept(config, options) < 1:
            length = options.train_length or config.max_position_embeddings
            return f"no frequency completes a period in train_length={length} positions; train on longer texts"
        return None


def kept(config, options: FoPE.Options) -> int:
    """The number of frequencies that complete a period within the training length; they fall from pair to pair."""
    rope = config.rope_parameters
    width = int(config.head_dim * rope.get("partial_rotary_factor", config.partial_rotary_factor))
    length = options.train_length or config.max_position_embeddings
    return sum(rope["rope_theta"] ** (-2 * pair / width) * length >= 2 * math.pi for pair in range(width // 2))
