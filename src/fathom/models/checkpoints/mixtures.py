"""Stock mixtures of experts: Qwen2-MoE, Mixtral and Qwen3-MoE as the feed-forward method `moe`, and back.

Tensors have the same names and shapes in the classes of all three and in `moe`. Options that the classes lack are
folded into weights, where that leaves the function unchanged:

    ρ ≠ 1                        the experts' down_proj · ρ
    a constant a (Qwen2-MoE)     the shared down_proj · 2a, and a zero row as its gate, whose sigmoid is ½
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fathom.models.configuration import FathomConfig
from fathom.models.registry import build_options

# What of a stock config the section reads.
READ = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "norm_topk_prob", "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip


def is_mixture(config: FathomConfig) -> bool:
    """Whether the layers of this config are mixtures of experts."""
    return config.feed_forward["name"] == "moe"


def section_of(stock: PreTrainedConfig) -> dict[str, Any]:
    """The `feed_forward` section of a stock mixture's config. For a uniform router transformers' balance loss is k and
    ours is 1, so its coefficient is ours / k."""
    shared = stock.shared_expert_intermediate_size if stock.model_type == "qwen2_moe" else 0
    mixtral, k = stock.model_type == "mixtral", stock.num_experts_per_tok
    return {
        "name": "moe",
        "experts": stock.num_local_experts if mixtral else stock.num_experts,
        "active": k,
        "width": stock.intermediate_size if mixtral else stock.moe_intermediate_size,
        "shared": shared,
        "shared_gate": "sigmoid" if shared else 1.0,
        "norm_topk_prob": True if mixtral else stock.norm_topk_prob,
        "balance": stock.router_aux_loss_coef * k,
    }


def family_of(config: FathomConfig) -> str:
    """The stock class that can hold this mixture. Raises ValueError that names the option that no class has."""
    options = build_options("feed_forward", config.feed_forward)
    shared = options.shared != 0

    def refuse(option: str, value: Any, why: str):
        raise ValueError(f"feed_forward option {option}={value!r}: {why}")

    if not config.gated_mlp:
        raise ValueError("gated_mlp=False: no stock mixture has networks without a gate; keep the Fathom checkpoint")
    if options.score == "sigmoid":
        refuse("score", options.score, "no stock class of this backbone scores experts so; keep the Fathom checkpoint")
    if config.backbone == "qwen3":
        if shared:
            refuse("shared", options.shared, "Qwen3-MoE has no shared expert; keep the Fathom checkpoint")
        return "qwen3_moe"
    if config.backbone != "llama":
        raise ValueError(f"backbone={config.backbone!r}: has no stock mixture; keep the Fathom checkpoint")
    if not shared and not options.renormalised:
        refuse("norm_topk_prob", False, "Mixtral's gates sum to 1; keep the Fathom checkpoint")
    return "qwen2_moe" if shared else "mixtral"


def stock_fields(config: FathomConfig, family: str) -> dict[str, Any]:
    """The fields of the stock config that correspond to the section."""
    options = build_options("feed_forward", config.feed_forward)
    width = config.intermediate_size // options.slices if options.width is None else options.width
    fields = {"num_experts_per_tok": options.active, "router_aux_loss_coef": options.balance / options.active}
    if family == "mixtral":
        return {**fields, "num_local_experts": options.experts, "intermediate_size": width}
    fields.update(num_experts=options.experts, moe_intermediate_size=width, norm_topk_prob=options.renormalised)
    if family == "qwen2_moe":
        shared = config.intermediate_size if options.shared is None else options.shared
        fields.update(shared_expert_intermediate_size=shared, qkv_bias=config.attention_bias)
    return fields


def folded(state: dict[str, Tensor], config: FathomConfig) -> dict[str, Tensor]:
    """The tensors with which a stock class computes the same function.

    Raises ValueError where groups are chosen whole though the rows of their experts differ: stock classes choose
    expert by expert.
    """
    options = build_options("feed_forward", config.feed_forward)
    state = dict(state)
    for name in list(state):
        if name.endswith("mlp.gate.weight") and options.selection == "group" and options.slices > 1:
            rows = state[name].unflatten(0, (options.groups, options.slices))
            if not torch.equal(rows, rows[:, :1].expand_as(rows)):
                raise ValueError(
                    "feed_forward option selection='group': stock classes choose expert by expert, and the rows within "
                    f"the groups of {name} differ; train with selection='expert', or keep the Fathom checkpoint"
                )
        if name.endswith("mlp.experts.down_proj") and options.scale != 1.0:
            state[name] = state[name] * options.scale
        if name.endswith("mlp.shared_expert.down_proj.weight") and options.shared_gate != "sigmoid":
            state[name] = state[name] * (2.0 * options.shared_gate)
            gate = state[name].new_zeros(1, config.hidden_size)
            state[name.replace("shared_expert.down_proj", "shared_expert_gate")] = gate
    return state
