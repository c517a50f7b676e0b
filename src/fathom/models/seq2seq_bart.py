"""BART with a method on its encoder: subclasses of transformers' own classes with another encoder forward.

The decoder, its caches and `generate` are transformers'. Parameters have the names of a stock checkpoint.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import BartForConditionalGeneration
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.bart.modeling_bart import BartEncoder, BartEncoderLayer, BartModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from fathom.models.encoder_configs import FathomBartConfig
from fathom.models.encoder_model import EncoderModel
from fathom.models.registry import ENCODER, build_options, lookup


class FathomBartEncoderLayer(BartEncoderLayer):
    """transformers' layer with an optional function before its last norm."""

    dropout: Any
    activation_dropout: Any

    def forward(
        self,
        hidden_states: Float[Tensor, "B T d"],
        attention_mask: Any,
        finish: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B S d"]:
        if finish is None:
            return super().forward(hidden_states, attention_mask, **kwargs)
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self.self_attn_layer_norm(hidden_states + F.dropout(attended, self.dropout, self.training))
        inner = F.dropout(self.activation_fn(self.fc1(x)), self.activation_dropout, self.training)
        x = x + F.dropout(self.fc2(inner), self.dropout, self.training)
        return self.final_layer_norm(finish(x))


class FathomBartEncoder(BartEncoder):
    """BART's encoder, in which the config's method runs the layers."""

    dropout: Any
    layerdrop: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.layers = nn.ModuleList(FathomBartEncoderLayer(config, layer_idx=i) for i in range(config.encoder_layers))
        self.method = lookup(ENCODER, config.encoder["name"])(config, build_options(ENCODER, config.encoder))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """As in transformers. Raises ValueError for a source longer than the model's positions."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.shape[1] > self.max_source_positions:
            raise ValueError(
                f"input_ids of {x.shape[1]} tokens: BART has max_position_embeddings={self.max_source_positions}; "
                "truncate the source, or load the model with more positions"
            )
        x = self.layernorm_embedding(x + self.embed_positions(x[:, :, -1]).to(x.device))
        x = F.dropout(x, self.dropout, self.training)
        layers = [functools.partial(self.run_layer, layer, kwargs) for layer in self.layers]
        return BaseModelOutput(last_hidden_state=self.method(x, attention_mask, layers))

    def run_layer(
        self,
        layer: nn.Module,
        kwargs: dict[str, Any],
        x: Tensor,
        mask: Tensor | None,
        cut: Any = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run one layer for the method (encoders/base.py). Layer dropout skips neither shortening nor finishing."""
        if cut is not None:
            x = cut.down(x)
        if self.training and self.layerdrop > 0 and torch.rand([]) < self.layerdrop:
            return x if finish is None else layer.final_layer_norm(finish(x))  # type: ignore[operator]
        attention_mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=mask)
        return layer(x, attention_mask, finish, **kwargs)


class FathomBartModel(BartModel):
    """BART's model with a `FathomBartEncoder`."""

    config_class = FathomBartConfig
    encoder: Any

    def __init__(self, config: FathomBartConfig):
        super().__init__(config)
        self.encoder = FathomBartEncoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers; cross-attention's mask is the method's."""
        embeds = kwargs.pop("inputs_embeds", None)
        if encoder_outputs is None:
            passed = {name: value for name, value in kwargs.items() if name.startswith("output_")}
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=embeds, **passed
            )
        memory = self.encoder.method.memory_mask(attention_mask, len(self.encoder.layers))
        return super().forward(
            input_ids,
            attention_mask=memory,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            **kwargs,
        )


class FathomBartForConditionalGeneration(EncoderModel, BartForConditionalGeneration):
    """`BartForConditionalGeneration` with a section `encoder`.

    `from_pretrained` reads stock BART checkpoints too; `encoder={"name": …}` beside the path puts a method on them.
    """

    config_class = FathomBartConfig
    config: FathomBartConfig

    def __init__(self, config: FathomBartConfig):
        super().__init__(config)
        self.model = FathomBartModel(config)
        self.post_init()
        # FSDP wraps these; stock BART's decoder would have it look for the encoder layers of stock BART, too
        self._no_split_modules = ["FathomBartEncoderLayer", "BartDecoderLayer"]

    def save_stock_pretrained(self, folder: str | os.PathLike) -> None:
        """Write the model as a stock BART checkpoint. Raises ValueError unless its encoder is "full"."""
        self.save_stock(folder, BartForConditionalGeneration)
