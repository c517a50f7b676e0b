"""T5 whose encoder knows relations between tokens: subclasses of transformers' own classes.

The self-attention of the encoder's layers reads relation ids if it gets them. The decoder, its caches and `generate`
are transformers'. Parameters have the names of a stock checkpoint, plus the tables of relations.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, T5ForConditionalGeneration
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from fathom.models.encoder_configs import FathomT5Config
from fathom.models.encoder_model import EncoderModel
from fathom.models.method import Method
from fathom.models.registry import RELATIONS, build_options, lookup
from fathom.ops.relation_attention import relation_attention


class RelationAttention(T5Attention):
    """T5's self-attention; with `relation_ids`, that of ops/relation_attention.py."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B T d"],
        mask: Any = None,
        key_value_states: Any = None,
        position_bias: Any = None,
        relation_ids: tuple[Int[Tensor, "B T T"], Int[Tensor, "B T T"]] | None = None,
        relation_tables: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        """As in transformers: (output, position bias, attention weights). `relation_ids`: as they are stored, one byte
        each, which a compiled layer reads; and as int64, which all other layers share."""
        if relation_ids is None:
            return super().forward(hidden_states, mask, key_value_states, position_bias, **kwargs)
        heads = (*hidden_states.shape[:-1], self.n_heads, self.key_value_proj_dim)
        query, key, value = (linear(hidden_states).view(heads).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if position_bias is None:  # the first layer's, which the later ones are given
            position_bias = self.compute_bias(heads[1], heads[1], device=hidden_states.device)
        key_table, value_table = (table.to(query.dtype) for table in relation_tables)
        ids = relation_ids[0] if torch.compiler.is_compiling() else relation_ids[1]
        output, weights = relation_attention(
            query, key, value, ids, key_table, value_table, position_bias, mask,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o(output.transpose(1, 2).flatten(2)), position_bias, weights


class FathomT5Encoder(T5Stack):
    """T5's encoder with the tables of its config's relations."""

    config_class = FathomT5Config
    is_custom_code = EncoderModel.is_custom_code  # of a new model

    def __init__(self, config: FathomT5Config):
        super().__init__(config)
        for number, block in enumerate(self.block):
            block.layer[0].SelfAttention = RelationAttention(config, number == 0, layer_idx=number)  # type: ignore[index, union-attr]
        self.relations = lookup(RELATIONS, config.relations["name"])(config, build_options(RELATIONS, config.relations))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        _initialize(super()._init_weights, module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        relation_ids: Int[Tensor, "B T T"] | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. `relation_ids` [B, T, T] are the relations of each token (row) to every other. A model
        without relations ignores them; without ids attention is T5's."""
        tables = None if relation_ids is None else self.relations.tables()
        if relation_ids is not None and tables is not None:
            given: Any = input_ids if inputs_embeds is None else inputs_embeds
            check_ids(relation_ids, tuple(given.shape[:2]), len(tables[0]))
            if attention_mask is not None:  # as it is read here, whatever the backend would make of it
                attention_mask = attention_mask.bool()[:, None, None, :]
            kwargs |= {"relation_ids": (relation_ids, relation_ids.long()), "relation_tables": tables}
        return super().forward(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)


class FathomT5ForConditionalGeneration(EncoderModel, T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` with a section `relations`.

    `from_pretrained` reads stock T5 checkpoints too; `relations={"name": "rasat"}` beside the path gives them tables.
    """

    config_class = FathomT5Config
    config: FathomT5Config
    # a table that no T5 reads, and ours where they are asked for without relations
    dropped = (
        r"^encoder\.relations\.",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    )

    def __init__(self, config: FathomT5Config):
        super().__init__(config)
        encoder = copy.deepcopy(config)
        encoder.is_decoder = encoder.use_cache = False
        self.encoder = FathomT5Encoder(encoder)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        _initialize(super()._init_weights, module)
        if module is self and self.config.embedding_std is not None:
            init.normal_(self.shared.weight, 0.0, self.config.embedding_std)

    @classmethod
    def absent(cls, path: Any, config: Any) -> tuple[str, ...]:
        """Patterns of the relation tables, if the files are of a model without them or with other relations."""
        if path is None:
            return ()
        stored = getattr(AutoConfig.from_pretrained(path), RELATIONS, None)
        return (r"^encoder\.relations\.",) if stored is None or stored["name"] != config.relations["name"] else ()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        relation_ids: Int[Tensor, "B T T"] | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with `relation_ids` for the encoder."""
        if encoder_outputs is None:
            passed = {name: value for name, value in kwargs.items() if name.startswith("output_")}
            found = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, relation_ids=relation_ids,
                inputs_embeds=inputs_embeds, return_dict=True, **passed,
            )  # fmt: skip
            # by name: transformers would take the first thing after the last state for the hidden states
            encoder_outputs = BaseModelOutput(found.last_hidden_state, found.hidden_states, found.attentions)
        return super().forward(input_ids, attention_mask, encoder_outputs=encoder_outputs, **kwargs)

    def save_stock_pretrained(self, folder: str | os.PathLike) -> None:
        """Write the model as a stock T5 checkpoint. Raises ValueError unless its relations are "none"."""
        self.save_stock(folder, T5ForConditionalGeneration)


def check_ids(relations: Tensor, shape: tuple[int, int], rows: int) -> None:
    """Raise ValueError for relation ids whose shape does not fit the tokens, or that have no row in the tables."""
    expected = (shape[0], shape[1], shape[1])
    if tuple(relations.shape) != expected:
        raise ValueError(
            f"relation_ids of shape {tuple(relations.shape)}: {shape[1]} tokens need {expected}; make them with the "
            "same tokenizer and serialisation as the tokens"
        )
    if relations.is_floating_point() or relations.dtype == torch.bool:
        raise ValueError(f"relation_ids of {relations.dtype}: ids are whole numbers; give uint8 or int64")
    if torch.compiler.is_compiling() or relations.device.type != "cpu":  # where looking would wait for the device
        return
    lowest, highest = (int(x) for x in relations.aminmax()) if relations.numel() else (0, 0)
    if lowest < 0 or highest >= rows:
        raise ValueError(
            f"relation_ids has the id {lowest if lowest < 0 else highest}: the tables of this model have {rows} rows; "
            "make the ids with the options of the model's config"
        )


@torch.no_grad()
def _initialize(others: Any, module: Any) -> None:
    """Initialise a module by its own rule if it has one, else by transformers'."""
    if hasattr(module, "initialize_parameters") and not isinstance(module, Method):
        module.initialize_parameters()
    else:
        others(module)
