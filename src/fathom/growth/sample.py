"""Statistics of a dense model's feed-forward networks on sample texts: mean inputs, and which neurons fire together.

Unlike surgery it needs the whole model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fathom.data import Source, load_tokenizer
from fathom.data.packing import encode
from fathom.models.causal_lm import FathomForCausalLM

TOKENS = 2048  # of each text, from its beginning
ROW = 256
FIRING = 0.1  # share of a token's neurons that count as firing: those of the largest |act(W_gate x) ⊙ W_up x|


class Seen(NamedTuple):
    """Statistics of one layer's network, over D texts of N tokens each."""

    inputs: Float[Tensor, "D d"]  # the mean of its inputs, of unit length
    fired: Bool[Tensor, "DN I"]


@torch.no_grad()
def statistics(checkpoint: str | Path, texts: Sequence[str]) -> list[Seen]:
    """Statistics of every layer on texts, which are named as in a recipe's data and read by the checkpoint's tokenizer.

    Raises ValueError for a text with fewer tokens than a row.
    """
    tokenizer = load_tokenizer(str(checkpoint))
    model = FathomForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    networks: list[Any] = [layer.mlp for layer in model.model.layers]
    means: list[list[Tensor]] = [[] for _ in networks]
    fired: list[list[Tensor]] = [[] for _ in networks]
    now: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, what: str) -> Any:
        return lambda module, given: now.__setitem__((layer, what), given[0].flatten(0, -2))

    hooks = [
        module.register_forward_pre_hook(keep(layer, what))
        for layer, network in enumerate(networks)
        for what, module in (("input", network), ("neurons", network.down_proj))
    ]
    for text in texts:
        ids: list[int] = []
        for document in Source(text, argument="texts").documents():
            ids += encode([document], tokenizer)[0]
            if len(ids) >= TOKENS:
                break
        rows = min(len(ids), TOKENS) // ROW
        if not rows:
            raise ValueError(f"texts: {text} has {len(ids)} tokens; a sample needs at least {ROW}")
        model(torch.tensor(ids[: rows * ROW]).view(rows, ROW), logits_to_keep=1)
        for layer in range(len(networks)):
            mean = now[layer, "input"].mean(0)
            means[layer].append(mean / mean.norm())
            size = now[layer, "neurons"].abs()
            most = size.topk(max(1, round(FIRING * size.shape[1])), dim=-1)[1]
            fired[layer].append(torch.zeros_like(size, dtype=torch.bool).scatter_(1, most, True))
    for hook in hooks:
        hook.remove()
    return [Seen(torch.stack(of), torch.cat(who)) for of, who in zip(means, fired, strict=True)]
