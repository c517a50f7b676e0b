"""Checkpoints whose config says, for model and processor, how vision tokens are compressed (`vision_compress`).

Their model types are transformers' with `fathom_` in front, so that a program that has not imported fathom refuses them
instead of running the uncompressed model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaProcessor,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
)

from fathom.models.model_card import Published
from fathom.vision.base import Compressor
from fathom.vision.compress import check, family_of, parts_of, put
from fathom.vision.configuration import (
    FathomLlavaConfig,
    FathomLlavaNextConfig,
    FathomQwen2_5_VLConfig,
    FathomSmolVLMConfig,
)
from fathom.vision.methods import from_dict
from fathom.vision.methods.mqt import MQT
from fathom.writing import naming, write_json


class CompressedModel(Published):
    """A stock class whose instances use the compressor of their config."""

    def __init__(self, config: Any, *arguments: Any, **kwargs: Any):
        super().__init__(config, *arguments, **kwargs)  # type: ignore[call-arg]
        family, compressor = family_of(config.model_type), from_dict(config.vision_compress)
        check(family, compressor)
        if family.watched:
            resampler = compressor.resampler(config.vision_config.hidden_size)
            if resampler is not None:
                self.model.multi_modal_projector.resampler = resampler  # type: ignore[attr-defined]
        parts, watch = parts_of(self, family, compressor)
        for part, added in parts:
            put(part, added, compressor, watch)

    def save_pretrained(self, save_directory: Any, *arguments: Any, **kwargs: Any) -> None:
        """As in transformers, but with the names that weights have in memory: the Trainer, when it resumes a
        checkpoint, does not rename what it reads.
        """
        super().save_pretrained(save_directory, *arguments, **{"save_original_format": False, **kwargs})  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, as for the config."""


class FathomLlavaForConditionalGeneration(CompressedModel, LlavaForConditionalGeneration):
    """LLaVA whose language model reads the vision tokens that its config's compressor keeps."""

    config_class = FathomLlavaConfig


class FathomLlavaNextForConditionalGeneration(CompressedModel, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT with compressed tiles."""

    config_class = FathomLlavaNextConfig


class FathomSmolVLMForConditionalGeneration(CompressedModel, SmolVLMForConditionalGeneration):
    """SmolVLM with compressed tiles."""

    config_class = FathomSmolVLMConfig


class FathomQwen2_5_VLForConditionalGeneration(CompressedModel, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL with compressed images and frames."""

    config_class = FathomQwen2_5_VLConfig


CLASSES: dict[str, tuple[type, type, type]] = {
    "llava": (FathomLlavaConfig, FathomLlavaForConditionalGeneration, LlavaProcessor),
    "llava_next": (FathomLlavaNextConfig, FathomLlavaNextForConditionalGeneration, LlavaNextProcessor),
    "smolvlm": (FathomSmolVLMConfig, FathomSmolVLMForConditionalGeneration, SmolVLMProcessor),
    "qwen2_5_vl": (FathomQwen2_5_VLConfig, FathomQwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor),
}


def stock_of(cls: type) -> Any:
    """The class of transformers that one of ours extends."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))


class CompressedProcessor:
    """A processor that reads the compressor from the config beside its own file."""

    @classmethod
    def from_pretrained(cls, folder: Any, *arguments: Any, **kwargs: Any) -> Any:
        processor = super().from_pretrained(folder, *arguments, **kwargs)  # type: ignore[misc]
        config = AutoConfig.from_pretrained(folder)
        if getattr(config, "vision_compress", None) is None:
            raise ValueError(f"{folder}: its config has no vision_compress; load it with {stock_of(cls).__name__}")
        put(processor, family_of(config.model_type).processor, from_dict(config.vision_compress))
        return processor

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoProcessor") -> None:
        """Do nothing, as for the config."""

    def save_pretrained(self, save_directory: Any, *arguments: Any, **kwargs: Any) -> Any:
        """As in transformers, but without the class's name: AutoProcessor then finds the class through the config."""
        written = super().save_pretrained(save_directory, *arguments, **kwargs)  # type: ignore[misc]
        for path in Path(save_directory).glob("*config.json"):
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("processor_class", None) is not None:
                write_json(path, fields)
        return written


PROCESSORS = {
    name: type(f"Fathom{stock.__name__}", (CompressedProcessor, stock), {"__module__": __name__})
    for name, (_, _, stock) in CLASSES.items()
}
globals().update({cls.__name__: cls for cls in PROCESSORS.values()})


def register() -> None:
    """Register models and processors with transformers' Auto classes, which know the configs."""
    for name, (config, model, _) in CLASSES.items():
        AutoModelForImageTextToText.register(config, model, exist_ok=True)
        AutoProcessor.register(config, PROCESSORS[name], exist_ok=True)


def convert_vision(folder: str | Path, out: str | Path, method: Compressor) -> None:
    """Write the stock checkpoint in `folder` to `out` as one that compresses its vision tokens with `method`.

    Weights stay as they are; config and processor say how to compress. After `import fathom` the Auto classes load it.

    Raises:
        ValueError: a model that no compressor knows, or a method that cannot serve it.
        FileExistsError: `out` exists.
    """
    folder, out = Path(folder), Path(out)
    if out.exists():
        raise FileExistsError(f"{out}: it exists already; choose another folder")
    stock_config = AutoConfig.from_pretrained(folder)
    check(family_of(stock_config.model_type), method)
    if isinstance(method, MQT):
        raise ValueError(
            f"method={method.name!r}: it has weights of its own, which no stock checkpoint has; see task vqa"
        )
    name = stock_config.model_type.removeprefix("fathom_")
    config_class, model_class, stock_processor = CLASSES[name]
    stock = stock_of(model_class).from_pretrained(folder)
    fields = {**stock.config.to_dict(), "model_type": config_class.model_type, "vision_compress": method.to_dict()}  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = model_class(config_class.from_dict(fields))  # type: ignore[attr-defined]
    model.load_state_dict(stock.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = stock.generation_config
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with naming(out):
        try:
            model.save_pretrained(partial)
            if any(folder.joinpath(file).is_file() for file in ("processor_config.json", "preprocessor_config.json")):
                processor = stock_processor.from_pretrained(folder)  # type: ignore[attr-defined]
                processor.__class__ = PROCESSORS[name]
                processor.save_pretrained(partial)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
