"""The vectors of a text: x₀ = norm(P f(y)), one for each token.

    f(y)      states of a frozen encoder that reads the whole row, its input embeddings, or embeddings that learn
    P         none, or k directions: those of most variance (pca), or random orthonormal ones (linear)
    norm(z)   (z − mean)/deviation, of each dimension or of all; or √k z/‖z‖ (l2)

Mean, deviation and directions are those of the training set (`fit`), kept with the weights. A vector of padding is 0.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoModel

from fathom.diffusion.likelihood import final_states
from fathom.latents.configuration import FathomLatentConfig
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig

LEAST = 1e-6  # a smaller deviation is of a dimension that says nothing


@dataclasses.dataclass(frozen=True)
class Latents:
    """Vectors of texts, and the norm that they were made with.

    Attributes:
        values: [B, L, k].
        mask: rows that are no padding, [B, L]; None: all.
        space: `LatentSpace.fingerprint` of the norm.
    """

    values: Float[Tensor, "B L k"]
    mask: Bool[Tensor, "B L"] | None
    space: int


def new_encoder(config: FathomLatentConfig) -> nn.Module:
    """The encoder with random weights: ours, or a stock one without its head."""
    made = config.encoder_config
    if isinstance(made, FathomConfig):
        from fathom.models.masked_diffusion import FathomForMaskedDiffusion

        kind = FathomForCausalLM if made.diffusion["name"] == "none" else FathomForMaskedDiffusion
        return kind(made)
    return AutoModel.from_config(made)


def tied_below(name: str, model: Any) -> dict[str, str]:
    """Tied weights of a transformers model, by their names in a module that holds the model as `name`.

    transformers looks for tied weights only in modules directly below a model.
    """
    return {f"{name}.{one}": f"{name}.{other}" for one, other in model.all_tied_weights_keys.items()}


class Reached(Exception):
    """Raised when the layer is reached whose input is wanted, so that later layers do not run."""


class Taken(list[Tensor]):
    """A list of layer inputs, as a stack records them, up to that of one layer."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer

    def append(self, state: Tensor) -> None:
        super().append(state)
        if len(self) > self.layer:
            raise Reached


