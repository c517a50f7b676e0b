"""Parameters of a model and bytes of its KV cache, in closed form from a `FathomConfig` alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fathom.cost.flops import attention_biases, attention_weights, method_counts
from fathom.models.configuration import FathomConfig


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Attributes:
    total: all parameters, a tied head once.
    non_embedding: without input table, learned positions and head: the N of scaling laws.
    active: without experts that a token does not run.
    """

    total: int
    non_embedding: int
    active: int


def parameter_counts(config: FathomConfig) -> ParameterCounts:
    """Number of parameters, without making the model."""
    d, layers = config.hidden_size, config.num_hidden_layers
    norm = 2 if config.norm == "layernorm" else 1  # gain, and shift
    qk_norm = 2 * norm * config.head_dim if config.qk_norm else 0
    block = attention_weights(config) + attention_biases(config) + 2 * norm * d + qk_norm
    costs = method_counts(config)
    methods = {section: counts.parameters for section, counts in costs.items()}
    positions = methods.pop("positions")
    non_embedding = layers * block + norm * d + sum(methods.values())
    tables = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    total = non_embedding + d * tables + positions
    return ParameterCounts(total, non_embedding, active=total - sum(counts.idle for counts in costs.values()))


@dataclasses.dataclass(frozen=True)
class MixingCost:
    """The cost of cross-layer mixing per token on top of an ordinary decoder, as the methods' papers count it.

    Attributes:
        flops: of scores, projections and weighted sums alone, a multiply-add as 2.
        bytes: read from and written to memory, every operand once.
    """

    flops: float
    bytes: float


def mixing_per_token(config: FathomConfig, dtype: torch.dtype = torch.bfloat16) -> MixingCost:
    """Cost of the config's mixer and residual topology (closed forms: `counts` of the methods)."""
    counts = method_counts(config)
    slots, parts = counts["depth"].slots, counts.values()
    return MixingCost(slots * sum(c.mixing for c in parts), slots * dtype.itemsize * sum(c.traffic for c in parts))


def kv_bytes_per_token(
    config: FathomConfig, dtype: torch.dtype = torch.bfloat16, ran: Sequence[float] | None = None
) -> float:
    """Bytes that one token keeps in the cache: passes · slots · L · 2 (keys, values) · G·D · bytes of `dtype`.

    A key also has the channels of a score bias, and a biased slot one number in fp32 or wider. With measured shares
    `ran` (`method_counts`) it is a mean over tokens.
    """
    depth = method_counts(config, ran)["depth"]
    layer = config.num_key_value_heads * (2 * config.head_dim + config.score_channels) * dtype.itemsize
    bias = depth.biased * torch.promote_types(dtype, torch.float32).itemsize
    return depth.slots * (depth.passes * config.num_hidden_layers * layer + bias)
