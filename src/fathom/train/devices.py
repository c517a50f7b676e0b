"""Runs on several devices: what they refuse, and what lies together in a shard of FSDP2."""

from __future__ import annotations

from typing import Any

from fathom.train.recipe import MethodConfig, Recipe, Training


def check_graphs(training: Training, devices: int) -> None:
    """Raise ValueError for training.compile='graphs' on several devices."""
    if training.compile == "graphs" and devices > 1:
        raise ValueError(
            f"training.compile='graphs' on {devices} devices: gradients that lie in CUDA graphs are not averaged over "
            "devices; use 'layers'"
        )


def why_not_sharded(recipe: Recipe, method: MethodConfig, config: Any) -> str:
    """Why a method of the recipe, with this config of a model, does not train under FSDP2; "" where it does."""
    depth = getattr(config, "depth", None) or {}
    if recipe.trains(method) == "lora":
        return "training.trains='lora' under FSDP: its shards cannot be merged; use DDP (torchrun)"
    if recipe.training.optimizer != "adamw":  # transformers' Adafactor mixes shards with tensors
        return (
            f"training.optimizer={recipe.training.optimizer!r} under FSDP: it needs whole matrices; use DDP (torchrun) "
            "or 'adamw'"
        )
    if depth.get("gate_only"):  # Phases sets gradients to zero in hooks, which shards do not have
        return (
            f"{depth['name']} option gate_only={depth['gate_only']!r} under FSDP: gradients of weights that rest would "
            "be clipped with the others; use DDP (torchrun) or gate_only: 0"
        )
    if depth.get("prefill") == "sequential" and depth.get("thoughts") and recipe.task.pads:
        return (
            f"{depth['name']} option prefill='sequential' under FSDP: held-out rows of task {recipe.task.name!r} "
            "differ in length, and processes with shorter ones would not gather weights as often; use prefill: jacobi "
            "or DDP (torchrun)"
        )
    return ""


def check_version(plugin: Any) -> None:
    """Raise ValueError for FSDP1, which is accelerate's default. plugin: accelerate's."""
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version={plugin.fsdp_version}: only FSDP2 is supported; set fsdp_version: 2 in fsdp_config "
            "(--fsdp_version 2), or use DDP (torchrun)"
        )


def leave_together(model: Any, classes: tuple[str, ...] | None) -> None:
    """Keep accelerate from sharding by itself what is run by itself, or held twice: it is sharded with all that lies
    outside layers, and whole within the model's forward.

    classes: those that are sharded each by itself, and nothing else; None: layers, and tables. But torch refuses a
    table where other modules hold it, too, as encoder and decoder of BART and T5 do. And sharded with the final norm
    and the head, as a group, it counts on one call of each in a forward: of more, as depth methods make, the backward
    pass would read weights that are gone.
    """
    if classes is not None:
        model._no_split_modules = list(classes)
    else:
        table = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
        holders = sum(getattr(module, "weight", None) is table for module in model.modules())
        once = getattr(getattr(model, "depth", None), "name", "vanilla") == "vanilla"
        if once and (table is None or holders <= 2):  # itself and a tied head
            return
    model.get_input_embeddings = lambda: None
    model.get_output_embeddings = lambda: None