class LatentSpace(nn.Module):
    """The frozen encoder, and the norm of its vectors. Only learned embeddings have weights that train."""

    mean: Tensor
    deviation: Tensor
    center: Tensor
    directions: Tensor
    fitted: Tensor

    def __init__(self, config: FathomLatentConfig):
        super().__init__()
        self.config, self.options = config, config.options
        width, k = config.source_width, config.latent_dim
        self.encoder = new_encoder(config).requires_grad_(False)
        self.all_tied_weights_keys = tied_below("encoder", self.encoder)
        if self.options.source == "learned":
            self.table = nn.Embedding(config.vocab_size, k)
        self.register_buffer("mean", torch.zeros(k))
        self.register_buffer("deviation", torch.ones(k))
        self.register_buffer("fitted", torch.tensor(self.options.source == "learned"))
        if self.options.bottleneck != "none":
            self.register_buffer("center", torch.zeros(width))
            self.register_buffer("directions", torch.zeros(width, k))

    @torch.no_grad()
    def initialize_parameters(self) -> None:
        """Set the norm to its values before it is fitted."""
        self.mean.zero_()
        self.deviation.fill_(1.0)
        self.fitted.fill_(self.options.source == "learned")

    def train(self, mode: bool = True) -> LatentSpace:
        """As in torch, but the frozen encoder stays in eval mode, without dropout."""
        super().train(mode)
        self.encoder.eval()
        return self

    def features(
        self, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None
    ) -> Float[Tensor, "B L d"]:
        """f(y). An unknown token is replaced by the mask token."""
        if self.options.source == "learned":
            return self.table(input_ids)
        with torch.no_grad():
            if self.options.source == "embeddings":
                return self.encoder.get_input_embeddings()(input_ids)  # type: ignore[operator]
            return self._states(input_ids, mask)

    def _states(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        layer: Any = self.options.layer
        given = None if mask is None else mask.long()
        encoder: Any = self.encoder
        if not isinstance(encoder, FathomForCausalLM):
            out = encoder(input_ids=input_ids, attention_mask=given, output_hidden_states=layer is not None)
            return out.last_hidden_state if layer is None else out.hidden_states[layer]
        if layer is None:
            return final_states(encoder, input_ids, given, None)
        embeddings = encoder.model.embed(input_ids)
        stack = encoder.bind_stack(embeddings, given, None, None, {"use_cache": False})
        stack.hidden_states = Taken(layer)
        try:
            return encoder.depth(stack, embeddings, encoder.vocabulary()).hidden_states  # after the last layer
        except Reached:
            return stack.hidden_states[layer]

    def projected(self, features: Float[Tensor, "*n d"]) -> Float[Tensor, "*n k"]:
        """P f, with f centred on the training set's mean."""
        if self.options.bottleneck == "none":
            return features
        return (features.to(self.center.dtype) - self.center) @ self.directions

    def normalise(self, z: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """norm(z)."""
        if self.options.normalisation == "l2":
            return F.normalize(z, dim=-1) * z.shape[-1] ** 0.5
        return (z - self.mean) / self.deviation

    def encode(self, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L k"]:
        """x₀ in fp32 or wider. Raises ValueError before the norm was fitted."""
        features = self.features(input_ids, mask)
        x = self.normalise(self.projected(features.to(torch.promote_types(features.dtype, torch.float32))))
        special = self.special(input_ids)
        if self.options.specials == "replaced" and self.options.source != "learned" and special.any():
            with torch.no_grad():
                own = self.projected(self.encoder.get_input_embeddings()(input_ids[special]).float())  # type: ignore[operator]
            x = x.clone()
            x[special] = F.layer_norm(own, own.shape[-1:]).to(x.dtype)
        return x if mask is None else x * mask[..., None]

    def special(self, input_ids: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
        tokens = torch.tensor(self.config.special_token_ids, device=input_ids.device, dtype=input_ids.dtype)
        return torch.isin(input_ids, tokens)

    @torch.no_grad()
    def fit(self, batches: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Fit mean, deviation and directions on the tokens of batches of (input_ids, mask), without special tokens.

        Raises ValueError for no tokens.
        """
        if self.options.source == "learned":
            return
        count, total, square = 0, torch.zeros(()), torch.zeros(())
        for input_ids, mask in batches:
            kept = ~self.special(input_ids)
            kept = kept if mask is None else kept & mask
            rows = self.features(input_ids, mask)[kept].double()
            count, total, square = count + len(rows), total + rows.sum(0), square + rows.T @ rows
        if not count:
            raise ValueError("the training set has no tokens but special ones: nothing to fit the norm to")
        mean = total / count
        covariance = square / count - mean.outer(mean)
        if self.options.bottleneck != "none":
            self.center.copy_(mean)
            self.directions.copy_(self._directions(covariance))
            basis = self.directions.double()
            covariance, mean = basis.T @ covariance @ basis, mean.new_zeros(basis.shape[1])
        variance = covariance.diagonal().clamp(min=0)
        if self.options.normalisation == "scalar":
            middle = mean.mean()
            variance = ((variance + (mean - middle) ** 2).mean()).expand_as(variance)
            mean = middle.expand_as(mean)
        self.mean.copy_(mean)
        self.deviation.copy_(variance.sqrt().clamp(min=LEAST))
        self.fitted.fill_(True)

    def _directions(self, covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d k"]:
        width, k = self.directions.shape
        if self.options.bottleneck == "pca":
            return torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :k]
        drawn = torch.randn(width, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return torch.linalg.qr(drawn).Q.to(covariance.device)

    def fingerprint(self) -> int:
        """A number that identifies the norm; vectors of different norms do not compare."""
        parts = [self.mean, self.deviation]
        parts += [self.center, self.directions] if self.options.bottleneck != "none" else []
        said = f"{self.options.source} {self.options.layer} {self.options.normalisation} {self.options.specials}"
        found = zlib.crc32(said.encode())
        for part in parts:
            found = zlib.crc32(part.float().cpu().numpy().tobytes(), found)
        return found
