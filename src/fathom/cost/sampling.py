"""Cost of an answer of a masked diffusion model, by prompt, answer, steps, blocks and cache.

L = P + G columns, G/B blocks of s steps. A pass of n columns that read k keys each and predicts h hidden tokens:

    n · (linear + method) + n · 4·D·heads·layers·k  +  h · 2dV          (matrix products; 2dV: the head)

    none         every step n = k = L
    prefix       a block's first step n = k = L; the others n = L − a from its start a, k = L
    dual         the same with n = B
    sparse_dllm  a block's first delay + 1 steps n = k = L; the others n = B, k = ⌊r (L − B)⌋ + B
    dkv_cache    every cache_steps-th step of a block n = k = L; the others n = the hidden and the last revealed, k = L

Block diffusion runs the prompt's whole blocks once; then every step, and every finished block once more, has n = B.
Keys are k = L, of which a mask hides those that are not written yet.

The schedule is `linear`, and the policy reveals as many tokens as the schedule says.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from fathom.cost.flops import flop_terms, method_counts
from fathom.diffusion import DKVCache, Dual, Prefix, SparseDLLM
from fathom.diffusion.base import Block
from fathom.diffusion.generation_config import DiffusionGenerationConfig, aligned, for_blocks
from fathom.models.configuration import FathomConfig


@dataclasses.dataclass(frozen=True)
class SamplingCost:
    """The cost of one row's answer.

    Attributes:
        full, block: passes over all columns, and over some.
        columns: tokens that go through the model.
        flops: of its matrix products.
        cache_bytes: the most that the cache keeps.
    """

    full: int
    block: int
    columns: int
    flops: float
    cache_bytes: int


def sampling_cost(
    config: FathomConfig, prompt: int, sampled: DiffusionGenerationConfig, dtype: torch.dtype = torch.float32
) -> SamplingCost:
    """The cost of an answer to `prompt` tokens.

    Raises ValueError for a model that is no diffusion model, and for a cache whose cost depends on the text.
    """
    if config.diffusion["name"] == "none":
        raise ValueError("diffusion='none': the model writes from left to right, a token for a forward pass")
    if config.diffusion["name"] == "block":
        return block_cost(config, prompt, sampled, dtype)
    cache: Any = sampled.block_cache
    if sampled.infill or (isinstance(cache, DKVCache) and (cache.mode == "greedy" or config.diffusion["shift"])):
        raise ValueError(
            "infill=True, or dkv_cache with mode='greedy' or with a shifted model: the cost depends on the text; "
            "choose another block_cache"
        )
    length = prompt + sampled.max_new_tokens
    counts = method_counts(config)
    terms = flop_terms(config, counts, length, False)
    heads = counts["depth"].heads - 1  # within the passes, of every column
    of_column = terms.linear + terms.method + heads * 2 * config.hidden_size * config.vocab_size
    of_key, of_head = terms.attention / length, 2 * config.hidden_size * config.vocab_size
    layers = counts["depth"].passes * config.num_hidden_layers
    channels = config.num_key_value_heads * config.head_dim
    full = partly = columns = 0
    most = flops = 0.0
    for block in sampled.blocks(prompt, 0, config.diffusion["shift"]):
        hidden, last = block.stop - block.start, 0
        count = hidden
        for step in range(block.steps):
            later = length - block.stop
            n, keys, kept, scored = work(cache, block, step, length, hidden + later + last, config)
            full, partly, columns, most = full + (n == length), partly + (n < length), columns + n, max(most, kept)
            first = cache.first_reveal(block, step)
            flops += n * (of_column + of_key * keys) + (1 if first else hidden) * of_head + scored
            quota = hidden if step == block.steps - 1 else count // block.steps + (step < count % block.steps)
            last = 1 if first else min(quota, hidden)
            hidden -= last
            if not hidden:
                break
    size = torch.empty((), dtype=dtype).element_size()
    return SamplingCost(full, partly, columns, flops, round(2 * layers * channels * most * size))


def block_cost(
    config: FathomConfig, prompt: int, sampled: DiffusionGenerationConfig, dtype: torch.dtype
) -> SamplingCost:
    """The cost of an answer of a block diffusion model."""
    size, length = config.diffusion["block_length"], prompt + sampled.max_new_tokens
    counts = method_counts(config)
    terms = flop_terms(config, counts, length, False)
    heads = counts["depth"].heads - 1
    of_column = terms.linear + terms.method + terms.attention + heads * 2 * config.hidden_size * config.vocab_size
    whole = prompt - prompt % size
    columns, passes, scored = whole, 0, 0
    for block in aligned(for_blocks(sampled, size), prompt, prompt % size, size):
        start, hidden = block.start - block.start % size, block.stop - block.start
        last = block.stop == length
        count = hidden
        for step in range(block.steps):
            columns, passes, scored = columns + block.stop - start, passes + 1, scored + hidden
            hidden -= count // block.steps + (step < count % block.steps)
        columns, passes = columns + (0 if last else size), passes + (not last)
    flops = columns * of_column + scored * 2 * config.hidden_size * config.vocab_size
    layers, channels = counts["depth"].passes * config.num_hidden_layers, config.num_key_value_heads * config.head_dim
    kept = 2 * layers * channels * length * torch.empty((), dtype=dtype).element_size()
    return SamplingCost(int(whole > 0), passes, columns, flops, kept)


def work(
    cache: Any, block: Block, step: int, length: int, open_columns: int, config: FathomConfig
) -> tuple[int, float, float, float]:
    """(Columns, keys of each, columns kept in a layer, FLOPs of scores) of a step, as means over layers.

    open_columns: hidden columns and those revealed in the step before.
    """
    if isinstance(cache, DKVCache):
        whole = step % cache.cache_steps == 0
        return (length if whole else open_columns), length, length, 0
    if isinstance(cache, SparseDLLM):
        start = block.first if cache.first_step == "extra_query" else block.start
        n, outside = block.stop - start, length - (block.stop - start)
        ratios = [cache.ratio(layer, config.num_hidden_layers) for layer in range(config.num_hidden_layers)]
        free = outside if cache.evict == "all" else length - block.stop
        kept = sum(outside - free + math.floor(ratio * free) for ratio in ratios) / len(ratios)
        if step > cache.delay_steps:
            return n, kept + n, kept, 0
        asked = {"dot": config.num_key_value_heads, "softmax": config.num_attention_heads}
        asked["snapkv"] = config.num_attention_heads * (block.stop - block.start)
        layers = method_counts(config)["depth"].passes * config.num_hidden_layers
        scored = layers * 2 * asked.get(cache.score, 0) * config.head_dim * outside * (step == cache.delay_steps)
        return length, length, kept if step == cache.delay_steps else 0, scored
    if isinstance(cache, Dual):
        since = step - cache.delay_steps
        if since < 0:
            return length, length, 0, 0
        if since == 0 or (cache.refresh and since % cache.refresh == 0):
            return length, length, length, 0
        stop = length if isinstance(cache, Prefix) else block.stop
        return stop - block.first, length, length, 0
    return length, length, 0, 0
