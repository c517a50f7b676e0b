"""Tests of what a model family does with keys, positions and pads, run on the model itself: families are too many to
list.

Attention is replaced by a function that records queries and keys and returns zeros, so that a token's states depend on
the token and its position alone.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from fathom.caches import versions
from fathom.caches.base import CompressedLayer, LayerContext, RowGroups
from fathom.caches.methods.full import Full
from fathom.ops.rotary import rotate

SPY = "fathom_spy"  # attention that only notes its queries and keys
LAYERS = 4  # whose queries and keys are compared: families alternate between at most so many kinds
TRIED: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()  # once a model


class OtherMask(ValueError):
    """Attention that is not causal."""


def pads_are_exact(model: PreTrainedModel, mask: Callable[..., Any]) -> bool:
    """Whether a left-padded row can equal the row alone in this model, tried in two forwards of four tokens.

    Where the model takes position ids, the padded row is given its own, counted from 0. Families that count otherwise
    (RoBERTa: from padding_idx + 1) or that count columns (BART) answer False.

    Raises:
        ValueError: the model's attention cannot work on a compressed cache.
    """
    if model not in TRIED:
        with _as_in_evaluation(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            TRIED[model] = _try_pads(model, mask)
    return TRIED[model]


def _try_pads(model: PreTrainedModel, mask: Callable[..., Any]) -> bool:
    first, *text = _ordinary_tokens(model)
    whole = torch.tensor([text, text], device=versions.execution_device(model))
    padded = torch.tensor([text, [first, *text[:-1]]], device=whole.device)
    visible = torch.tensor([[1] * len(text), [0] + [1] * (len(text) - 1)], device=whole.device)
    try:
        alone = _queries_and_keys(model, mask, input_ids=whole)
    except (OtherMask, torch.OutOfMemoryError):
        raise
    except Exception as error:
        try:
            model(input_ids=whole)
        except Exception:  # text alone is not what this model reads
            return True
        raise ValueError(
            f"{type(model).__name__} does not run on a compressed cache, whose keys and values its attention must hand "
            f"to transformers' AttentionInterface untouched; use the full cache (four tokens gave "
            f"{type(error).__name__}: {error})"
        ) from error
    known: dict[str, Tensor] = {"attention_mask": visible}
    if versions.takes_positions(model):
        known["position_ids"] = (visible.cumsum(-1) - 1).clamp(min=0)
    try:
        beside_pads = _queries_and_keys(model, mask, input_ids=padded, **known)
    except (OtherMask, torch.OutOfMemoryError):
        raise
    except Exception:  # the model cannot be given its positions
        return False
    return all(
        _same(b[0], a[0]) and _same(b[1, :, 1:], a[1, :, :-1])
        for pair, other in zip(alone[:LAYERS], beside_pads[:LAYERS])
        for a, b in zip(pair, other)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    tolerance = max(1e-4, 4 * torch.finfo(b.dtype).eps)
    return bool((a - b).norm() <= tolerance * b.norm())


def _ordinary_tokens(model: PreTrainedModel) -> list[int]:
    """A token to pad with, and four others that are no special tokens."""
    config = versions.text_config(model)
    named = [value for name, value in {**model.config.to_dict(), **config.to_dict()}.items() if "token" in name]
    special = {value for item in named for value in (item if isinstance(item, list) else [item])}
    pad = config.pad_token_id
    special.add(pad)
    ordinary = [token for token in range(min(config.vocab_size, 4 + len(special))) if token not in special]
    ordinary = (ordinary or [0]) * 4
    return [ordinary[0] if pad is None else pad, *ordinary[:4]]


def _queries_and_keys(model: PreTrainedModel, mask: Callable[..., Any], **inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """What the model's attention layers hand over in one forward on an empty compressed cache."""
    found: list[tuple[Tensor, Tensor]] = []

    def attend(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, CompressedLayer):
            if mask is not None and mask.ndim != 2:
                raise OtherMask(
                    f"{type(model).__name__} does not attend causally, or masks in its own way: caches compute plain "
                    "causal attention; use the full cache"
                )
            assert key.pending is not None
            key, value = key.pending
        found.append((query, key))
        return query.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    layers: list[Any] = versions.stock_layers(model)
    for index, layer in enumerate(layers):
        if versions.is_full_attention(layer):
            layers[index] = CompressedLayer(Full(), LayerContext(index, len(layers), None), RowGroups())
            layers[index].fused = True
    AttentionMaskInterface.register(SPY, mask)
    with lent_attention(model, SPY, attend):
        model(use_cache=True, **inputs, **{versions.CACHE_NAME: Cache(layers=layers)})
    return found


