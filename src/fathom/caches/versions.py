"""Differences between transformers versions (5.15 … newest) that the caches wing meets, and facts about stock models.

| since | what moved |
|---|---|
| 5.24 | models take the cache as `cache`; before, as `past_key_values` (name shared with `fathom.models.hf_versions`) |
| 5.24 | layers pass `update(…, kwargs=…)`; before, nothing: layers take and ignore both |

Families differ too: Gemma's rotary module serves several layer types, and Fathom's own models keep one cache layer per
pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fathom.decoding.versions import CACHE_NAME
from fathom.models.hf_versions import cache_config

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


def execution_device(module: nn.Module) -> torch.device:
    """The device on which the module computes: its first parameter's, or accelerate's where weights are offloaded."""
    hooked = None
    for part in module.modules():
        devices = [getattr(hook, "execution_device", None) for hook in offload_hooks(part)]
        hooked = next((device for device in devices if device is not None), hooked)
        for parameter in part.parameters(recurse=False):
            return torch.device(hooked) if parameter.is_meta and hooked is not None else parameter.device
    return torch.device("cpu")


def offload_hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on this module, which load offloaded weights before its forward."""
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [] if hook is None else [hook]))


def weights(module: nn.Module) -> Iterator[Tensor]:
    """The values of `module.parameters()`; offloaded ones are loaded one at a time.

    Raises:
        ValueError: a weight is on the meta device and no hook can load it.
    """
    for name, parameter in module.named_parameters():
        yield _fetched(module, name) if parameter.is_meta else parameter.detach()


def _fetched(module: nn.Module, name: str) -> Tensor:
    path = name.split(".")
    for depth in reversed(range(len(path))):  # held by its own module, or by one around it
        leaf = ".".join(path[depth:])
        for hook in offload_hooks(module.get_submodule(".".join(path[:depth]))):
            held = getattr(hook, "weights_map", None)
            if held is not None and leaf in held:
                return held[leaf]
    raise ValueError(f"{name} is on the meta device: load the weights first")


def stock_layers(model: PreTrainedModel) -> list[Any]:
    """transformers' own empty cache layers for this model, one per decoder layer (and pass, on Fathom's models)."""
    config = text_config(model)
    return DynamicCache(config=cache_config(config, getattr(config, "passes", 1))).layers


def depth(model: PreTrainedModel) -> int:
    """Decoder layers of one pass."""
    return text_config(model).num_hidden_layers


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """The device on which each full-attention layer computes."""
    by_layer = {module.layer_idx: execution_device(module) for module in attention_modules(model)}
    full = [index for index, layer in enumerate(stock_layers(model)) if is_full_attention(layer)]
    return [by_layer[index % depth(model)] for index in full]


def is_full_attention(layer: Any) -> bool:
    """Whether a stock cache layer is one that we replace: it keeps every token (no sliding window)."""
    return type(layer) is DynamicLayer


def shares_keys(model: PreTrainedModel) -> bool:
    """Whether some layers read another layer's cache (Gemma 3n and 4)."""
    config = text_config(model)
    modes = getattr(config, "kv_sharing_modes", None) or []
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in modes


def keeps_latents(model: PreTrainedModel) -> bool:
    """Whether the cache holds what keys and values are made from (multi-head latent attention: DeepSeek)."""
    return getattr(text_config(model), "kv_lora_rank", None) is not None


def varying_width(model: PreTrainedModel) -> str:
    """The config's name of a cache width that differs from layer to layer (Gemma 4); "" if none does."""
    varying = getattr(getattr(text_config(model), "_heterogeneity_spec", None), "per_layer_attributes", ())
    return next((name for name in ("head_dim", "v_head_dim", "num_key_value_heads") if name in varying), "")


def changes_scores(modules: list[Any]) -> str:
    """The name of what these modules do to attention scores beyond scaling (Gemma 2, gpt-oss, DiffLlama); "" for
    nothing.
    """
    for module in modules:
        if getattr(module, "attn_logit_softcapping", None) is not None:
            return "softcap"
        if isinstance(getattr(module, "sinks", None), Tensor):
            return "sinks (s_aux)"
        if isinstance(getattr(module, "lambda_q1", None), Tensor):
            return "differential scores (lambda_q1)"
    return ""


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config of the model and of its parts, once."""
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [part for part in parts if part is not None]
    return list(found.values())


def slots_of_depth(model: PreTrainedModel) -> str:
    """Words for what a depth method of Fathom caches for a token; "" if it is one slot in each pass."""
    depth = getattr(model, "depth", None)
    if getattr(depth, "adaptive", False) or getattr(depth, "ragged", False):
        return "as many slots as a token runs"
    slots = getattr(depth, "slots", 1)
    return f"{slots} slots a token" if slots != 1 else ""


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The self-attention modules, in layer order."""
    found: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and type(module).__name__.endswith("Attention")
    ]
    return sorted(found, key=lambda module: module.layer_idx)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` [B,T] say where tokens stand; models with positions in space (M-RoPE) make their own."""
    known = "position_ids" in inspect.signature(model.forward).parameters
    return known and not hasattr(model.base_model, "get_rope_index")


def decoder(model: PreTrainedModel) -> nn.Module:
    """The text decoder with its embeddings and layers, without a head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The module that makes the model's cos and sin, or None for a model without rotary positions."""
    rotary = getattr(decoder(model), "rotary_emb", None)
    return rotary if rotary is not None else getattr(model.base_model, "rotary_emb", None)


def rope_type(model: PreTrainedModel) -> str:
    """RoPE type of the full-attention layers, as in `rope_parameters`; "" where they have no positions (Beam)."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    return "" if parameters is None else parameters.get("rope_type", "default")


def positions_have_axes(model: PreTrainedModel) -> bool:
    """Whether tokens of pictures have positions of time, row and column, each for a section of a head's channels."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    return "mrope_section" in parameters


def rotary_tables(rotary: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, R] of the model's rotary module at these positions."""
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return rotary(like, positions, layer_type="full_attention")
    return rotary(like, positions)
