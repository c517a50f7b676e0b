"""T5, BART and Llama as generators of descriptions: transformers' own classes with a section `table` in their config.

The section says which parts of a source the model reads and whether it has a knowledge adapter. Nothing else differs:
without an adapter the weights are those of a stock checkpoint, under their names.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    BartForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

from fathom.models.encoder_model import EncoderModel
from fathom.tables.text.base import SlotMethod
from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableLlamaConfig, FathomTableT5Config

KNOWLEDGE, PREFIX = ".knowledge_adapter.", "prefix."  # what names of parameters beside the host's have


class Prefix(nn.Module):
    """Vectors that stand before the encoder's states, so that each decoder layer reads its own keys and values of them.

        P = W₂ tanh(W₁ e) in [m, d],   e: the mean of the source's states, or a parameter where the prefix is `free`

    PCG and prefix-tuning put theirs into self-attention; here they are in cross-attention, which needs no cache.
    """

    def __init__(self, width: int, count: int, free: bool):
        super().__init__()
        self.count, self.free = count, free
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, count * width)
        self.origin = nn.Parameter(torch.empty(width)) if free else None
        self.initialize()

    def initialize(self) -> None:
        for linear in (self.inner, self.outer):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        if self.origin is not None:
            nn.init.normal_(self.origin)

    def forward(self, states: Float[Tensor, "B T d"], mask: Int[Tensor, "B T"] | None) -> Float[Tensor, "B m d"]:
        if self.origin is not None:
            mean = self.origin.expand(len(states), -1)
        else:
            weight = states.new_ones(states.shape[:2]) if mask is None else mask.to(states.dtype)
            mean = (states * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        return self.outer(self.inner(mean).tanh()).view(len(states), self.count, -1)


class TableModel(EncoderModel):
    """A mixin for stock classes: the knowledge adapter, the prefix, and which parameters train."""

    config: Any
    prefix: Prefix | None

    def add_parts(self) -> None:
        """Add the adapter and the prefix that the config names, and freeze all parameters that do not train."""
        method = self.config.method
        if method.adapts:
            if importlib.util.find_spec("peft") is None:
                raise ImportError("a knowledge adapter is a PEFT method: pip install 'fathom-lm[peft]'")
            from peft import inject_adapter_in_model

            from fathom.tables.text.adapter import KnowledgeAdapterConfig

            assert isinstance(method, SlotMethod)
            inject_adapter_in_model(
                KnowledgeAdapterConfig(
                    reduction=method.reduction, placement=method.placement, zero_init_up=method.zero_init_up
                ),
                self,
            )
        self.prefix = None
        if method.prefixes:
            assert isinstance(method, SlotMethod)
            self.prefix = Prefix(self.config.d_model, method.prefix_tokens, method.planner == "free_prefix")
        self.train_part(method.trains)

    def train_part(self, part: str) -> None:
        """Let only a part train: the "host" (with its prefix), the "knowledge" adapter, the "prefix", or "all"."""
        for name, parameter in self.named_parameters():
            known, before = KNOWLEDGE in name, name.startswith(PREFIX)
            wanted = {"all": True, "host": not known, "knowledge": known, "prefix": before}
            parameter.requires_grad_(wanted[part])

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with `table={"name": …}` for another method.

        A checkpoint of the stock family, or of a method without adapter or prefix, gets new ones where the method has
        them; a method without leaves the checkpoint's out. More rows of `config.vocab_size` than the checkpoint has
        are new ones. Raises ValueError for tensors that are otherwise missing or without a place, and for an adapter of
        another width.
        """
        config, info = kwargs.pop("config", None), kwargs.pop("output_loading_info", False)
        if config is None:
            changes = {"table": kwargs.pop("table")} if "table" in kwargs else {}
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path, **changes)  # type: ignore[union-attr]
        stored, _ = type(config).get_config_dict(pretrained_model_name_or_path)
        wanted, config.vocab_size = config.vocab_size, stored.get("vocab_size", config.vocab_size)
        with torch.device("meta"):
            names = [name for name, _ in cls(config).named_parameters() if ".base_layer." in name]
        renamed = {re.escape(name.replace(".base_layer.", ".")): name for name in names}
        if not names:  # the checkpoint may have an adapter, which is left out
            renamed = {r"\.base_layer\.": "."}
        model, report = PreTrainedModel.from_pretrained.__func__(  # type: ignore[attr-defined]
            cls, pretrained_model_name_or_path, *args, config=config, key_mapping=renamed, output_loading_info=True,
            ignore_mismatched_sizes=True, **kwargs,
        )  # fmt: skip
        model._weight_conversions = None  # the names above are for reading: it is saved under its own
        own = {name: [key for key in map(str, found) if is_part(key)] for name, found in report.items()}
        known = {name: [key for key in found if KNOWLEDGE in key] for name, found in own.items()}
        if known["mismatched_keys"]:
            raise ValueError(
                f"{pretrained_model_name_or_path}: the width of its knowledge adapter is not what reduction="
                f"{config.method.reduction} and placement={config.method.placement!r} make; use the checkpoint's"
            )
        if own["mismatched_keys"]:
            raise ValueError(
                f"{pretrained_model_name_or_path}: its prefix has another size than prefix_tokens="
                f"{config.method.prefix_tokens} makes; use the checkpoint's"
            )
        count = sum(KNOWLEDGE in name for name, _ in model.named_parameters())
        if count and (known["unexpected_keys"] or len(known["missing_keys"]) not in (0, count)):
            raise ValueError(
                f"{pretrained_model_name_or_path}: its knowledge adapter is not where placement="
                f"{config.method.placement!r} has it, or is incomplete; use the checkpoint's placement"
            )
        for kind, fault in (
            ("missing_keys", "is missing"),
            ("unexpected_keys", "has no place"),
            ("mismatched_keys", "has another shape"),
        ):
            wrong = sorted(str(key) for key in report[kind] if str(key) not in own[kind])
            if wrong:
                raise ValueError(
                    f"{pretrained_model_name_or_path}: tensor {wrong[0]!r} {fault}: load a complete checkpoint of "
                    f"{config.model_type}, or of {config.stock.model_type}"
                )
        if known["missing_keys"]:  # a new adapter: transformers gave it the host's initial values
            for module in model.modules():
                for bottleneck in getattr(module, "knowledge_adapter", {}).values():
                    bottleneck.initialize()
        if model.prefix is not None and any(key.startswith(PREFIX) for key in own["missing_keys"]):
            model.prefix.initialize()
        if wanted != model.config.vocab_size:
            model.resize_token_embeddings(wanted, mean_resizing=False)
        model.train_part(config.method.trains)
        return (model, report) if info else model


