"""Initial values of every parameter, in one table.

| parameter | "scaled" (default from scratch) | "hf" |
|---|---|---|
| input table, learned positions, head | TN(√(2/(5d))) | N(initializer_range) |
| q, k, v, gate, up (of experts, too), router and method projections | TN(√(2/(5d))) | N(initializer_range) |
| o_proj, down_proj (write to the residual stream) | TN(√(2/(5d)) / √(2·L·steps)) | N(initializer_range) |
| biases | 0 | 0 |
| norm gains / shifts | 1 / 0 | 1 / 0 |
| other parameters of a method | the method's `initialize_parameters` | the same |
| embed_scale (config) | √d | 1 |

N(σ) is the normal distribution of mean 0 and standard deviation σ, TN(σ) the same cut at ±3σ. d = hidden size, L =
layers, steps = the most forwards of the stack that follow on one another for a token at inference. All methods of a
comparison are initialised by the same rule, as the rule changes the loss more than most methods do.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from transformers import initialization as init

from fathom.models.configuration import FathomConfig


def fill_matrix(weight: Tensor, config: FathomConfig, writes_residual: bool = False) -> None:
    """Fill a matrix, or several in one tensor, by the config's rule."""
    if config.init == "hf":
        init.normal_(weight, mean=0.0, std=config.initializer_range)
    else:
        std = math.sqrt(2 / (5 * config.hidden_size))
        if writes_residual:
            std /= math.sqrt(2 * config.num_hidden_layers * config.most_steps)
        init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


def initialize(module: nn.Module, config: FathomConfig) -> None:
    """Fill one module's own parameters by the config's rule (transformers calls this for every module).

    Raises TypeError for a module whose parameters no rule fills: after loading a checkpoint without them they would be
    uninitialised memory.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)  # type: ignore[arg-type]
    elif isinstance(module, nn.Linear | nn.Embedding):
        fill_matrix(module.weight, config, getattr(module, "writes_residual", False))
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)  # type: ignore[arg-type]
    elif hasattr(module, "initialize_parameters"):
        module.initialize_parameters()  # type: ignore[operator]
    elif not isinstance(module, nn.ParameterList | nn.ParameterDict):  # these are their owner's
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        if own:
            raise TypeError(
                f"{type(module).__name__} has parameters of its own ({', '.join(own)}) and no initialize_parameters() "
                "that fills them"
            )
