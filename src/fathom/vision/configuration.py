"""Configs of checkpoints whose vision tokens are compressed."""

from __future__ import annotations

from typing import Any

from transformers import LlavaConfig, LlavaNextConfig, Qwen2_5_VLConfig, SmolVLMConfig

from fathom.models import lazy_configs


class Compresses:
    """`vision_compress`: the compressor as `{"name": …, options}`.

    A config that is made hands the models and processors to the Auto classes, which so can wait until then.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        from fathom.vision.checkpoints import register

        register()

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
