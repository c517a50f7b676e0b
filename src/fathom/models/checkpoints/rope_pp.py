"""Checkpoints of RoPE++'s authors (arXiv 2512.07525): a Llama config, and tensors that it does not describe.

Their code keeps the base model's head counts in `config.json`, and the mode is an argument of loading:

| mode | paper | projected heads | o_proj reads |
|---|---|---|---|
| imag1 | EH, equal heads | half of the config's query and key/value heads | the config's heads |
| imag2 | EC, equal cache | the config's | twice the config's heads |

Here head counts are those of projected heads, so imag1 becomes halved counts with the config's `head_dim`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

MODES = ("imag1", "imag2")
OUTPUT, QUERY = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def shapes(folder: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the first layer's `OUTPUT` and `QUERY`, if they are in safetensors files of a local folder."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")) if Path(str(folder)).is_dir() else ():
        with safe_open(file, framework="pt") as opened:
            for name in {OUTPUT, QUERY} & set(opened.keys()):
                found[name] = tuple(opened.get_slice(name).get_shape())
    return found


def refuse_without_mode(path: Any, stock: PreTrainedConfig) -> None:
    """Raise ValueError for a checkpoint of that layout, which an ordinary loader cannot read."""
    if stock.model_type != "llama":
        return
    found, heads = shapes(path), stock.num_attention_heads
    width = getattr(stock, "head_dim", None) or stock.hidden_size // heads
    projected = found.get(QUERY, (heads * width,))[0]
    if found.get(OUTPUT, (0, projected))[1] == 2 * projected:
        raise ValueError(
            f"{path}: o_proj reads twice the heads that q_proj gives, so this is a RoPE++ checkpoint of the authors, "
            "whose config does not say its mode: FathomForCausalLM.from_pretrained(path, rope_pp_mode='imag1') for "
            "equal heads (EH), 'imag2' for equal cache (EC)"
        )


def read(path: Any, stock: PreTrainedConfig, mode: str) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """The Llama config with the heads that `mode` projects, and the tensors, whose names are the decoder's.

    Raises ValueError for another mode, no local folder of safetensors files, an odd number of heads under imag1, and
    tensors that do not fit the mode.
    """
    if mode not in MODES:
        raise ValueError(f"rope_pp_mode={mode!r}: use 'imag1' (equal heads, EH) or 'imag2' (equal cache, EC)")
    files = sorted(Path(str(path)).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{path}: rope_pp_mode={mode!r} reads a local folder with *.safetensors files; download the checkpoint"
        )
    stock = copy.deepcopy(stock)
    stock.head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
    if mode == "imag1":
        for field in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(stock, field)
            if count % 2:
                raise ValueError(f"{path}: {field}={count} has no half, which rope_pp_mode='imag1' needs; try 'imag2'")
            setattr(stock, field, count // 2)
    found, width = shapes(path), stock.num_attention_heads * stock.head_dim
    expected = {QUERY: (width, stock.hidden_size), OUTPUT: (stock.hidden_size, 2 * width)}
    if found != expected:
        raise ValueError(
            f"{path}: rope_pp_mode={mode!r} means shapes {expected}, the files have {found}; try the other mode"
        )
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    return stock, state
