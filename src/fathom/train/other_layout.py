"""Resuming a checkpoint under another layout of processes than the one that wrote it: one process, DDP, or FSDP.

    one process, DDP    model.safetensors, optimizer.pt, moments by the parameter's number
    FSDP, sharded       pytorch_model_fsdp_0/, optimizer_0/: shards of torch.distributed.checkpoint, by name
    FSDP, full          pytorch_model_fsdp.bin, optimizer.bin, by name

The Trainer reads a checkpoint of the run's own layout, with any number of processes. A checkpoint of another layout is
read whole by every process, and each keeps its part.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers.utils import SAFE_WEIGHTS_NAME

Layout = Literal["whole", "shards", "gathered"]
_WHOLE = StateDictOptions(full_state_dict=True, strict=False)  # a tied head is not in model.safetensors


def layout_of(checkpoint: Path) -> Layout:
    """The layout of a checkpoint, one of the three."""
    if (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir():
        return "shards"
    return "gathered" if (checkpoint / f"{FSDP_MODEL_NAME}.bin").is_file() else "whole"


def layout_of_run(fsdp_plugin: Any) -> Layout:
    """The layout that the run writes, one of the three. fsdp_plugin: accelerate's; None without FSDP."""
    if fsdp_plugin is None:
        return "whole"
    return "gathered" if "FULL_STATE_DICT" in str(fsdp_plugin.state_dict_type) else "shards"


def read_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the checkpoint's weights into the model as it is sharded now."""
    layout = layout_of(checkpoint)
    if layout == "shards":
        weights = _unsharded(checkpoint / f"{FSDP_MODEL_NAME}_0")["model"]
    elif layout == "gathered":
        weights = torch.load(checkpoint / f"{FSDP_MODEL_NAME}.bin", map_location="cpu", weights_only=True)
    else:
        weights = load_file(checkpoint / SAFE_WEIGHTS_NAME)
    unknown = set_model_state_dict(model, weights, options=_WHOLE)
    tables = {name for name, _ in model.named_parameters()}  # a tied parameter once
    missing = [name for name in unknown.missing_keys if name in tables]
    if missing or unknown.unexpected_keys:
        raise ValueError(f"{checkpoint}: its weights are of another model ({(missing or unknown.unexpected_keys)[0]})")


def read_moments(checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
    """Load the checkpoint's optimiser state into an optimiser of the model as it is sharded now."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    layout = layout_of(checkpoint)
    if layout == "shards":
        state = _unsharded(checkpoint / f"{OPTIMIZER_NAME}_0")["optimizer"]
    elif layout == "gathered":
        state = torch.load(checkpoint / f"{OPTIMIZER_NAME}.bin", map_location="cpu", weights_only=True)
    else:
        state = torch.load(checkpoint / f"{OPTIMIZER_NAME}.pt", map_location="cpu", weights_only=True)
        state = _by_name(state, model, optimizer)
    set_optimizer_state_dict(model, optimizer, state, options=_WHOLE)


def _unsharded(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "whole.pt")
        return torch.load(Path(scratch) / "whole.pt", map_location="cpu", weights_only=True)


def _by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser state by parameter name. torch numbers parameters in the order of groups, equal in every layout."""
    named = {id(weight): name for name, weight in model.named_parameters()}
    names = [named[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: moments for i, moments in state["state"].items()}, "param_groups": groups}