@contextlib.contextmanager
def _as_in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """A context in which dropout is off. A model in eval mode is left untouched, as other threads may run it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# PyTorch 2.11 cannot trace a subclass of str: there, a copy of the config keeps the lent name.
TRACED = Version(torch.__version__) >= Version("2.13")


class Lent(str):
    """An attention name that a config has for a while. A copy of the config gets the name that it replaced."""

    replaced: str | None

    def __reduce__(self) -> Any:
        return _itself, (self.replaced,)


def _itself(name: str | None) -> str | None:
    return name


@contextlib.contextmanager
def lent_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the model has this attention. Afterwards every part of the model has its own again."""
    replaced = [(config, config._attn_implementation) for config in versions.configs(model)]
    AttentionInterface.register(name, function)
    try:
        model.set_attn_implementation(name)
        for config, before in replaced:
            if config._attn_implementation == name:
                lent = Lent(name)
                lent.replaced = before
                config._attn_implementation_internal = lent if TRACED else name
        yield
    finally:
        for config, before in replaced:
            config._attn_implementation_internal = before


@torch.no_grad()
def rotates_half_split(module: nn.Module, rotary: nn.Module, model: PreTrainedModel) -> bool:
    """Whether this attention module rotates its keys, found on random hidden states. False: a layer without positions
    (NoPE).

    Raises:
        ValueError: it rotates them in another way than `ops.rotary` (half-split), or not as its last step.
    """
    if type(module).__module__.startswith("fathom."):  # calls ops.rotary itself
        if getattr(module, "k_norm_after_rotation", False):
            raise ValueError("keys are normalised after the rotation")
        return True
    hidden = torch.randn(1, 3, versions.text_config(model).hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(versions.execution_device(module), model.dtype)
    cos, sin = versions.rotary_tables(rotary, hidden, torch.tensor([[0, 1, 5]], device=hidden.device))
    try:
        plain = _keys(module, hidden, (torch.ones_like(cos), torch.zeros_like(sin)))
        turned = _keys(module, hidden, (cos, sin))
        expected = rotate(plain, cos, sin)
    except Exception as error:  # another signature, or tables of another width
        raise ValueError("its attention does not take tables of cosines and sines") from error
    near = 0.03 * plain.abs().max().item()  # rounding of 16-bit types is less, another rotation far more
    for keys, answer in ((expected, True), (plain, False)):
        if torch.allclose(turned, keys, rtol=0, atol=near):
            return answer
    raise ValueError("keys are not rotated half-split")


def _keys(module: Any, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The keys [1,G,3,D] that an attention module hands to its attention function."""
    held: list[Tensor] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(key)
        return query.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    AttentionInterface.register(SPY, attend)
    probe = copy.copy(module)  # with a config of its own: forwards of other threads read the module's
    probe.__dict__.pop("forward", None)  # a wrapped one (accelerate) would call the module
    probe.config = copy.copy(module.config)
    probe.config._attn_implementation_internal = SPY
    hooks = versions.offload_hooks(module)
    for hook in hooks:
        hook.pre_forward(module)
    try:
        probe(hidden_states=hidden, position_embeddings=tables, attention_mask=None)
    finally:
        for hook in reversed(hooks):
            hook.post_forward(module, None)
    return held[0]
