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

from fathom.caches import METHODS, CacheMethod, CodebookTraining, train_codebooks
from fathom.caches.base import LayerContext, State

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
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=1, head_dim=16, **SIZES))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=None, **SIZES))
    elif family == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))
    elif family == "qwen3_sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
        model = Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=16, **sliding, **SIZES))
    elif family in ("fathom", "depth_attention"):
        causal_lm = pytest.importorskip("fathom.models.causal_lm", reason="Fathom's own decoder is not in yet")
        from fathom.models.configuration import FathomConfig

        mixer = {"mixer": "depth_attention"} if family == "depth_attention" else {}
        config = FathomConfig(backbone="llama", num_key_value_heads=2, **mixer, **SIZES)
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


FAMILIES = ("llama", "qwen3", "mistral", "gpt_neox", "qwen3_sliding", "fathom", "depth_attention")
SHARED: dict[str, torch.nn.Module] = {}


def get_model(family: str) -> torch.nn.Module:
    if family not in SHARED:
        SHARED[family] = build(family)
    return SHARED[family]


# Each method with room for every token of a test (LARGE) and small enough to compress (SMALL).
LARGE: dict[str, dict[str, Any]] = {
    "full": {},
    "treekv": {"budget": 256},
    "weightedkv": {"budget": 256},
    "streaming_llm": {"budget": 256},
    "h2o": {"budget": 256},
    "tova": {"budget": 256},
    "snapkv": {"budget": 256},
    "pyramidkv": {"budget": 256},
    "kivi": {"group": 8, "residual": 256},
    "freqkv": {"budget": 256},
    "scored": {"budget": 256},
    "vqkv": {"n_local": 256},
    "fourier_attention": {"n_local": 256, "frequencies": 8},
}
LARGE["treekv"]["n_recent"] = LARGE["weightedkv"]["n_recent"] = LARGE["h2o"]["n_recent"] = 64
SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "treekv": {"budget": 16, "n_sink": 2, "n_recent": 6, "block": 3},
    "weightedkv": {"budget": 16, "n_sink": 2, "n_recent": 6, "chunk": 5},
    "streaming_llm": {"budget": 16, "n_sink": 2},
    "h2o": {"budget": 16, "n_recent": 6},
    "tova": {"budget": 16},
    "snapkv": {"budget": 16, "n_recent": 4},
    "pyramidkv": {"budget": 16, "n_recent": 4, "beta": 4},
    "kivi": {"group": 8, "residual": 16},
    "freqkv": {"budget": 16, "n_sink": 2, "n_recent": 1, "ratio": 0.4},
    "scored": {"budget": 16, "n_recent": 2, "scorer": "keydiff"},  # knorm ties where a token repeats
    "vqkv": {"n_sink": 2, "n_local": 8, "flush_every": 3},
    "fourier_attention": {"n_sink": 2, "n_local": 4, "frequencies": 4, "headroom": 64},
}


def make(name: str, size: dict[str, dict[str, Any]], family: str = "llama", **changes: Any) -> CacheMethod:
    options = {**size[name], **changes}
    if name == "vqkv":
        options = {"codebooks": codebooks(family), **options}
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    return METHODS[name](**{key: value for key, value in options.items() if key in known})


FOLDER = tempfile.TemporaryDirectory(prefix="fathom-cache-tests-")


@functools.cache
def codebooks(family: str, **options: Any) -> str:
    """A file of codebooks for one of the tiny models, trained for a moment."""
    path = f"{FOLDER.name}/{family}-{sorted(options.items())}.safetensors"
    sizes = {"key_stages": 3, "key_entries": 16, "value_stages": 2, "value_entries": 20, "steps": 5, "batch": 256}
    text = torch.randint(1, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(5))
    train_codebooks(get_model(family), text, CodebookTraining(**{**sizes, **options})).save(path)
    return path


def token_by_token(method: CacheMethod) -> CacheMethod:
    """The method's defining form, where it has one."""
    mode = {"treekv": "sequential"}.get(method.name, "exact")
    changes = {"prefill": mode} if hasattr(method, "prefill") and method.name not in ("snapkv", "pyramidkv") else {}
    return dataclasses.replace(method, **changes)


def new_state(method: CacheMethod, rope: Any = None, index: int = 0, layers: int = 3) -> State:
    return method.new_state(LayerContext(index, layers, rope))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()
