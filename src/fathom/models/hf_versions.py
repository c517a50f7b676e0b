"""Differences between the supported transformers versions (5.15 … newest) that the decoder meets.

| since | what moved |
|---|---|
| by 5.24 | a traced mask builder leaves out a plain causal mask; 5.17 always builds it |
| by 5.24 | `adapter_kwargs` say where in a local folder an adapter lies; 5.17 looks beside the weights |
| by 5.24 | checkpointed layers keep their cache where no gradient is wanted; 5.17 takes it away |
| 5.24 | models take the cache as `cache`; before, as `past_key_values` (an alias until 5.40), and outputs likewise |
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import find_adapter_config_file

from fathom.decoding.growing import GrowingLayer
from fathom.decoding.versions import CACHE_NAME
from fathom.ops.biased_attention import FlexBias
from fathom.ops.cached_attention import Newest
from fathom.ops.visibility import CAUSAL, Visibility

GROWING = (DynamicLayer, GrowingLayer)  # cache layers that keep every token

# `adapter_kwargs` with which transformers' loaders look for an adapter in vain.
NO_ADAPTER = {"subfolder": "no-adapter"}


@contextlib.contextmanager
def weights_alone() -> Iterator[dict[str, Any]]:
    """A context whose arguments, given to transformers' loaders in it, keep them from reading an adapter as well."""
    with contextlib.ExitStack() as stack:
        if "_commit_hash" in inspect.signature(find_adapter_config_file).parameters:
            for place in ("integrations.peft", "models.auto.auto_factory"):
                stack.enter_context(mock.patch(f"transformers.{place}.find_adapter_config_file", return_value=None))
        yield {"adapter_kwargs": NO_ADAPTER}


def visible_mask(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    visibility: Visibility = CAUSAL,
) -> Any:
    """The mask in the form that the attention backend reads (None, a 4-D tensor, a BlockMask, …).

    `position_ids` that restart are read as packed documents; None says that there are none. Raises ValueError where
    the backend has no kernel for the visibility.
    """
    if isinstance(attention_mask, dict):  # prepared by generate() for compileable caches
        return attention_mask["full_attention"]
    sdpa = str(config._attn_implementation).startswith("sdpa")
    simple = visibility.is_causal or visibility.is_full
    if attention_mask is None and position_ids is None and cache is None and sdpa and simple:
        # Plain causal, or all: SDPA's own flag says it. Traced, 5.17 would build a [B, 1, T, T] mask here,
        # which costs the causal kernel: a third of a compiled training step at 768 × 12 layers and 2048 tokens.
        return None
    if not visibility.is_causal:
        return _other_mask(config, inputs_embeds, attention_mask, cache, position_ids, visibility)
    if sdpa and attention_mask is None and cache is not None and _keeps_all(cache):
        if inputs_embeds.shape[1] == 1:
            return None  # sees everything
        if cache.get_seq_length():
            return Newest()
    if not getattr(config, "is_causal", True):  # transformers' builder would follow the config
        config = copy.copy(config)
        config.is_causal = True
    return create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{CACHE_NAME: cache},
    )


def _keeps_all(cache: Cache) -> bool:
    """Whether this cache keeps all tokens in order, so that new ones see all earlier ones and no mask is needed.

    For several new tokens, such as a later part of a long prompt, transformers' builder would make a [B, 1, T, cached +
    T] mask. It grows with the text and keeps the causal kernel from being used.
    """
    if torch.compiler.is_compiling() or not isinstance(cache, DynamicCache):
        return False
    return all(type(layer) in GROWING for layer in cache.layers)


