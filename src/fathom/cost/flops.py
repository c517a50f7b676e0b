"""Floating-point operations per token, in closed form from a `FathomConfig` alone.

One token's forward, a multiply-add counted as 2:

    F = passes · 2N_matmul  +  2dV · heads  +  passes · 4·L·H·D · keys  +  method      (matrix products)
        + elementwise                                                               (its own term)

A method that gives a token S slots runs S times the linear maps a pass, and each slot reads up to S·T keys: S·(S·T+1)/2
in all, S² growth.

N_matmul: weights of the layers' linear maps. keys: mean number of keys a query reads, (T+1)/2 under a causal mask over
T tokens, T without one. d hidden size, V vocabulary, L layers, H query heads that attention sees, D head dim, which in
attention counts the channels of a score bias too (positions/base.py).

Elementwise work is counted by one rule: every scalar addition, subtraction, multiplication and division is 1, and so
is every evaluation of a scalar function (exp, rsqrt, an activation). A sum of n terms is n additions, as in a matrix
product. Comparisons (masks, maxima), sign changes, copies, gathers, casts and random numbers are 0. RoPE's cos and sin
belong to positions, not to tokens, and are 0 too. Hence, over n entries,

    RMSNorm  4n + 3:   squares n, mean n + 1, + ε 1, rsqrt 1, scale n, gain n
    LayerNorm  7n + 4: mean n + 1, centre n, squares n, mean n + 1, + ε 1, rsqrt 1, scale n, gain n, shift n
    softmax  4n:       subtract the maximum n, exp n, sum n, divide n
    RoPE  3n:          x · cos + rotated x · sin
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fathom.models.configuration import FathomConfig
from fathom.models.method import Counts
from fathom.models.registry import SECTIONS, build_options, lookup
from fathom.ops.visibility import BIDIRECTIONAL, CAUSAL, Blocks, Visibility


@dataclasses.dataclass(frozen=True)
class FlopTerms:
    """FLOPs per token by term.

    Attributes:
        linear: the layers' linear maps, passes · 2N_matmul.
        attention: scores and weighted values, passes · 4·L·H·D·keys.
        head: evaluations of the output head, 2dV each.
        method: further matrix products of the methods (a vocabulary mixture, a projection).
        elementwise: everything that is not a matrix product, by the rule of this module.
    """

    linear: float
    attention: float
    head: float
    method: float
    elementwise: float

    @property
    def matmul(self) -> float:
        """All matrix products: what papers and FLOP counters report."""
        return self.linear + self.attention + self.head + self.method

    @property
    def total(self) -> float:
        return self.matmul + self.elementwise


def method_counts(config: FathomConfig, ran: Sequence[float] | None = None) -> dict[str, Counts]:
    """`Counts` of the method of every section of the config.

    ran: for a depth method whose tokens stop on their own, the measured shares of tokens that run step 0, 1, …
        (`evaluate.steps_run`); None: all tokens run all steps. Raises ValueError for impossible shares, and for a
        method without such steps.
    """
    counts = {}
    for registry in SECTIONS:
        method: Any = lookup(registry, getattr(config, registry)["name"])
        options = build_options(registry, getattr(config, registry))
        if registry != "depth" or ran is None:
            counts[registry] = method.counts(config, options)
            continue
        if not method.adaptive:
            raise ValueError(f"ran={ran!r}: tokens do not stop on their own under depth={method.name!r}; leave it out")
        bounds = (1.0, *ran)
        if len(ran) != method.most_steps(options) or any(not 0 <= b <= a for a, b in zip(bounds, ran, strict=False)):
            raise ValueError(
                f"ran={ran!r}: needs {method.most_steps(options)} shares between 0 and 1, none above the one before it"
            )
        counts[registry] = method.counts(config, options, ran=tuple(ran))
    return counts


def forward_flops_per_token(
    config: FathomConfig,
    sequence_length: int,
    causal: bool = True,
    parallel: bool = False,
    ran: Sequence[float] | None = None,
) -> FlopTerms:
    """FLOPs of one token's forward, the mean over a sequence of T tokens (equation and rule: this module's docstring).

    Args:
        sequence_length: T, tokens of the sequence; counts decoding T tokens with a cache as well.
        causal: a query reads what it sees, (T+1)/2 keys on average in causal order; False counts T,
            as FLOP counters do for masked kernels.
        parallel: all tokens run at once, as in training: methods whose slots depend on each other need more forwards.
        ran: measured shares of tokens that run each step (`method_counts`). Tokens are assumed to stop independently of
            their positions and of each other.

    Raises:
        ValueError: sequence_length below 1; `ran` does not fit the config.
    """
    counts = method_counts(config, ran)
    if parallel and counts["depth"].parallel is not None:
        counts["depth"] = counts["depth"].parallel
    return flop_terms(config, counts, sequence_length, causal)


def flop_terms(config: FathomConfig, counts: dict[str, Counts], sequence_length: int, causal: bool) -> FlopTerms:
    """The terms of this module's equation, from the methods' counts by section."""
    depth, mixer, residual = counts["depth"], counts["mixer"], counts["residual"]
    positions, feed_forward = counts["positions"], counts["feed_forward"]
    slots, layers = sum(n * times for n, times in depth.forwards.items()), config.num_hidden_layers
    repeats = slots / depth.passes  # mixers and topologies count all passes of one slot
    norms = slots if depth.final_norms is None else depth.final_norms
    if depth.keys is not None:
        keys = depth.keys * mean_keys(config, sequence_length, causal)
    else:
        keys = sum(times * n * mean_keys(config, n * sequence_length, causal) for n, times in depth.forwards.items())
    scores = config.heads_seen * keys  # per layer
    layers_elementwise = layers * (slots * block_elementwise(config) + (5 + depth.biased) * scores)
    layers_elementwise += slots * (positions.elementwise + feed_forward.elementwise)
    methods = repeats * (mixer.elementwise + residual.elementwise) + depth.elementwise
    embedding = 0 if config.embed_scale == 1.0 else config.hidden_size
    place: Any = lookup("positions", config.positions["name"])
    added = place.added(config, build_options("positions", config.positions))
    per_norm = norm_elementwise(config, config.hidden_size) + added
    return FlopTerms(
        linear=slots * (layers * 2 * attention_weights(config) + feed_forward.matmul),
        attention=layers * 4 * (config.head_dim + config.score_channels) * scores,
        head=depth.heads * 2 * config.hidden_size * config.vocab_size,
        method=depth.matmul + repeats * (mixer.matmul + residual.matmul) + slots * positions.matmul,
        elementwise=layers_elementwise + norms * per_norm + embedding + methods,
    )


def training_flops_per_token(
    config: FathomConfig,
    sequence_length: int,
    gradient_checkpointing: bool = False,
    causal: bool = True,
    ran: Sequence[float] | None = None,
) -> float:
    """Matrix-product FLOPs of one token's forward and backward: 3 × the parallel forward's + recomputed.

    The backward pass of a matrix product is two products of the same size; some products have none. Products that a
    method computes again in the backward pass count as well. With `gradient_checkpointing` (torch's non-reentrant form,
    one region for each layer) so do the layers, except their last product, which no gradient reads unless a dropout
    follows it or the residual topology's `write` multiplies it. Elementwise work is left out: its backward depends on
    the kernel. `ran` as in `forward_flops_per_token`. Raises ValueError for sequence_length below 1.
    """
    forward = forward_flops_per_token(config, sequence_length, causal, parallel=True, ran=ran)
    counts = method_counts(config, ran)
    depth, mixer, residual = counts["depth"], counts["mixer"], counts["residual"]
    depth = depth if depth.parallel is None else depth.parallel
    slots, product = sum(n * times for n, times in depth.forwards.items()), forward.matmul
    layers = forward.linear + forward.attention
    if depth.no_gradient is not None:
        without = flop_terms(config, {**counts, "depth": depth.no_gradient}, sequence_length, causal)
        slots -= sum(n * times for n, times in depth.no_gradient.forwards.items())
        product -= without.matmul
        layers -= without.linear + without.attention
    repeats = slots / depth.passes
    layers += repeats * (mixer.matmul + residual.matmul)
    recomputed: float = depth.recomputed + repeats * (mixer.recomputed + residual.recomputed)
    if depth.checkpointed:
        recomputed += layers
    if gradient_checkpointing:
        recomputed += layers
        if not config.residual_dropout:
            skipped = slots - repeats * residual.recomputed_outputs / config.num_hidden_layers
            recomputed -= skipped * counts["feed_forward"].last_matmul
    total = forward.matmul + 2 * product + recomputed
    if config.diffusion["name"] == "block":  # a row runs twice, noisy and clean; the head reads the noisy copy alone
        return 2 * total - 3 * forward.head
    return total


def mean_keys(config: FathomConfig, sequence_length: float, causal: bool) -> float:
    """The mean number of keys that a query reads in a sequence, by the config's visibility; `causal=False`: all T."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length!r}: must be at least 1")
    visibility: Visibility = CAUSAL if config.is_causal and causal else BIDIRECTIONAL
    if config.diffusion["name"] == "block" and causal:
        visibility = Blocks(config.diffusion["block_length"])
    return visibility.mean_keys(sequence_length)


def attention_weights(config: FathomConfig) -> int:
    """Weights of one layer's attention: queries d·H·D, output d·D·(heads that attention sees), keys and values d·G·D
    each."""
    heads = config.num_attention_heads + config.heads_seen + 2 * config.num_key_value_heads
    return config.hidden_size * config.head_dim * heads


def attention_biases(config: FathomConfig) -> int:
    """Biases of one layer's attention; each is one addition per token."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return heads * config.head_dim * config.attention_bias + config.hidden_size * config.attention_output_bias


def block_elementwise(config: FathomConfig) -> int:
    """Elementwise FLOPs of one layer and token, without attention's scores, positions, the feed-forward network and the
    residual topology."""
    d, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    work = 2 * norm_elementwise(config, d) + attention_biases(config)
    if config.qk_norm:
        work += heads * norm_elementwise(config, config.head_dim)
    return work + (d if config.parallel_residual else 0)  # attention + MLP, before the topology adds their sum


def norm_elementwise(config: FathomConfig, width: int) -> int:
    """RMSNorm 4n + 3, LayerNorm 7n + 4."""
    return 7 * width + 4 if config.norm == "layernorm" else 4 * width + 3
