"""`compress_vision`: a stock vision-language model reads fewer vision tokens, for as long as a `with` block lasts.

`checkpoints.py` keeps the same in a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fathom.vision.base import Compressor
from fathom.vision.families import FAMILIES, REFUSED, Family


def family_of(model_type: str) -> Family:
    """Raises ValueError for a model that no compressor knows, and says which it does."""
    if model_type in REFUSED:
        raise ValueError(f"model_type={model_type!r}: {REFUSED[model_type]}")
    if model_type.removeprefix("fathom_") not in FAMILIES:
        titles = ", ".join(f"{family.title} ({name})" for name, family in FAMILIES.items())
        raise ValueError(f"model_type={model_type!r}: no vision tokens to compress are known there; use {titles}")
    return FAMILIES[model_type.removeprefix("fathom_")]


def check(family: Family, compressor: Compressor) -> None:
    """Raises ValueError where the model needs a grid and the method gives none."""
    if not isinstance(compressor, Compressor):
        raise ValueError(f"method={compressor!r}: give a compressor, such as FourierVLM(tokens=144)")
    if family.needs_grid and not compressor.makes_a_grid:
        raise ValueError(
            f"method={compressor.name!r}: {family.title} gives every vision token a place in a grid, and this method "
            "keeps no grid; use one that does, such as fourier_vlm or average_pooling"
        )


@functools.cache
def with_compressor(added: type, cls: type) -> type:
    """The class of an instance, with `added` before it; its name and module stay, which saved files name."""
    return type(
        cls.__name__, (added, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "plain": cls}
    )


def plain_class(instance: Any) -> type:
    """The class that an instance has without a compressor."""
    return getattr(type(instance), "plain", type(instance))


def put(instance: Any, added: type, compressor: Compressor) -> None:
    """Let this instance ask the compressor."""
    instance.__class__ = with_compressor(added, plain_class(instance))
    instance.__dict__["compressor"] = compressor


def parts_of(model: Any, family: Family) -> list[tuple[nn.Module, type]]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper
    inner: Any = getattr(base, "model", base)
    return [(inner.get_submodule(path), added) for path, added in family.parts]


@contextlib.contextmanager
def compress_vision(model: Any, processor: Any, method: Compressor) -> Iterator[Any]:
    """Within the block, `processor` writes as many placeholders as `method` keeps, and `model` makes that many tokens.

    Only these two instances change; blocks may be nested, the innermost counts. `generate`, the Trainer and peft run as
    on the stock model. `processor` may be None where the ids come from elsewhere.

    Args:
        model: a stock LLaVA, LLaVA-NeXT, SmolVLM or Qwen2.5-VL model of transformers, or peft's wrapper of one.
        processor: the model's own.
        method: such as `FourierVLM(tokens=144)`.

    Raises:
        ValueError: a model or processor of another kind, a method that cannot serve it.
    """
    family = family_of(model.config.model_type)
    check(family, method)
    chosen = [(part, added, type(part)) for part, added in parts_of(model, family)]
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
    before = [instance.__dict__.get("compressor") for instance, _, _ in chosen]
    try:
        for instance, added, _ in chosen:
            put(instance, added, method)
        yield model
    finally:
        for (instance, _, cls), compressor in zip(chosen, before):
            instance.__class__ = cls
            if compressor is None:
                instance.__dict__.pop("compressor", None)
            else:
                instance.__dict__["compressor"] = compressor
