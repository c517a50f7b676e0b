"""Fathom's classes, for transformers' Auto classes in a process that has not imported fathom.

This file is saved with every Fathom checkpoint and named by `auto_map` in its config.json. It holds no model code.
"""

import importlib

try:
    from fathom import (
        FathomBartConfig,
        FathomBartForConditionalGeneration,
        FathomConfig,
        FathomEncoderConfig,
        FathomForCausalLM,
        FathomForLatentDiffusion,
        FathomForMaskedDiffusion,
        FathomForSequenceClassification,
        FathomLatentConfig,
        FathomLongT5Config,
        FathomLongT5ForConditionalGeneration,
        FathomT5Config,
        FathomT5ForConditionalGeneration,
        FathomTableBartConfig,
        FathomTableBartForConditionalGeneration,
        FathomTableLlamaConfig,
        FathomTableLlamaForCausalLM,
        FathomTableT5Config,
        FathomTableT5ForConditionalGeneration,
    )
except ModuleNotFoundError as error:
    if error.name != "fathom":
        raise  # fathom is there, and lacks something
    raise ImportError("this checkpoint needs Fathom, which is not installed: pip install fathom-lm") from error


def __getattr__(name: str):
    """The classes of models that see, whose import takes a second: transformers asks for them by name."""
    if not name.startswith("Fathom"):
        raise AttributeError(name)
    return getattr(importlib.import_module("fathom.vision.checkpoints"), name)


__all__ = [
    "FathomBartConfig",
    "FathomBartForConditionalGeneration",
    "FathomConfig",
    "FathomEncoderConfig",
    "FathomForCausalLM",
    "FathomForLatentDiffusion",
    "FathomForMaskedDiffusion",
    "FathomForSequenceClassification",
    "FathomLatentConfig",
    "FathomLongT5Config",
    "FathomLongT5ForConditionalGeneration",
    "FathomT5Config",
    "FathomT5ForConditionalGeneration",
    "FathomTableBartConfig",
    "FathomTableBartForConditionalGeneration",
    "FathomTableLlamaConfig",
    "FathomTableLlamaForCausalLM",
    "FathomTableT5Config",
    "FathomTableT5ForConditionalGeneration",
]
