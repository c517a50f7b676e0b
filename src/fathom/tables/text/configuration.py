"""Configs of T5, BART and Llama with a section `table`: which parts of a source a model reads, and its adapter."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import BartConfig, LlamaConfig, PreTrainedConfig, T5Config

from fathom.models import lazy_configs, saved_files
from fathom.models.encoder_configs import EncoderSection
from fathom.models.registry import filled
from fathom.tables.text.base import TableMethod, from_dict


class TableSection(EncoderSection):
    """The section `table` of a config: `{"name": …, options}`, completed and checked. None: table_plain."""

    table: Any

    def __post_init__(self, **kwargs: Any) -> None:
        filled()  # the model is known to the Auto classes as soon as there is a config to build it from
        super(EncoderSection, self).__post_init__(**kwargs)  # type: ignore[misc]  # the family's own: there is no section `encoder`
        self.table = from_dict(self.table).to_dict()

    @property
    def method(self) -> TableMethod:
        return from_dict(self.table)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; a `table` in `kwargs` replaces the stored one."""
        own = {name: kwargs.pop(name) for name in inspect.get_annotations(cls) if name in kwargs}
        with saved_files.naming_newer_versions(config_dict):
            return PreTrainedConfig.from_dict.__func__(cls, {**config_dict, **own}, **kwargs)  # type: ignore[attr-defined]

    def stock_config(self) -> Any:
        assert self.stock is not None
        own = ("table", *saved_files.NOT_STOCK)
        return self.stock(**{key: value for key, value in self.to_dict().items() if key not in own})  # type: ignore[attr-defined]


class FathomTableT5Config(TableSection, T5Config):
    """T5's config with a section `table`; see `fathom methods`."""

    model_type = "fathom_table_t5"
    stock = T5Config
    auto_class = ("AutoModelForSeq2SeqLM", "FathomTableT5ForConditionalGeneration")

    table: Any = None


class FathomTableBartConfig(TableSection, BartConfig):
    """BART's config with a section `table`; see `fathom methods`."""

    model_type = "fathom_table_bart"
    stock = BartConfig
    auto_class = ("AutoModelForSeq2SeqLM", "FathomTableBartForConditionalGeneration")

    table: Any = None


class FathomTableLlamaConfig(TableSection, LlamaConfig):
    """Llama's config with a section `table`; see `fathom methods`. A decoder has no cross-attention for a prefix."""

    model_type = "fathom_table_llama"
    stock = LlamaConfig
    auto_class = ("AutoModelForCausalLM", "FathomTableLlamaForCausalLM")

    table: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.method.prefixes:
            raise ValueError(
                f"table.planner={self.table['planner']!r}: a decoder alone has no cross-attention that reads a prefix; "
                "use T5 or BART, or peft's PrefixTuningConfig on the model"
            )


lazy_configs.register(FathomTableT5Config, FathomTableBartConfig, FathomTableLlamaConfig)
