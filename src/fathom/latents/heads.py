"""Six ways from vectors to words, which the token-recovery study compares.

    a  nearest      p(v) ∝ exp(−‖z_i − α e_v‖²/2σ²), with the known noise; for embeddings only
    b  linear       softmax(W z_i)
    c  mlp          softmax(W₂ gelu(W₁ z_i))
    d  factorised   softmax(W h_i), h of blocks that see all of z: TEncDM's decoder
    e  contextual   p(y_i | y_<i, z): CoDAR's decoder
    f  language     p(y_i | y_<i): the same without z, a floor

a to c read one vector a token; a to d choose every token by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fathom.latents.codar import CoDAR
from fathom.latents.configuration import FathomLatentConfig
from fathom.latents.decoder import ContextualDecoder
from fathom.latents.denoiser import Denoiser
from fathom.models import hf_versions
from fathom.models.configuration import FathomConfig
from fathom.ops.visibility import BIDIRECTIONAL

HEADS = ("nearest", "linear", "mlp", "factorised", "contextual", "language")


class Head(nn.Module):
    """Base of the heads.

    Attributes:
        trains: whether the head has weights to learn.
    """

    trains = True

    def logits(
        self, z: Float[Tensor, "B L k"], input_ids: Int[Tensor, "B L"], noise: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "B L V"]:
        """Logits of every token, given z and, for heads that write from left to right, the tokens before it.

        noise: α and σ of z, [B, 1, 1].
        """
        raise NotImplementedError  # abstract

    @torch.no_grad()
    def write(
        self, z: Float[Tensor, "B L k"], noise: tuple[Tensor, Tensor], temperature: float = 0.0
    ) -> Int[Tensor, "B L"]:
        """Tokens, each drawn independently at a temperature; 0: the likeliest."""
        none = z.new_zeros(z.shape[:2], dtype=torch.long)
        logits = self.logits(z, none, noise)
        if not temperature:
            return logits.argmax(-1)
        drawn = torch.multinomial((logits.flatten(0, 1).float() / temperature).softmax(-1), 1)
        return drawn.view(logits.shape[:2])


class Nearest(Head):
    """The token with the nearest embedding, given the known noise."""

    trains = False

    def __init__(self, model: Any):
        super().__init__()
        if model.options.source == "states":
            raise ValueError("head 'nearest': states of an encoder have no vector a token; use source='embeddings'")
        every = torch.arange(model.config.vocab_size, device=model.device)
        self.register_buffer("table", model.space.encode(every[:, None])[:, 0].detach())

    def logits(self, z, input_ids, noise):
        alpha, sigma = noise
        apart = torch.cdist(z, alpha * self.table) ** 2
        return -apart / (2 * sigma.clamp(min=1e-3) ** 2)


class Pointwise(Head):
    """A linear map of each vector, or a network with one hidden layer."""

    def __init__(self, config: FathomLatentConfig, hidden: int | None = None):
        super().__init__()
        k, size = config.latent_dim, config.vocab_size
        self.layers: nn.Module = nn.Linear(k, size)
        if hidden is not None:
            self.layers = nn.Sequential(nn.Linear(k, hidden), nn.GELU(), nn.Linear(hidden, size))

    def logits(self, z, input_ids, noise):
        return self.layers(z)


class Factorised(Head):
    """Blocks of the decoder's size that see all vectors, and a head: TEncDM's decoder."""

    def __init__(self, config: FathomLatentConfig):
        super().__init__()
        fields = {**config.decoder, "num_hidden_layers": config.decoder_config.num_hidden_layers}
        backbone = FathomLatentConfig(**{**_written(config), "denoiser": fields}).denoiser_config
        options = CoDAR(self_conditioning="none", skips=False)
        self.blocks = Denoiser(backbone, config.latent_dim, options)
        self.blocks.output = nn.Linear(backbone.hidden_size, config.vocab_size)
        for unused in ("time", "time_layers"):
            delattr(self.blocks, unused)

    def logits(self, z, input_ids, noise):
        blocks = self.blocks
        h = blocks.input(z).to(blocks.input.weight.dtype)  # wide under autocast, as the decoder's stream
        places = torch.arange(z.shape[1], device=z.device)[None]
        h = blocks.positions.add(h, places)
        mask = hf_versions.visible_mask(blocks.config, h, None, None, None, BIDIRECTIONAL)
        tables = blocks.positions.tables(h, places)
        for layer in blocks.layers:
            h = layer(h, residual=blocks.residual, position_embeddings=tables, attention_mask=mask)[0]
        return blocks.output(blocks.norm(h))


class Contextual(Head):
    """CoDAR's decoder; `reads=False`: without the vectors."""

    def __init__(self, config: FathomLatentConfig, reads: bool = True):
        super().__init__()
        self.reads, self.start = reads, config.start_token_id
        self.decoder = ContextualDecoder(config.decoder_config, config.latent_dim, config.options)
        if not reads:
            for layer in self.decoder.model.layers:
                del layer.cross_attn, layer.cross_layernorm
            del self.decoder.project

    def logits(self, z, input_ids, noise):
        inputs = F.pad(input_ids[:, :-1], (1, 0), value=self.start)
        memory = self.decoder.read(z) if self.reads else None
        return self.decoder(input_ids=inputs, memory=memory, use_cache=False).logits

    @torch.no_grad()
    def write(self, z, noise, temperature=0.0):
        """Tokens written one after another, each given the ones written before."""
        start = torch.full((len(z), 1), self.start, device=z.device)
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options.update(temperature=temperature, top_k=0, top_p=1.0)
        with self.decoder.reading(self.decoder.read(z) if self.reads else None):
            ids = self.decoder.generate(
                input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=z.shape[1],
                pad_token_id=self.start, **options,
            )  # fmt: skip
        return ids[:, 1:]


def new_head(name: str, model: Any) -> Head:
    """A head for the vectors of a model, with random weights. Raises ValueError for another name."""
    config = model.config
    if not isinstance(config.decoder_config, FathomConfig) and name in ("factorised", "contextual", "language"):
        raise ValueError(
            f"head={name!r}: made of the decoder's blocks, and {config.decoder_config.model_type} is stock"
        )
    made: dict[str, Any] = {
        "nearest": lambda: Nearest(model),
        "linear": lambda: Pointwise(config),
        "mlp": lambda: Pointwise(config, 4 * config.decoder_config.hidden_size),
        "factorised": lambda: Factorised(config),
        "contextual": lambda: Contextual(config),
        "language": lambda: Contextual(config, reads=False),
    }
    if name not in made:
        raise ValueError(f"head={name!r}: must be one of {', '.join(HEADS)}")
    return made[name]()


def _written(config: FathomLatentConfig) -> dict[str, Any]:
    fields = ("encoder", "decoder", "codar", "length", "vocab_size", "start_token_id")
    return {name: getattr(config, name) for name in fields}
