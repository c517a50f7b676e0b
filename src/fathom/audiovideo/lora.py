"""LoRA on MOVA: adapters on exactly the matrices that are named here.

Names are matched from a tower's block on, never by a fragment: "q" alone would also mean "norm_q".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

IN_TOWERS = tuple(
    [f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")]
    + ["ffn.net.0.proj", "ffn.net.2"]
)
IN_BRIDGE = tuple(f"inner.{name}" for name in "qkvo")


def lora_targets(model: nn.Module, names: Iterable[str] = (*IN_TOWERS, *IN_BRIDGE)) -> list[str]:
    """Full names of the linear layers that end so, in a tower, the bridge or a whole `MovaModel`. Raises ValueError for
    a name that no layer has."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linear = [name for name in linear if not name.startswith("text_encoder.")]
    found = []
    for ending in names:
        matches = [name for name in linear if name.endswith(f".{ending}")]
        if not matches and ending not in (*IN_TOWERS, *IN_BRIDGE):
            raise ValueError(f"names={ending!r}: no linear layer ends so; blocks have {', '.join(IN_TOWERS)}")
        found += matches
    return found


def lora_config(model: nn.Module, rank: int = 16, alpha: int = 16, **options: Any) -> Any:
    """peft's `LoraConfig` with the names of `lora_targets`, for `get_peft_model(model, …)`, or `add_adapter` of a tower
    or the bridge. Raises ImportError without peft."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install 'fathom-lm[peft]'") from error
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=lora_targets(model), **options)