def is_part(name: str) -> bool:
    """Whether a tensor with this name is not the host's."""
    return KNOWLEDGE in name or name.startswith(PREFIX)


class ReadsPrefix(TableModel):
    """A `TableModel` with cross-attention, in which the decoder reads the prefix before the source."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As in transformers; the decoder reads the prefix before the source."""
        if self.prefix is None:
            return super().forward(input_ids, attention_mask, encoder_outputs=encoder_outputs, **kwargs)  # type: ignore[misc]
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=kwargs.pop("inputs_embeds", None)
            )
        states: Tensor = encoder_outputs[0]
        before = self.prefix(states, attention_mask)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.new_ones(before.shape[:2]), attention_mask], dim=1)
        memory = BaseModelOutput(last_hidden_state=torch.cat([before.to(states.dtype), states], dim=1))  # type: ignore[arg-type]
        return super().forward(None, attention_mask, encoder_outputs=memory, **kwargs)  # type: ignore[misc]


class FathomTableT5ForConditionalGeneration(ReadsPrefix, T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` with a section `table`; `from_pretrained` reads stock T5 checkpoints too."""

    config_class = FathomTableT5Config

    def __init__(self, config: FathomTableT5Config):
        super().__init__(config)
        self.add_parts()


class FathomTableBartForConditionalGeneration(ReadsPrefix, BartForConditionalGeneration):
    """`BartForConditionalGeneration` with a section `table`; `from_pretrained` reads stock BART checkpoints too."""

    config_class = FathomTableBartConfig

    def __init__(self, config: FathomTableBartConfig):
        super().__init__(config)
        self.add_parts()


class FathomTableLlamaForCausalLM(TableModel, LlamaForCausalLM):
    """`LlamaForCausalLM` with a section `table`: the description goes on from the source in one sequence.

    `from_pretrained` reads stock Llama checkpoints too.
    """

    config_class = FathomTableLlamaConfig

    def __init__(self, config: FathomTableLlamaConfig):
        super().__init__(config)
        self.add_parts()