def _other_mask(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    visibility: Visibility,
) -> Any:
    """The mask of a visibility other than causal."""
    if attention_mask is not None and attention_mask.ndim == 4:  # made by the caller
        return attention_mask
    restarts = None
    if position_ids is not None and cache is None and attention_mask is None:
        rows = position_ids.expand(len(inputs_embeds), -1)
        restarts = rows.diff(prepend=rows[:, :1] - 1) != 1
    if visibility.is_full and restarts is None:
        return create_bidirectional_mask(
            config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **{CACHE_NAME: cache}
        )
    backend = str(config._attn_implementation)
    if "flash" in backend:
        what = visibility if restarts is None else f"{visibility} with packed documents"
        raise ValueError(f"{backend} has no kernel for {what}; use attn_implementation='sdpa'")
    device, length = inputs_embeds.device, inputs_embeds.shape[1]
    seen = 0 if cache is None else cache.get_seq_length()
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    key = torch.arange(keys, device=device)
    query = torch.arange(seen, seen + length, device=device)[:, None]
    real = key < seen + length
    if attention_mask is not None:
        real = real & F.pad(attention_mask.bool(), (0, keys - attention_mask.shape[1]))[:, None]
        start = attention_mask.bool().int().argmax(-1)[:, None, None]  # tokens are counted from the first real one
        visible = visibility(query - start, key - start) & real
    elif restarts is not None:
        document, start = restarts.cumsum(-1), torch.where(restarts, key, 0).cummax(-1).values[:, :, None]
        visible = visibility(query - start, key - start) & (document[:, :, None] == document[:, None])
    else:
        visible = (visibility(query, key) & real)[None]
    visible = visible.expand(len(inputs_embeds), length, keys)
    if backend == "flex_attention":
        count = len(visible)
        blocks = create_block_mask(lambda row, _, q, k: visible[row, q, k], count, None, length, keys, device=device)
        return FlexBias(None, blocks)  # uncompiled on a CPU: the compiler's C++ is wrong for some of these masks
    if "sdpa" in backend:
        return visible[:, None]
    zero = inputs_embeds.new_zeros(())
    return torch.where(visible[:, None], zero, torch.finfo(zero.dtype).min)


def cache_config(config: PreTrainedConfig, passes: int) -> PreTrainedConfig:
    """The config for a Cache constructor: it has one cache layer per pass and decoder layer."""
    if passes == 1:
        return config
    config = copy.copy(config)
    config.num_hidden_layers = config.num_hidden_layers * passes
    return config


@contextlib.contextmanager
def generating_cache_for(model: PreTrainedModel, passes: int) -> Iterator[None]:
    """A context in which generate() makes its cache (dynamic, static, quantised, offloaded) with passes · L layers."""
    config = model.config
    model.config = cache_config(config, passes)
    try:
        yield
    finally:
        model.config = config


def new_cache(config: PreTrainedConfig, passes: int) -> Cache:
    """An empty dynamic cache with passes · layers cache layers."""
    cache = DynamicCache(config=config)  # not of `cache_config`: torch 2.11 cannot trace its copy
    for _ in range(passes - 1):
        cache.layers += DynamicCache(config=config).layers
    return cache


def check_cache_layers(cache: Cache, config: PreTrainedConfig, passes: int, depth: str) -> None:
    """Refuse a cache whose layer list cannot hold passes · layers entries (index pass·L + layer)."""
    needed = passes * config.num_hidden_layers
    grows = getattr(cache, "layer_class_to_replicate", None) is not None
    if len(cache.layers) != needed and not (grows and len(cache.layers) == 0):
        raise ValueError(
            f"{CACHE_NAME} has {len(cache.layers)} layers, but depth={depth!r} keeps one for each of {passes} passes × "
            f"{config.num_hidden_layers} layers = {needed}; pass an empty DynamicCache() or let generate() make it"
        )
    keys, heads = getattr(cache.layers[0], "keys", None) if cache.layers else None, config.num_key_value_heads
    if isinstance(keys, torch.Tensor) and keys.ndim == 4 and keys.shape[1] != heads:
        raise ValueError(
            f"{CACHE_NAME} holds {keys.shape[1]} key/value heads a token, but the model projects {heads}: it is of "
            "another model; pass an empty DynamicCache()"
        )


def layers_lose_cache(model: PreTrainedModel) -> bool:
    """Whether checkpointed layers run without a cache in this forward; run again, they would write it twice."""
    always = CACHE_NAME == "past_key_values"
    return model.training and (always or torch.is_grad_enabled()) and model.is_gradient_checkpointing


@dataclasses.dataclass
class FathomOutput(CausalLMOutputWithPast):
    """transformers' output, and with `output_auxiliary=True` the methods' losses, traces and statistics by name.

    Attributes:
        losses: auxiliary losses, as they were added to `loss`.
        trace: per-token facts of the depth method (passes, gates, masses), each [B, T, …].
        auxiliary: router statistics and the like: a value for every layer that ran, in order, [runs, …].
    """

    losses: dict[str, torch.Tensor] | None = None
    trace: dict[str, torch.Tensor] | None = None
    auxiliary: dict[str, torch.Tensor] | None = None


def causal_lm_output(cache: Cache | None, **fields: Any) -> FathomOutput:
    """The output with the cache under this version's name."""
    return FathomOutput(**{CACHE_NAME: cache}, **fields)  # type: ignore[arg-type]
