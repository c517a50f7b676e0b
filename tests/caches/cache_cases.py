"""Tiny random models of every family that the caches serve, made once a session."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fathom.caches import METHODS, CacheMethod
from fathom.caches.base import LayerContext, State
from fathom.caches.token_budget import TokenBudget

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    elif family == "wide":  # heads of the least width that every method's defaults take
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, head_dim=32, **{**SIZES, "num_hidden_layers": 2}))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=1, head_dim=16, **SIZES))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=None, **SIZES))
    elif family == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))
    elif family == "qwen3_sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
        model = Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=16, **sliding, **SIZES))
    elif family in ("fathom", "depth_attention", "rope_pp"):
        causal_lm = pytest.importorskip("fathom.models.causal_lm", reason="Fathom's own decoder is not in yet")
        from fathom.models.configuration import FathomConfig

        method = {"depth_attention": {"mixer": "depth_attention"}, "rope_pp": {"positions": "rope_pp"}}.get(family, {})
        config = FathomConfig(backbone="llama", num_key_value_heads=2, **method, **SIZES)
        model = causal_lm.FathomForCausalLM(config)
    else:
        raise ValueError(family)
    return randomize(model).eval()


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Sharper attention than at initialisation, so that what a cache drops can be seen in the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[1] ** 0.5)
    return model


FAMILIES = ("llama", "qwen3", "mistral", "gpt_neox", "qwen3_sliding", "fathom", "depth_attention", "rope_pp")
SHARED: dict[str, torch.nn.Module] = {}


def get_model(family: str) -> torch.nn.Module:
    if family not in SHARED:
        SHARED[family] = build(family)
    return SHARED[family]


# Options by case, as the classes say: small enough to compress a text of 40 tokens, and with room for all of it.
# A method's first variant is the case of its name, others are name:1, name:2, …
SMALL: dict[str, dict[str, Any]] = {}
LARGE: dict[str, dict[str, Any]] = {}


def add_cases(cls: type[CacheMethod]) -> None:
    for number, options in enumerate(cls.variants):
        case = f"{cls.name}:{number}" if number else cls.name
        SMALL[case], LARGE[case] = options, cls.identity


for _cls in METHODS.values():
    add_cases(_cls)


def method_of(case: str) -> type[CacheMethod]:
    return METHODS[case.partition(":")[0]]


def make(case: str, size: dict[str, dict[str, Any]], family: str = "llama", **changes: Any) -> CacheMethod:
    cls = method_of(case)
    options = {**needed_file(cls, family), **size[case], **changes}
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in options.items() if key in known})


def needed_file(cls: type[CacheMethod], family: str = "llama") -> dict[str, str]:
    """The option that names the method's calibration file, if it cannot do without one."""
    if cls.calibration is None or not cls.calibration.needed:
        return {}
    return {cls.calibration.option: calibrated(cls, family)}


FOLDER = tempfile.TemporaryDirectory(prefix="fathom-cache-tests-")


@functools.cache
def calibrated(cls: type[CacheMethod], family: str, **options: Any) -> str:
    """A method's calibration file for one of the tiny models, made in a moment."""
    assert cls.calibration is not None
    path = f"{FOLDER.name}/{cls.name}-{family}-{sorted(options.items())}"
    text = torch.randint(1, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(5))
    cls.calibrate(get_model(family), text, **{**cls.calibration.variant, **options}).save(path)
    return path


def codebooks(family: str, **options: Any) -> str:
    return calibrated(METHODS["vqkv"], family, **options)


def token_by_token(method: CacheMethod) -> CacheMethod:
    """The method's defining form: the mode of its prefill that takes one token at a time, where it has one."""
    modes = method.prefill_modes() if isinstance(method, TokenBudget) else ()
    forms = [dataclasses.replace(method, prefill=mode) for mode in modes]
    return next((form for form in forms if form.sequential), method)


def new_state(method: CacheMethod, rope: Any = None, index: int = 0, layers: int = 3) -> State:
    return method.new_state(LayerContext(index, layers, rope))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()
