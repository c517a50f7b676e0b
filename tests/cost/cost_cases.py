"""Every registered method variant on four families, in shapes where no two terms can stand in for each other."""

from typing import Any

import pytest

from fathom import FathomConfig
from fathom.models.registry import REGISTRIES

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> FathomConfig:
    grouped = {"num_key_value_heads": 2} if family in ("llama", "qwen3") else {}
    return FathomConfig(backbone=family, **{**SIZES, **grouped, **changes})


def variants() -> list[Any]:
    """Mixers and topologies need only run under vanilla depth."""
    return [
        pytest.param({registry: {"name": name, **options}}, id="-".join(map(str, (registry, name, *options.values()))))
        for registry, methods in REGISTRIES.items()
        for name, method in methods.items()
        for options in method.variants
    ]


def config_of(family: str, sections: dict[str, Any]) -> FathomConfig:
    try:
        return tiny_config(family, **sections)
    except ValueError as error:
        pytest.skip(str(error))


every_family = pytest.mark.parametrize("family", FAMILIES)
every_variant = pytest.mark.parametrize("sections", variants())
