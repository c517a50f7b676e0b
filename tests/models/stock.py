"""Tiny random models of transformers' own classes: the oracle of the model floor."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from tiny import VOCABULARY, perturb

SHARED: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **SHARED, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {**SHARED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

# Every structural option of the four families that the decoder claims to implement.
CONFIGS = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "llama-plain-heads": lambda: LlamaConfig(**{**GROUPED, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama-biases-tied-odd-heads": lambda: LlamaConfig(
        **{**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True}
    ),
    "llama-gelu-theta": lambda: LlamaConfig(
        **GROUPED, hidden_act="gelu", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "qwen3-tied-biases": lambda: Qwen3Config(
        **{**GROUPED, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
    "gpt_neox-sequential": lambda: GPTNeoXConfig(**SIZES, use_parallel_residual=False, hidden_act="gelu_new"),
    "gpt_neox-tied-half-rotary-no-bias": lambda: GPTNeoXConfig(
        **{**SIZES, "tie_word_embeddings": True, "attention_bias": False},
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2-untied": lambda: GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False, activation_function="relu"),
}


def random_stock(config: Any, seed: int = 0) -> PreTrainedModel:
    """A random stock model in eval mode whose biases and gains are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    perturb(model, seed)
    return model.eval()


def stock_model(name: str) -> PreTrainedModel:
    return random_stock(CONFIGS[name]())
