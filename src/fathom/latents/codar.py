"""CoDAR (arXiv 2603.02547): continuous diffusion, and an autoregressive decoder that reads its result.

The paper's body and code were not available. Choices that its abstract and first figure do not settle follow related
work (TEncDM, LD4LG, an independent survey), and every such choice is an option here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fathom.models.method import check_choice, check_range

CHOICES = {
    "source": ("states", "embeddings", "learned"),
    "bottleneck": ("none", "linear", "pca"),
    "normalisation": ("per_dim", "scalar", "l2"),
    "specials": ("replaced", "kept"),
    "process": ("vp", "rectified"),
    "schedule": ("tangent", "cosine", "linear", "sqrt"),
    "prediction": ("x0", "v", "eps"),
    "time": ("layer", "adaln"),
    "self_conditioning": ("add", "concat", "none"),
    "memory_positions": ("rotary", "learned", "none"),
    "padding": ("targets", "masked"),
}


@dataclasses.dataclass(frozen=True)
class CoDAR:
    """The method of a latent diffusion model; the sizes of its parts are fields of its config.

    Options:

    source: a token's vector: the encoder's "states" of the whole row, its input "embeddings", or "learned" ones.
    layer: of the encoder, after which states are taken; None: the last, after its final norm. A masked model's last
        states say little about their own token (docs/results/codar.md): take an early layer's.
    latent_dim: width of a vector; None: that of `source`. Smaller needs a bottleneck, or learned embeddings.
    bottleneck: to `latent_dim`: "pca", the directions of most variance, or "linear", random orthonormal ones; "none".
    normalisation: "per_dim": every dimension of the training set to mean 0, variance 1; "scalar": all by one mean and
        deviation; "l2": every vector to the length √latent_dim.
    specials: "replaced": vectors of special tokens are their input embeddings, scaled to mean 0 and variance 1, as
        their states lie far from all others; "kept": they are states.
    process: "vp": α² + σ² = 1; "rectified": α = 1 − t, σ = t.
    schedule: of "vp": "tangent", "cosine" (tangent with δ = 1), "linear" (β from 0.1 to 20), "sqrt".
    delta: δ of "tangent"; more is noisier.
    prediction: what the denoiser's output is: "x0", "eps", or "v": α·ε − σ·x₀, or ε − x₀ in the rectified process.
    time: how t reaches a layer: "layer", added to its input, or "adaln", scale, shift and gate of both halves.
    skips: outputs of the first half of the layers are added to the inputs of the second half, the last first.
    self_conditioning: how the estimate of the last step reaches the denoiser: "add", by a linear map for each layer;
        "concat", beside x_t; "none".
    ema: decay of the running mean of the denoiser's weights, which samples use; 0: none.
    memory_positions: how the decoder finds row i of the vectors: "rotary", keys rotated by i and queries by their own
        position; "learned", a table added to both; "none".
    diagonal: W·z_i is added to the decoder's input where token i is predicted.
    padding: "targets": vectors of padding are 0 and learned, so that length is generated; "masked": they are masked.
    """

    source: str = "states"
    layer: int | None = None
    latent_dim: int | None = None
    bottleneck: str = "none"
    normalisation: str = "per_dim"
    specials: str = "replaced"
    process: str = "vp"
    schedule: str = "tangent"
    delta: float = 9.0
    prediction: str = "x0"
    time: str = "layer"
    skips: bool = True
    self_conditioning: str = "add"
    ema: float = 0.9999
    memory_positions: str = "rotary"
    diagonal: bool = False
    padding: str = "targets"

    name = "codar"
    registry = "latents"
    paper = "2603.02547"
    summary = (
        "Diffusion over vectors of tokens; an autoregressive decoder reads the denoised vectors and writes the text."
    )
    equation = "x_t = α_t·norm(f(y)) + σ_t·ε;  x̂_0 = D(x_t, t);  p(y | x̂_0) = Π_i p(y_i | y_<i, x̂_0)"

    def __post_init__(self) -> None:
        for option, choices in CHOICES.items():
            check_choice("codar", option, getattr(self, option), choices)
        for option in ("layer", "latent_dim"):
            if getattr(self, option) is not None:
                check_range("codar", option, getattr(self, option), 1 if option == "latent_dim" else 0)
        if not 0 < self.delta < float("inf"):
            raise ValueError(f"codar option delta={self.delta!r}: must be above 0")
        if not 0 <= self.ema < 1:
            raise ValueError(f"codar option ema={self.ema!r}: must be at least 0 and below 1")
        if self.layer is not None and self.source != "states":
            raise ValueError(f"codar option layer={self.layer!r}: source={self.source!r} has no layers; leave it out")
        if self.source == "learned" and (self.bottleneck, self.normalisation) != ("none", "l2"):
            raise ValueError(
                f"codar option source='learned' with bottleneck={self.bottleneck!r} and normalisation="
                f"{self.normalisation!r}: embeddings that learn need fixed lengths; use 'none' and 'l2'"
            )
        if self.bottleneck != "none" and self.latent_dim is None:
            raise ValueError(f"codar option latent_dim=None: bottleneck={self.bottleneck!r} needs a width")


METHODS: dict[str, Any] = {CoDAR.name: CoDAR}
