"""T5 and BART as generators of descriptions: transformers' own classes with a section `table` in their config.

The section says which parts of a source the model reads and whether it has a knowledge adapter. Nothing else differs:
without an adapter the weights are those of a stock checkpoint, under their names.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch
from transformers import (
    BartForConditionalGeneration,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from fathom.models.encoder_model import EncoderModel
from fathom.tables.text.base import SlotMethod
from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableT5Config

KNOWLEDGE_NAME = ".knowledge_adapter."
KNOWLEDGE = re.escape(KNOWLEDGE_NAME)


class TableModel(EncoderModel):
    """Mixed into a stock class: the knowledge adapter, and what of the model trains."""

    config: Any

    def add_knowledge(self) -> None:
        """The adapter that the config names, and gradients for what its `trains` says."""
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
        self.train_part(method.trains)

    def train_part(self, part: str) -> None:
        """Gradients for the "host", for the "knowledge" adapter, or for "all"."""
        for name, parameter in self.named_parameters():
            known = KNOWLEDGE_NAME in name
            parameter.requires_grad_(part == "all" or known == (part == "knowledge"))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with `table={"name": …}` for another method.

        A checkpoint of the stock family, or of a method without an adapter, gets a new one where the method has one; a
        method without an adapter leaves the checkpoint's out. More rows of `config.vocab_size` than the checkpoint has
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
        known = {name: [str(key) for key in found if re.search(KNOWLEDGE, str(key))] for name, found in report.items()}
        if known["mismatched_keys"]:
            raise ValueError(
                f"{pretrained_model_name_or_path}: the width of its knowledge adapter is not what reduction="
                f"{config.method.reduction} and placement={config.method.placement!r} make; use the checkpoint's"
            )
        own = sum(KNOWLEDGE_NAME in name for name, _ in model.named_parameters())
        if own and (known["unexpected_keys"] or len(known["missing_keys"]) not in (0, own)):
            raise ValueError(
                f"{pretrained_model_name_or_path}: its knowledge adapter is not where placement="
                f"{config.method.placement!r} has it, or is incomplete; use the checkpoint's placement"
            )
        for kind, fault in (
            ("missing_keys", "is missing"),
            ("unexpected_keys", "has no place"),
            ("mismatched_keys", "has another shape"),
        ):
            wrong = sorted(str(key) for key in report[kind] if str(key) not in known[kind])
            if wrong:
                raise ValueError(
                    f"{pretrained_model_name_or_path}: tensor {wrong[0]!r} {fault}: load a complete checkpoint of "
                    f"{config.model_type}, or of {config.stock.model_type}"
                )
        if known["missing_keys"]:  # a new adapter: transformers gave it the host's initial values
            for module in model.modules():
                for bottleneck in getattr(module, "knowledge_adapter", {}).values():
                    bottleneck.initialize()
        model.train_part(config.method.trains)
        if wanted != model.config.vocab_size:
            model.resize_token_embeddings(wanted, mean_resizing=False)
        return (model, report) if info else model


class FathomTableT5ForConditionalGeneration(TableModel, T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` with a section `table`; `from_pretrained` reads stock T5 checkpoints too."""

    config_class = FathomTableT5Config

    def __init__(self, config: FathomTableT5Config):
        super().__init__(config)
        self.add_knowledge()


class FathomTableBartForConditionalGeneration(TableModel, BartForConditionalGeneration):
    """`BartForConditionalGeneration` with a section `table`; `from_pretrained` reads stock BART checkpoints too."""

    config_class = FathomTableBartConfig

    def __init__(self, config: FathomTableBartConfig):
        super().__init__(config)
        self.add_knowledge()
