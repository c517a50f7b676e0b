"""Every transformers difference that the caches wing meets (5.15 … newest), and the shape of the models it hooks.

| since | what moved |
|---|---|
| 5.24 | models take the cache as `cache`; before, as `past_key_values` (name shared with `fathom.models.hf_versions`) |
| 5.24 | layers pass `update(…, kwargs=…)`; before, nothing: layers take and ignore both |

Families differ too: Gemma's rotary module serves several layer types, and Fathom's own models keep one cache layer per
pass.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fathom.models.hf_versions import CACHE_NAME, cache_config
from fathom.ops.rotary import rotate

__all__ = ["CACHE_NAME", "CACHE_NAMES", "attention_modules", "causal_lm", "rotary_tables", "stock_layers"]

CACHE_NAMES = ("cache", "past_key_values")


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself. Raises ValueError for anything else."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: caches compress transformers PreTrainedModels")
    return model


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the decoder, inside a multimodal model too."""
    return model.config.get_text_config(decoder=True)


def stock_layers(model: PreTrainedModel) -> list[Any]:
    """transformers' own empty cache layers for this model, one per decoder layer (and pass, on Fathom's models)."""
    config = text_config(model)
    return DynamicCache(config=cache_config(config, getattr(config, "passes", 1))).layers


def is_full_attention(layer: Any) -> bool:
    """Whether a stock cache layer is one that we replace: it keeps every token (no sliding window)."""
    return type(layer) is DynamicLayer


def shares_keys(model: PreTrainedModel) -> bool:
    """Whether some layers read another layer's cache (Gemma 3n and 4)."""
    config = text_config(model)
    modes = getattr(config, "kv_sharing_modes", None) or []
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in modes


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules, in layer order."""
    found: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and type(module).__name__.endswith("Attention")
    ]
    return sorted(found, key=lambda module: module.layer_idx)


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The module that makes the model's cos and sin, or None for a model without rotary positions."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    rotary = getattr(decoder, "rotary_emb", None)
    return rotary if rotary is not None else getattr(model.base_model, "rotary_emb", None)


def rope_type(model: PreTrainedModel) -> str:
    """RoPE type of the full-attention layers, as in `rope_parameters`."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    return parameters.get("rope_type", "default")


def rotary_tables(rotary: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, R] of the model's rotary module at these positions."""
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return rotary(like, positions, layer_type="full_attention")
    return rotary(like, positions)


def rotates_half_split(module: nn.Module, rotary: nn.Module, head_dim: int) -> bool:
    """Whether the model's rotation is the half-split one that `ops.rotary` implements, tried on random numbers."""
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:  # Fathom's own decoder calls ops.rotary itself
        return type(module).__module__.startswith("fathom.")
    device = next(module.parameters()).device
    x = torch.randn(1, 2, 3, head_dim, generator=torch.Generator().manual_seed(0)).to(device)
    cos, sin = rotary_tables(rotary, x, torch.tensor([[0, 1, 5]], device=device))
    return torch.allclose(apply(x, x, cos, sin)[1], rotate(x, cos, sin), atol=1e-5)
