"""peft adapters of a checkpoint: how they are found and put on a model.

An `adapter_config.json` beside the weights is an adapter on them; in a folder without weights it names their folder or
repository. transformers' loaders follow this rule too, but then report missing names of the adapter instead of the
weights, so that an absent tensor would stay random unnoticed. So weights are read without their adapter
(`hf_versions.weights_alone`), and the adapter after them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import find_adapter_config_file, is_peft_available

from fathom.models.hf_versions import NO_ADAPTER

HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")


def find_adapter(path: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, dict[str, Any]] | None]:
    """The checkpoint that `path` means, and its adapter with the arguments that find it; None without an adapter.

    Removes arguments about an adapter from `kwargs` of from_pretrained. Raises ValueError if peft is not installed, and
    for an adapter that neither lies beside weights nor names them.
    """
    given = dict(kwargs.pop("adapter_kwargs", None) or {})
    if given == NO_ADAPTER:
        return path, None
    hub = {**{name: kwargs[name] for name in HUB if name in kwargs}, **given}
    adapter = hub.pop("_adapter_model_path", None)
    if adapter is not None:  # AutoModelForCausalLM has looked, and `path` holds the weights
        return path, (adapter, hub)
    folder = Path(path, hub.get("subfolder") or "")
    file: Any = folder / "adapter_config.json" if Path(path).is_dir() else find_adapter_config_file(path, **hub)
    if file is None or not os.path.isfile(file):
        return path, None
    if not is_peft_available():
        raise ValueError(
            f"{path}: its adapter_config.json needs peft; install it, or move the adapter to another folder to load "
            "the weights without it"
        )
    if (folder / "config.json").is_file():
        return path, (path, hub)
    weights = json.loads(Path(file).read_text()).get("base_model_name_or_path")
    if not weights:
        raise ValueError(
            f"{path}: its adapter_config.json has no base_model_name_or_path; load the base model and call its "
            "load_adapter(…)"
        )
    for name in ("revision", "subfolder"):  # they were the adapter's
        kwargs.pop(name, None)
    return weights, (path, hub)


def merge_adapter(
    stock: PreTrainedModel, adapter: Any, hub: dict[str, Any]
) -> tuple[PreTrainedModel, Iterable[str], Iterable[str]]:
    """The stock model with the adapter in its weights, and the adapter's missing and unexpected names.

    Raises ValueError for an adapter that changes no weights (prompts). A head that was tied to the input table may
    differ from it afterwards, as an adapter on one of the two is not on the other.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter, **hub)
    if config.is_prompt_learning:
        raise ValueError(
            f"{adapter}: an adapter of peft_type={config.peft_type.value!r} changes no weights, which is not "
            "implemented here; use it on the stock model"
        )
    head: Any = stock.get_output_embeddings()
    shared = head.weight
    tied = shared is stock.get_input_embeddings().weight  # type: ignore[union-attr]
    adapted: Any = PeftModel(stock, config)
    report = adapted.load_adapter(adapter, "default", **hub)  # a table in the adapter's file is for both of them
    if tied:  # but what is merged is for one
        for module in stock.get_output_embeddings().modules():  # type: ignore[union-attr]
            if module._parameters.get("weight") is shared:
                module.weight = nn.Parameter(shared.detach().clone())
    with torch.no_grad():
        return adapted.merge_and_unload(safe_merge=True), report.missing_keys, report.unexpected_keys
