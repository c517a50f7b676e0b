"""Every registered method variant on four families, in shapes where no two terms can stand in for each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fathom import FathomConfig, FathomForCausalLM
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


def steps_run(model: FathomForCausalLM) -> Callable[[], list[float] | None]:
    """What the forwards that follow measure: the share of tokens that run each step; None if tokens do not stop."""
    passes: list[torch.Tensor] = []
    model.depth.register_forward_hook(lambda module, args, out: passes.append(out.trace.get("passes")))

    def shares() -> list[float] | None:
        if passes[0] is None:
            return None
        every = torch.cat(passes, dim=1)
        return [(every > step).double().mean().item() for step in range(model.depth.slots)]

    return shares


every_family = pytest.mark.parametrize("family", FAMILIES)
every_variant = pytest.mark.parametrize("sections", variants())
