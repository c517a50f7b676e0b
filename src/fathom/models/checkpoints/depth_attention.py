"""Checkpoints of Depth-Attention's authors (arXiv 2606.05014): a Llama config with their fields, Qwen3's tensor names.

Their `config.json` says `model_type: llama`, but the model has QK-norm weights (`q_norm`, `k_norm`) and applies
`k_norm` *after* the rotation. These fields say which model was trained:

| field | meaning |
|---|---|
| recurrent_model | their code mixes only if it is true; published configs lack it, their training command sets it |
| use_depth_attention | published configs say true; false: no mixing |
| depth_softmax_stride, depth_attention_stride | stride; the first wins in their code, which falls back to 1 |
| depth_recent_window, depth_attention_recent_window | recent window |
| cross_layer_mode, cross_layer_pattern | "depth_softmax" is Depth-Attention |
| use_qk_norm, scale_embeds | as their names say |
| baseline_mode | a rival's model ("attnres", "denseformer", "mhc") |
"""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

STRIDES = ("depth_softmax_stride", "depth_attention_stride")
WINDOWS = ("depth_recent_window", "depth_attention_recent_window")
MARKS = ("use_depth_attention", "cross_layer_mode", "cross_layer_pattern", "baseline_mode", *STRIDES, *WINDOWS)
QWEN3_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "attention_bias", "attention_dropout", "tie_word_embeddings", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "dtype",
)  # fmt: skip


def recognised(stock: PreTrainedConfig) -> bool:
    """Whether a config is of that layout."""
    return stock.model_type == "llama" and any(getattr(stock, mark, None) is not None for mark in MARKS)


def translate(stock: PreTrainedConfig, changes: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The stock config whose class reads the tensors of such a config, and `changes` with its mixer added.

    Any other config is returned unchanged. Options of a `mixer` in `changes` override the config's one by one. Warns,
    naming the field, where the config does not say how the model was trained.

    Raises:
        ValueError: the config is of a rival's model, another mixing mode, two strides, scaled embeddings of unknown
            factor or MLP biases; or another mixer is asked for though keys are normalised after the rotation.
    """
    if not recognised(stock):
        return stock, changes

    def refuse(field: str, remedy: str):
        raise ValueError(f"Depth-Attention config field {field}={getattr(stock, field)!r}: {remedy}")

    if getattr(stock, "baseline_mode", None) is not None:
        refuse("baseline_mode", "the authors' models of other methods are not implemented here")
    for field in ("cross_layer_mode", "cross_layer_pattern"):
        if getattr(stock, field, None) not in (None, "depth_softmax"):
            refuse(field, "only 'depth_softmax' is Depth-Attention")
    if getattr(stock, "scale_embeds", False) and changes.get("embed_scale") is None:
        refuse("scale_embeds", "the config does not give the factor; pass embed_scale")
    if getattr(stock, "pretraining_tp", 1) != 1:
        refuse("pretraining_tp", "only 1 is implemented here")

    mixer: dict[str, Any] = {"name": "depth_attention"}
    if getattr(stock, "use_qk_norm", True):
        if getattr(stock, "mlp_bias", False):
            refuse("mlp_bias", "not implemented here together with QK-norm")
        mixer["k_norm_position"] = "post_rope"
        stock_fields = {field: getattr(stock, field) for field in QWEN3_FIELDS}
        translated: PreTrainedConfig = Qwen3Config(**stock_fields)
    else:
        translated = stock.__class__(**{field: getattr(stock, field) for field in (*QWEN3_FIELDS, "mlp_bias")})

    given = changes.get("mixer")
    asked = {"name": given} if isinstance(given, str) else dict(given or {})
    if asked and asked.get("name") != "depth_attention":
        if "k_norm_position" in mixer:
            raise ValueError(
                f"mixer={given!r}: this checkpoint normalises keys after the rotation, which mixer='depth_attention' "
                "does; without mixing give it source_schedule='explicit', sources=(), recent_window=0"
            )
        return translated, changes
    if not asked:
        mixes, used = getattr(stock, "recurrent_model", None), getattr(stock, "use_depth_attention", None)
        if used is False and mixes:
            refuse("use_depth_attention", f"recurrent_model={mixes} says the opposite; pass mixer to decide")
        if used is False:
            mixes = False
        if mixes is None:
            _warn("recurrent_model", "the authors' code mixes only if it is true; taken as true")
        if mixes is False:
            return translated, {**changes, "mixer": {**mixer, "source_schedule": "explicit", "sources": ()}}
    if "recent_window" not in asked:
        mixer["recent_window"] = _one_of(stock, WINDOWS) or 0
    if "stride" not in asked:
        mixer["stride"] = _one_of(stock, STRIDES)
        if mixer["stride"] is None and asked.get("source_schedule", "absolute_stride").endswith("stride"):
            half = max(1, stock.num_hidden_layers // 2)
            _warn(
                STRIDES[1],
                f"taken as half the layers, {half}, the paper's; the authors' code takes 1. Pass mixer to decide",
            )
    return translated, {**changes, "mixer": {**mixer, **asked}}


def _one_of(stock: PreTrainedConfig, fields: tuple[str, ...]) -> int | None:
    """The value of a field with two names."""
    given = {field: getattr(stock, field) for field in fields if getattr(stock, field, None) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"Depth-Attention config fields disagree: {given}; pass mixer to decide")
    return next(iter(given.values()), None)


def _warn(field: str, remedy: str) -> None:
    warnings.warn(f"the checkpoint's config does not say how it was trained: {field} is absent; {remedy}", stacklevel=4)
