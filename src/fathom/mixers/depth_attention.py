"""Depth-Attention: cross-layer value mixing (arXiv 2606.05014).

    q̄       = mean of the query heads of each key/value head
    α_j     = softmax_j( <q̄^ℓ, k^j> / √D ),    j ∈ D(ℓ) ∪ {ℓ}, same token, fp32
    ṽ^ℓ     = α_ℓ v^ℓ + Σ_{j ∈ D(ℓ)} α_j ṽ^j
    O^ℓ     = CausalAttention(q^ℓ, k^ℓ, ṽ^ℓ)

The mix runs after QK-norm and rotation and before the cache write, at key/value-head resolution, so the cache holds ṽ
in the ordinary slot: no new parameters, no new state, and a new token's sources come from the same forward pass. (The
authors' code writes the raw value first, which makes its cached decoding wrong, and drops the padding mask.)

Under a multi-pass depth method each (pass, layer) counts as a layer of index pass·L + ℓ. The paper does not define the
sources there; `loop_sources` chooses between ours.
"""

from __future__ import annotations

import dataclasses

import torch

from fathom.mixers.base import Counts, Mixer, check_choice, check_range
from fathom.models.registry import build_options, lookup, register
from fathom.ops.depth_mix import depth_mix, depth_weights

SCHEDULES = ("absolute_stride", "relative_stride", "first_only", "all", "explicit")


