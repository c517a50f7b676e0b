"""What of a model trains (`training.trains`): everything, feed-forward networks, routers, or matrices beside layers."""

from __future__ import annotations

import copy
import importlib.util

from torch import nn

from fathom.models.causal_lm import FathomForCausalLM
from fathom.train.recipe import LowRank


def freeze(model: FathomForCausalLM, trains: str) -> None:
    """Freeze all parameters but those of feed-forward networks, or of their routers. Raises ValueError for networks
    without a router."""
    if trains in ("all", "lora"):
        return
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ValueError(f"training.trains={trains!r}: only a decoder's layers have such parts; use 'all' or 'lora'")
    modules = [layer.mlp for layer in layers]
    if trains == "router":
        modules = [getattr(mlp, name) for mlp in modules for name in mlp.routers if hasattr(mlp, name)]
        if not modules:
            name = model.config.feed_forward["name"]
            raise ValueError(
                f"training.trains='router': feed_forward={name!r} has no router; use 'all' or 'feed_forward'"
            )
    model.requires_grad_(False)
    for module in modules:
        module.requires_grad_(True)


def add_low_rank(model: nn.Module, options: LowRank) -> None:
    """Add LoRA matrices to layers; only these train. Raises ImportError without peft, ValueError for targets that the
    model lacks."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("training.trains='lora' needs peft: pip install 'fathom-lm[peft]'")
    from peft import LoraConfig, inject_adapter_in_model

    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = set(options.targets) - known
    if missing:
        raise ValueError(f"training.lora.targets={list(options.targets)!r}: the model's layers are {sorted(known)}")
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and end in options.targets and id(module.weight) in tables:
            raise ValueError(
                f"training.lora.targets={list(options.targets)!r}: the weights of {end} are those of the input "
                f"embeddings, which merging would change too; leave {end} out, or untie them (tie_word_embeddings)"
            )
    inject_adapter_in_model(
        LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,  # type: ignore[arg-type]  # a factor: any number will do
            lora_dropout=options.dropout,
            target_modules=list(options.targets),
        ),
        model,
    )


def merge_low_rank(model: nn.Module) -> nn.Module:
    """A copy of the model with LoRA merged into its layers; the model itself if it has none."""
    if importlib.util.find_spec("peft") is None:
        return model
    from peft.tuners.lora import LoraLayer

    if not any(isinstance(module, LoraLayer) for module in model.modules()):
        return model
    merged = copy.deepcopy(model)
    for name, module in list(merged.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)  # type: ignore[operator]
            merged.set_submodule(name, module.get_base_layer())
    return merged
