"""Cost of a model in closed form from its config: FLOPs, bytes, parameters."""

from fathom.cost.carbon import Carbon, estimate_carbon
from fathom.cost.flops import FlopTerms, forward_flops_per_token, training_flops_per_token
from fathom.cost.sizes import MixingCost, ParameterCounts, kv_bytes_per_token, mixing_per_token, parameter_counts

__all__ = [
    "Carbon",
    "FlopTerms",
    "MixingCost",
    "ParameterCounts",
    "estimate_carbon",
    "forward_flops_per_token",
    "kv_bytes_per_token",
    "mixing_per_token",
    "parameter_counts",
    "training_flops_per_token",
]