@register("mixer", "depth_attention")
class DepthAttention(Mixer):
    """Values of a few earlier layers, mixed in by the layer's own query."""

    summary = "Each layer mixes the values of a few earlier layers into its own, weighted by its own query."
    equation = (
        "ṽ^ℓ = α_ℓ v^ℓ + Σ_{j ∈ D(ℓ)} α_j ṽ^j,  α = softmax_j(⟨q̄^ℓ, k^j⟩ / √D);  O^ℓ = CausalAttention(q^ℓ, k^ℓ, ṽ^ℓ)"
    )
    paper = "2606.05014"
    variants = (
        {},
        {"source_schedule": "all", "mix_target": "kv", "score_dtype": "float32"},
        {"source_schedule": "relative_stride", "stride": 1, "recent_window": 1, "mix_rule": "uniform"},
        {"source_schedule": "first_only", "mix_target": "k"},
    )
    identity = {"source_schedule": "explicit", "sources": ()}  # noqa: RUF012

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options; the defaults are the paper's experiments.

        source_schedule: "absolute_stride" (layers j < ℓ with j mod stride = 0), "relative_stride" (ℓ−s, ℓ−2s, …),
            "first_only" (layer 0), "all", or "explicit" (`sources`).
        stride: None means half the layers.
        recent_window: the last w layers are sources too.
        sources: for "explicit", one list of earlier layers per layer; () means none for every layer.
        mix_rule: "softmax", or the ablation "uniform" (1/M over sources and self).
        mix_target: "v", or the ablations "k" and "kv": the same weights mix the keys that attention reads, recursively;
            scores always use the unmixed keys.
        score_dtype: "model" takes the dot products in the model's dtype, "float32" in fp32; the softmax is fp32.
        k_norm_position: "pre_rope", or "post_rope" for the public checkpoints (QK-norm models).
        loop_sources: under a multi-pass depth method, "same_layer+stride" (the layer itself in earlier passes, and the
            schedule within the pass), "same_layer", or "unrolled_stride" (the schedule over pass·L + ℓ;
            not with "explicit").
        """

        source_schedule: str = "absolute_stride"
        stride: int | None = None
        recent_window: int = 0
        sources: tuple[tuple[int, ...], ...] | None = None
        mix_rule: str = "softmax"
        mix_target: str = "v"
        score_dtype: str = "model"
        k_norm_position: str = "pre_rope"
        loop_sources: str = "same_layer+stride"

        def __post_init__(self):
            name = "depth_attention"
            check_choice(name, "source_schedule", self.source_schedule, SCHEDULES)
            if self.stride is not None:
                check_range(name, "stride", self.stride, 1)
            check_range(name, "recent_window", self.recent_window, 0)
            check_choice(name, "mix_rule", self.mix_rule, ("softmax", "uniform"))
            check_choice(name, "mix_target", self.mix_target, ("v", "k", "kv"))
            check_choice(name, "score_dtype", self.score_dtype, ("model", "float32"))
            check_choice(name, "k_norm_position", self.k_norm_position, ("pre_rope", "post_rope"))
            check_choice(
                name, "loop_sources", self.loop_sources, ("same_layer+stride", "same_layer", "unrolled_stride")
            )
            if (self.source_schedule == "explicit") != (self.sources is not None):
                raise ValueError(
                    f"depth_attention option sources={self.sources!r}: give it with source_schedule='explicit' and "
                    f"only then (source_schedule={self.source_schedule!r})"
                )
            if self.sources is not None:  # lists in JSON and YAML
                kinds = list | tuple
                lists = isinstance(self.sources, kinds) and all(isinstance(layer, kinds) for layer in self.sources)
                if not lists or any(type(j) is not int for layer in self.sources for j in layer):
                    raise ValueError(
                        f"depth_attention option sources={self.sources!r}: give every layer a list of earlier layers' "
                        "numbers, say [[], [0], [0, 1]]; () means none for every layer"
                    )
                object.__setattr__(self, "sources", tuple(tuple(layer) for layer in self.sources))
            if self.source_schedule == "explicit" and self.loop_sources == "unrolled_stride":
                raise ValueError(
                    "depth_attention option loop_sources='unrolled_stride': a list of sources a layer has no stride to "
                    "unroll over passes; use 'same_layer+stride' or 'same_layer', or another source_schedule"
                )

        def layer_sources(self, layer: int, layers: int) -> tuple[int, ...]:
            """D(ℓ), ascending. `layers` sets the default stride, L//2."""
            stride = max(1, layers // 2) if self.stride is None else self.stride
            chosen = {
                "absolute_stride": range(0, layer, stride),
                "relative_stride": range(layer - stride, -1, -stride),
                "first_only": range(min(layer, 1)),
                "all": range(layer),
                "explicit": (self.sources or ((),) * (layer + 1))[layer] if self.source_schedule == "explicit" else (),
            }[self.source_schedule]
            return tuple(sorted({*chosen, *range(max(0, layer - self.recent_window), layer)}))

    def __init__(self, config, options):
        super().__init__(config, options)
        self.groups = config.num_key_value_heads
        self.sources = source_table(options, config.num_hidden_layers, config.passes)
        self.read = frozenset(j for sources in self.sources for j in sources)

    @classmethod
    def unsupported(cls, config, options):
        if getattr(config, "kv_lora_rank", None) is not None:
            return (
                "Depth-Attention on multi-head latent attention (kv_lora_rank) is unsupported: each layer's values lie "
                "behind its own up-projection, so a mixed value has no slot in the latent cache"
            )
        if options.k_norm_position == "post_rope" and not config.qk_norm:
            return f"k_norm_position='post_rope' needs qk_norm=True, and backbone={config.backbone!r} has none"
        layers = config.num_hidden_layers
        if options.stride is not None and options.stride >= layers and options.source_schedule == "relative_stride":
            return f"stride={options.stride} leaves no source in {layers} layers; use a stride below the layer count"
        if options.sources:
            if len(options.sources) != layers:
                return f"sources lists {len(options.sources)} layers, the model has {layers}"
            for layer, sources in enumerate(options.sources):
                for j in sources:
                    if not 0 <= j < layer:
                        return f"sources[{layer}] names layer {j}; a source must be an earlier layer, 0 … {layer - 1}"
        return None

    def source_layers(self, index):
        return self.sources[index]

    def is_source(self, index):
        return index in self.read

    def ask(self, query, sources):
        """The mean query q̄, taken before the rotation, with which it commutes. Taken after it, its gradient would be
        added to the queries' in memory before these are rotated back."""
        if not sources or self.options.mix_rule == "uniform" or query.shape[2] == self.groups:
            return None
        return query.unflatten(2, (self.groups, -1)).mean(3)

    def forward(self, query, key, value, sources, layer):
        target = self.options.mix_target
        if not sources:
            return key, value, (key, *(key if t == "k" else value for t in target))
        weights = self.weights(query, key, sources)
        # a state is (unmixed key, then for each letter of the target its mixed tensor)
        mixed = {
            letter: depth_mix(weights, [*(state[1 + i] for state in sources), key if letter == "k" else value])
            for i, letter in enumerate(target)
        }
        return mixed.get("k", key), mixed.get("v", value), (key, *(mixed[letter] for letter in target))

    def weights(self, query, key, sources):
        """The weights α_j: one [B, G, T, 1] for each source, the layer itself last."""
        if self.options.mix_rule == "uniform":
            count = len(sources) + 1
            wide = torch.promote_types(key.dtype, torch.float32)
            return (key.new_full((1, 1, 1, 1), 1 / count, dtype=wide),) * count
        keys = [*(state[0] for state in sources), key]
        return depth_weights(query.to(key.dtype), keys, self.options.score_dtype == "float32")

    @classmethod
    def k_norm_after_rotation(cls, options):
        return options.k_norm_position == "post_rope"

    @classmethod
    def counts(cls, config, options) -> Counts:
        table = source_table(options, config.num_hidden_layers, config.passes)
        mixing = [len(sources) + 1 for sources in table if sources]  # M_ℓ, layers without sources count 0
        candidates, targets = sum(mixing), len(options.mix_target)
        width = config.num_key_value_heads * config.head_dim
        scored = options.mix_rule == "softmax"
        positions: Any = lookup("positions", config.positions["name"])
        work = targets * (2 * candidates - len(mixing)) * width
        if scored:
            # scores: products and sums, 1/√D, softmax; before them the mean query of every key/value head, rotated
            work += 2 * candidates * width + 5 * candidates * config.num_key_value_heads
            if config.num_attention_heads > config.num_key_value_heads:
                turned = config.num_key_value_heads * positions.turned_channels(
                    config, build_options("positions", config.positions)
                )
                work += len(mixing) * (config.num_attention_heads * config.head_dim + width + 3 * turned)
        return Counts(
            elementwise=work,
            mixing=2 * (scored + targets) * width * candidates,
            traffic=width * ((scored + targets) * candidates + targets * len(table)),
        )


def source_table(options: DepthAttention.Options, layers: int, passes: int) -> list[tuple[int, ...]]:
    """The sources of every index pass·L + ℓ."""
    table = []
    for index in range(passes * layers):
        r, layer = divmod(index, layers)
        if options.loop_sources == "unrolled_stride":
            table.append(options.layer_sources(index, layers))
            continue
        earlier = tuple(p * layers + layer for p in range(r))
        within = tuple(r * layers + j for j in options.layer_sources(layer, layers))
        table.append(earlier if options.loop_sources == "same_layer" and passes > 1 else earlier + within)
    return table
