"""`FathomForSequenceClassification`: the decoder's blocks without a causal mask, and a classification head.

x = embed([CLS, text]);   x = encoder method(blocks, x);   u = norm(x)[CLS], or the mean over tokens
logits = W₂ relu(W₁ u);   of two texts u and v, the head reads [u, v, u·v, u − v]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from fathom.models import hf_versions
from fathom.models.decoder import Decoder
from fathom.models.encoder_configs import FathomEncoderConfig
from fathom.models.encoder_model import EncoderModel
from fathom.models.initialization import initialize
from fathom.models.registry import ENCODER, build_options, lookup
from fathom.ops.visibility import BIDIRECTIONAL


class FathomForSequenceClassification(EncoderModel):
    """A classifier of texts, or of pairs of texts (`config.towers` 2), made of the blocks of a decoder's family.

    With GPT-2's blocks it is the pre-norm encoder of the Long Range Arena. The CLS token is the table's last row.
    """

    config_class = FathomEncoderConfig
    config: FathomEncoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["residual"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FathomEncoderConfig):
        super().__init__(config)
        self.model = Decoder(config)  # type: ignore[arg-type]
        self.encoder = lookup(ENCODER, config.encoder["name"])(config, build_options(ENCODER, config.encoder))
        width = config.hidden_size * (1 if config.towers == 1 else 4)
        self.dense = nn.Linear(width, config.intermediate_size)
        self.score = nn.Linear(config.intermediate_size, config.num_labels or 2)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)  # type: ignore[arg-type]

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | Int[Tensor, "B 2 T"],
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, " B"] | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [B, num_labels], and the cross-entropy of `labels`. With two towers `input_ids` are [B, 2, T].

        Raises ValueError for another number of texts, and for a text with more tokens than learned positions.
        """
        towers = 1 if input_ids.ndim == 2 else input_ids.shape[1]
        if towers != self.config.towers:
            raise ValueError(
                f"input_ids of shape {list(input_ids.shape)} with towers={self.config.towers}: give "
                f"{'[batch, tokens]' if self.config.towers == 1 else '[batch, 2, tokens]'}"
            )
        u = self.encode(input_ids.flatten(0, -2), None if attention_mask is None else attention_mask.flatten(0, -2))
        if towers == 2:
            u, v = u.unflatten(0, (-1, 2)).unbind(1)
            u = torch.cat((u, v, u * v, u - v), dim=-1)
        logits = self.score(torch.relu(self.dense(u)))
        loss = None
        if labels is not None:
            total = F.cross_entropy(logits.float(), labels, reduction="sum")
            loss = total / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def encode(self, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None) -> Float[Tensor, "B d"]:
        """The vector of each text, [B, d]."""
        first = int(self.config.pooling == "cls")
        mask = None if attention_mask is None else attention_mask.bool()
        if first:
            input_ids = F.pad(input_ids, (1, 0), value=self.config.vocab_size - 1)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        length, most = input_ids.shape[1], self.config.max_position_embeddings
        if self.config.positions["name"] == "learned" and length > most:
            raise ValueError(
                f"input_ids of {length - first} tokens{' and a CLS token' * first}: the model has "
                f"max_position_embeddings={most} learned positions; use shorter texts"
            )
        if mask is None:
            positions = torch.arange(length, device=input_ids.device)[None]
        else:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        x = self.model.positions.add(self.model.embed(input_ids), positions)
        x = F.dropout(x, self.config.embedding_dropout, self.training)
        places = _Places(positions)
        layers = [functools.partial(self.run_layer, layer, places) for layer in self.model.layers]
        x = self.model.norm(self.encoder(x, mask, layers, first))
        if first:
            return x[:, 0]
        seen = self.encoder.memory_mask(mask, len(layers))
        if seen is None:
            return x.mean(1)
        share = seen.to(x.dtype)[..., None]
        return (x * share).sum(1) / share.sum(1)

    def run_layer(
        self,
        layer: Any,
        places: _Places,
        x: Tensor,
        mask: Tensor | None,
        cut: Any = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run one block for the method (encoders/base.py). Where it shortens, attention reads the shortened norm of x,
        and the residual is that or the shortened x."""
        residual = self.model.residual
        if cut is not None:
            places.positions = cut.positions(places.positions)
            read = cut.down(layer.input_layernorm(x))
            x = read if cut.method.options.residual == "filtered_norm" else cut.down(x)
        tables = self.model.positions.tables(x, places.positions)
        attention_mask = hf_versions.visible_mask(self.config, x, mask, None, None, BIDIRECTIONAL)
        inputs = {"position_embeddings": tables, "attention_mask": attention_mask}
        if cut is not None:
            attended, *_ = layer.self_attn(hidden_states=read, **inputs)
            x = x + layer.drop(attended)
            x = x + layer.feed_forward(x, None)[0]
        else:
            x = layer(x, residual=residual, **inputs)[0]
        return x if finish is None else finish(x)


class _Places:
    """The positions of one forward's tokens, which shortening changes."""

    def __init__(self, positions: Tensor):
        self.positions = positions
