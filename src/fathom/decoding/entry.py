"""`generate()`: transformers' own, with our loop for greedy decoding and sampling.

transformers prepares and checks all arguments (`custom_generate` is its seam for another loop). Calls that our loop
does not support go through transformers' loop; the reason is logged once at debug level (`fathom.decoding`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from fathom.decoding import switch
from fathom.decoding.loop import sample
from fathom.decoding.prompt import tokens_at_once
from fathom.decoding.switch import say

NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]  # generate()'s arguments, in order
PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
CHUNKED = (*PLAIN, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
# What is an option neither of generation nor of the model
NEITHER = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
# What a prompt of tokens comes with: with anything else (pictures, embeddings) it is read as the model reads it.
OF_TOKENS = {"inputs", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "cache_position"}

# Rows and length of a prompt, and whether rows are padded → how many tokens one call reads (None: all)
Cut = Callable[[int, int, bool], int | None]


def exact_cut(rows: int, length: int, padded: bool) -> int | None:
    """Tokens of a prompt to read at once, for a model whose cached forward equals the whole one."""
    return tokens_at_once(rows, length)


def whole_prompt(rows: int, length: int, padded: bool) -> int | None:
    """None, for a model that reads the whole prompt in one call."""
    return None


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """generate()'s arguments by name."""
    return {**dict(zip(NAMES, args)), **kwargs}


def generate(model: Any, stock: Callable[..., Any], *args: Any, cut: Cut = whole_prompt, **kwargs: Any) -> Any:
    """The result of `model.generate(*args, **kwargs)`; `stock` is transformers' method.

    cut: how a long prompt is read, unless the caller sets `prefill_chunk_size`.
    """
    kwargs = named(args, kwargs)
    if not switch.FAST or kwargs.get("custom_generate") is not None or kwargs.get("cache_implementation") == "paged":
        return stock(**kwargs)
    given = {name: value for name, value in kwargs.items() if name not in (*NAMES, *NEITHER)}
    config, of_model = model._prepare_generation_config(kwargs.get("generation_config"), **given)
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode in CHUNKED and set(of_model) <= OF_TOKENS and config.use_cache is not False:
        size = _chunk(config, kwargs, cut)
        if size is not None:
            config.prefill_chunk_size = size
            kwargs = _with_config(kwargs, prefill_chunk_size=size)
    reason = _reason(model, config, mode, kwargs, of_model)
    if reason:
        say(f"transformers' own loop runs this generate(): {reason}")
        if config.compile_config is not None and mode not in PLAIN:  # of others transformers says it
            switch.logger.warning("compile_config is not used: %s", reason)
        return stock(**kwargs)
    if config.stop_strings is not None:  # transformers hands no tokenizer on beside `custom_generate`
        tokenizer = kwargs.pop("tokenizer", None)
        if tokenizer is None:
            return stock(**kwargs)  # transformers says what is wrong
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or ())
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
        kwargs = {**_with_config(kwargs, stop_strings=None), "stopping_criteria": criteria}
    loop = functools.partial(sample, streamer=kwargs.get("streamer"))
    return stock(**{**kwargs, "custom_generate": loop})


def _reason(model: Any, config: GenerationConfig, mode: Any, kwargs: dict[str, Any], of_model: dict[str, Any]) -> str:
    """Why transformers' own loop must run this call; "" where ours does."""
    family = type(model).__name__
    other = sorted(set(of_model) - OF_TOKENS - {"logits_to_keep"})
    world = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if mode not in PLAIN:
        return f"mode {mode.value}"
    if kwargs.get("synced_gpus") or (kwargs.get("synced_gpus") is None and world):
        return "several processes generate in step"
    if model.config.is_encoder_decoder:
        return f"{family} is an encoder-decoder"
    if other:
        return f"arguments of the model: {', '.join(other)}"
    if config.use_cache is False:
        return "use_cache=False"
    if config.cache_implementation is not None:
        return f"cache_implementation={config.cache_implementation!r}"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states are returned"
    if config.token_healing or config.is_assistant:
        return "token healing, or an assistant of another model"
    if config.stop_strings is not None and model.generation_config.stop_strings is not None:
        return "stop_strings of the model's own generation_config"
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "_prefill"):
        if name in vars(model):
            return f"{family}.{name} is another than its class has, as prompt tuning of peft puts there"
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            return f"{family} has its own {name}"
    if not model._supports_default_dynamic_cache():
        return f"{family} makes its own cache"
    return ""


def _chunk(config: GenerationConfig, kwargs: dict[str, Any], cut: Cut) -> int | None:
    """Tokens of the prompt to read at once; None: all, or as the caller says."""
    inputs = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    if config.prefill_chunk_size is not None or inputs is None or inputs.ndim != 2:
        return None
    if config.cache_implementation not in (None, "dynamic"):
        return None
    mask = kwargs.get("attention_mask")
    padded = mask is not None and not bool((mask == 1).all())
    if mask is None and config.pad_token_id is not None:  # transformers would take these for pads
        padded = bool((inputs == config.pad_token_id).any())
    rows = inputs.shape[0] * max(config.num_beams or 1, config.num_return_sequences or 1)
    size = cut(rows, inputs.shape[1], padded)
    return None if size is None or size >= inputs.shape[1] else size


def _with_config(kwargs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """generate()'s arguments with these generation options, passed the same way as the caller passes such options."""
    config = kwargs.get("generation_config")
    kwargs = {name: value for name, value in kwargs.items() if name not in options}
    if config is None:
        return {**kwargs, **{name: value for name, value in options.items() if value is not None}}
    config = copy.deepcopy(config)
    for name, value in options.items():
        setattr(config, name, value)
    return {**kwargs, "generation_config": config}
