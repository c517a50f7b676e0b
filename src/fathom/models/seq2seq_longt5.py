"""LongT5 with a method on its encoder: subclasses of transformers' own classes, which replace self-attention alone.

The decoder, its caches and `generate` are transformers'. Parameters have the names of a stock checkpoint; those of
transient-global attention (its table and norm) are dropped where another attention replaces it.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers import LongT5ForConditionalGeneration
from transformers import initialization as init
from transformers.models.longt5.modeling_longt5 import LongT5Stack

from fathom.models.encoder_configs import FathomLongT5Config
from fathom.models.encoder_model import EncoderModel
from fathom.models.registry import ENCODER, build_options, lookup


class FathomLongT5Encoder(LongT5Stack):
    """LongT5's encoder, with the self-attention of its config's method."""

    config_class = FathomLongT5Config
    is_custom_code = EncoderModel.is_custom_code  # of a new model

    def __init__(self, config: FathomLongT5Config):
        super().__init__(config)
        self.method = lookup(ENCODER, config.encoder["name"])(config, build_options(ENCODER, config.encoder))
        name = "LocalSelfAttention" if config.encoder_attention_type == "local" else "TransientGlobalSelfAttention"
        blocks: Any = self.block
        for number, block in enumerate(blocks):
            attention = self.method.attention(config, number == 0)
            if attention is not None:  # under the name of what it stands for, as checkpoints have it
                setattr(block.layer[0], name, attention)
                self.config.encoder_attention_type = "transient-global"  # the stack hands the mask on as [B, N]
        self.post_init()


class FathomLongT5ForConditionalGeneration(EncoderModel, LongT5ForConditionalGeneration):
    """`LongT5ForConditionalGeneration` with a section `encoder`.

    `from_pretrained` reads stock LongT5 checkpoints too; `encoder={"name": …}` beside the path puts a method on them.
    """

    config_class = FathomLongT5Config
    config: FathomLongT5Config
    dropped = (r"global_relative_attention_bias\.weight$", r"global_input_layer_norm\.weight$")

    def __init__(self, config: FathomLongT5Config):
        super().__init__(config)
        encoder = copy.deepcopy(config)
        encoder.is_decoder = encoder.use_cache = False
        self.encoder = FathomLongT5Encoder(encoder)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if module is self and self.config.embedding_std is not None:
            init.normal_(self.shared.weight, 0.0, self.config.embedding_std)

    def save_stock_pretrained(self, folder: str | os.PathLike) -> None:
        """Write the model as a stock LongT5 checkpoint. Raises ValueError unless its encoder is "full"."""
        self.save_stock(folder, LongT5ForConditionalGeneration)
