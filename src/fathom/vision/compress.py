"""`compress_vision`: a context in which a stock vision-language model reads fewer vision tokens.

`checkpoints.py` keeps the same in a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fathom.vision.base import Compressor, LanguageCompressor, TowerCompressor
from fathom.vision.families import FAMILIES, REFUSED, Family
from fathom.vision.methods.mqt import MQT
from fathom.vision.watching import (
    ThinnedLayer,
    TowerAttention,
    Watch,
    WatchedAttention,
    WatchedModel,
    check_backend,
    query_and_key,
)

TOWERS = ("clip_vision_model", "dinov2")  # they have a CLS token, whose attention can be watched


def family_of(model_type: str) -> Family:
    """The family of a model type. Raises ValueError, with the supported ones, for any other."""
    if model_type in REFUSED:
        raise ValueError(f"model_type={model_type!r}: {REFUSED[model_type]}")
    if model_type.removeprefix("fathom_") not in FAMILIES:
        titles = ", ".join(f"{family.title} ({name})" for name, family in FAMILIES.items())
        raise ValueError(f"model_type={model_type!r}: no vision tokens to compress are known there; use {titles}")
    return FAMILIES[model_type.removeprefix("fathom_")]


def check(family: Family, compressor: Compressor) -> None:
    """Raise ValueError if the model needs a grid and the method makes none, or the method needs more than features."""
    if not isinstance(compressor, Compressor):
        raise ValueError(f"method={compressor!r}: give a compressor, such as FourierVLM(tokens=144)")
    if family.needs_grid and not compressor.makes_a_grid:
        raise ValueError(
            f"method={compressor.name!r}: {family.title} gives every vision token a place in a grid, and this method "
            "keeps no grid; use one that does, such as fourier_vlm or average_pooling"
        )
    if isinstance(compressor, TowerCompressor | LanguageCompressor | MQT) and not family.watched:
        raise ValueError(
            f"method={compressor.name!r}: it reads more than a picture's features, which is built for LLaVA alone, not "
            f"{family.title}; use another, such as fourier_vlm"
        )


@functools.cache
def with_compressor(added: type, cls: type) -> type:
    """A subclass of `added` and `cls`; it has the name and module of `cls`, which saved files name."""
    return type(
        cls.__name__, (added, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "plain": cls}
    )


def plain_class(instance: Any) -> type:
    """The class that an instance has without a compressor."""
    return getattr(type(instance), "plain", type(instance))


def put(instance: Any, added: type, compressor: Compressor, watch: Watch | None = None) -> None:
    """Give this instance the compressor, and the `Watch` that it shares with the model's other instances."""
    instance.__class__ = with_compressor(added, plain_class(instance))
    instance.__dict__["compressor"] = compressor
    if watch is not None:
        instance.__dict__["watch"] = watch


def parts_of(model: Any, family: Family, compressor: Compressor) -> tuple[list[tuple[nn.Module, type]], Watch]:
    """The modules that change, each with the class to put before its own, and the `Watch` that they share.

    Raises ValueError if the model lacks what the method reads.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper
    inner: Any = getattr(base, "model", base)
    parts = [(inner.get_submodule(path), added) for path, added in family.parts]
    watch = Watch()
    if isinstance(compressor, TowerCompressor):
        parts.append((tower_attention(inner, compressor), TowerAttention))
    elif isinstance(compressor, LanguageCompressor):
        layers = inner.language_model.layers
        check_backend(layers[0].self_attn.config)
        watch.layers = len(layers)
        assert compressor.tokens is not None or compressor.count((1, 1))
        stages = compressor.stages(compressor.tokens or 1, len(layers))
        parts += [(inner, WatchedModel), *((layer, ThinnedLayer) for layer in layers)]
        parts += [(layers[number].self_attn, WatchedAttention) for number in stages]
    elif isinstance(compressor, MQT) and not hasattr(inner.multi_modal_projector, "resampler"):
        raise ValueError(
            "method='mqt': it has weights of its own, which this model lacks; train a model with it (task vqa), or use "
            "another method, such as fourier_vlm"
        )
    return parts, watch


def tower_attention(inner: Any, compressor: TowerCompressor) -> nn.Module:
    """The attention module of the tower's layer that the method reads."""
    config, name = inner.config, compressor.name
    kind, layer = config.vision_config.model_type, config.vision_feature_layer
    if kind not in TOWERS or config.vision_feature_select_strategy != "default" or not isinstance(layer, int):
        raise ValueError(
            f"method={name!r}: reads the CLS token's attention in one layer of a tower of {' or '.join(TOWERS)} (here: "
            f"{kind}, vision_feature_layer={layer!r}, vision_feature_select_strategy="
            f"{config.vision_feature_select_strategy!r}); use another method, such as divprune"
        )
    attentions = [part for part in inner.vision_tower.modules() if query_and_key(part) is not None]
    if not attentions:
        raise ValueError(f"method={name!r}: no query and key projections found in this version's {kind}")
    wrote = layer % (len(attentions) + 1) - 1  # hidden state 0 is the embedding
    return attentions[min(max(wrote, 0) + compressor.next_layer, len(attentions) - 1)]


@contextlib.contextmanager
def compress_vision(model: Any, processor: Any, method: Compressor) -> Iterator[Any]:
    """A context in which `model` compresses vision tokens by `method`, and `processor` writes as many placeholders.

    Only these two instances change. Contexts may be nested; the innermost counts. `generate`, the Trainer and peft work
    as on the stock model. `processor` may be None if the ids come from elsewhere.

    Args:
        model: a stock LLaVA, LLaVA-NeXT, SmolVLM or Qwen2.5-VL model of transformers, or peft's wrapper of one.
        processor: the model's own.
        method: such as `FourierVLM(tokens=144)`.

    Raises:
        ValueError: a model or processor of another kind, a method that cannot serve it.
    """
    family = family_of(model.config.model_type)
    check(family, method)
    parts, watch = parts_of(model, family, method)
    chosen = [(part, added, type(part)) for part, added in parts]
    if processor is not None:
        if not {cls.__name__ for cls in type(processor).__mro__} & set(family.processors):
            raise ValueError(
                f"processor={type(processor).__name__}: it does not belong to {family.title}; use "
                f"{' or '.join(family.processors)}"
            )
        token = getattr(model.config, "image_token_id", None)
        if token is not None and processor.image_token_id != token:
            raise ValueError(
                f"processor: its image token is {processor.image_token_id}, the model's {token}; "
                "load both from one folder"
            )
        chosen.append((processor, family.processor, type(processor)))
    asked = {id(part) for part, _ in parts}
    outer = [(part, type(part)) for part in model.modules() if hasattr(type(part), "plain") and id(part) not in asked]
    names = ("compressor", "watch")
    before = [{name: instance.__dict__.get(name) for name in names} for instance, _, _ in chosen]
    try:
        for instance, added, _ in chosen:
            put(instance, added, method, watch)
        for instance, _ in outer:  # what a block around this one, or a checkpoint, asks beside these
            instance.__class__ = plain_class(instance)
        yield model
    finally:
        for instance, cls in outer:
            instance.__class__ = cls
        for (instance, _, cls), held in zip(chosen, before):
            instance.__class__ = cls
            for name, value in held.items():
                if value is None:
                    instance.__dict__.pop(name, None)
                else:
                    instance.__dict__[name] = value
