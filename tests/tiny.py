"""Tiny models and the comparison that tests share. Nothing here knows how a method works."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fathom import FathomConfig, FathomForCausalLM

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {},
    "gpt2": {},
    "qwen2": {"num_key_value_heads": 2},
}


def perturb(model: torch.nn.Module, seed: int = 0) -> None:
    """Move every parameter off its initial value (zero biases, unit gains, closed gates would hide mistakes)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def tiny_model(family: str = "llama", seed: int = 0, **fields: Any) -> FathomForCausalLM:
    """A random tiny model in eval mode."""
    torch.manual_seed(seed)
    model = FathomForCausalLM(FathomConfig(backbone=family, **{**SIZES, **FAMILY_SIZES[family], **fields}))
    perturb(model, seed)
    return model.eval()


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random token ids, special tokens left out."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """max|a − b| ≤ tolerance · max|b|, of equal shapes, and b not trivially zero."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item()
    assert 0 < scale < float("inf")
    error = (actual - expected).abs().max().item()
    assert error <= tolerance * scale, f"max difference {error:.3g} > {tolerance:g} × {scale:.3g}"
