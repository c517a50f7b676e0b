"""Configs of checkpoints whose vision tokens are compressed."""

from __future__ import annotations

from typing import Any

from transformers import LlavaConfig, LlavaNextConfig, Qwen2_5_VLConfig, SmolVLMConfig

from fathom.models import lazy_configs, saved_files
from fathom.version import __version__


class Compresses:
    """`vision_compress`: the compressor as `{"name": …, options}`.

    A config that is made hands the models and processors to the Auto classes, which so can wait until then. It raises
    ValueError for a method or an option that does not exist.
    """

    vision_compress: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        from fathom.vision.checkpoints import register
        from fathom.vision.methods import from_dict

        register()
        if self.vision_compress is not None:
            from_dict(self.vision_compress)  # raises where there is no such method or option

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; a compressor that this version does not have says so if a newer one wrote the config."""
        with saved_files.naming_newer_versions(config_dict):
            return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the version that wrote it."""
        return {**super().to_dict(), "fathom_version": __version__}  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in transformers; also registers models and processors, which unpickling alone would not do."""
        from fathom.vision.checkpoints import register

        register()
        self.__dict__.update(state)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the file by which Auto classes find Fathom in a process that has not imported it."""
        family = type(self).__name__.removesuffix("Config")
        names = {
            "AutoConfig": f"{family}Config",
            "AutoModelForImageTextToText": f"{family}ForConditionalGeneration",
            "AutoProcessor": f"{family}Processor",
        }
        self.auto_map = {key: f"{saved_files.CODE.stem}.{name}" for key, name in names.items()}
        saved_files.write_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the language model."""
        return self.text_config.num_hidden_layers  # type: ignore[attr-defined]


class FathomLlavaConfig(Compresses, LlavaConfig):
    """LLaVA's config, with the compressor before its projector."""

    model_type = "fathom_llava"
    vision_compress: dict[str, Any] | None = None


class FathomLlavaNextConfig(Compresses, LlavaNextConfig):
    """LLaVA-NeXT's config, with the compressor of every tile."""

    model_type = "fathom_llava_next"
    vision_compress: dict[str, Any] | None = None


class FathomSmolVLMConfig(Compresses, SmolVLMConfig):
    """SmolVLM's config, with the compressor after its connector."""

    model_type = "fathom_smolvlm"
    vision_compress: dict[str, Any] | None = None


class FathomQwen2_5_VLConfig(Compresses, Qwen2_5_VLConfig):
    """Qwen2.5-VL's config, with the compressor of every temporal slice after the merger."""

    model_type = "fathom_qwen2_5_vl"
    vision_compress: dict[str, Any] | None = None


CONFIGS = (FathomLlavaConfig, FathomLlavaNextConfig, FathomSmolVLMConfig, FathomQwen2_5_VLConfig)
lazy_configs.register(*CONFIGS)
