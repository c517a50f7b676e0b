"""The expected embedding of a prediction: a probability-weighted mixture of the rows of the input table.

    p = softmax(h Wᵀ / temperature),   y = Σ_v p_v · E_v        (or over the k largest logits, renormalised)

The [tokens, V] probabilities live for one chunk of tokens at a time and are computed again in the backward pass, so no
tensor of that size is kept per pondering step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 4096  # 4096 tokens × 50k vocabulary × 4 bytes = 0.8 GB of transient logits


def top_k_indices(logits: Float[Tensor, "N V"], k: int) -> Int[Tensor, "N k"]:
    """Indices of the k largest logits; among equal logits the lower index wins (torch.topk leaves ties open)."""
    if logits.dtype != torch.float32:
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One sortable integer per entry: the float's order-preserving bits above (−0 as 0), the reversed index below.
    bits = logits.detach().view(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).to(torch.int64)
    size = logits.shape[-1]
    key = ordered * size + torch.arange(size - 1, -1, -1, device=logits.device)
    return key.topk(k, dim=-1, sorted=False).indices


def mixture_of_chunk(
    hidden: Float[Tensor, "N d"],
    head: Float[Tensor, "V d"],
    table: Float[Tensor, "V d"],
    top_k: int | None,
    temperature: float,
    wide: bool,
) -> Float[Tensor, "N d"]:
    """The equation, for all tokens at once: the reference."""
    logits = F.linear(hidden, head)
    dtype = logits.dtype
    if wide:
        logits = logits.to(torch.promote_types(dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is None:
        return logits.softmax(dim=-1).to(dtype) @ table.to(dtype)
    chosen = top_k_indices(logits, top_k)
    weights = logits.gather(-1, chosen).softmax(dim=-1).to(table.dtype)
    return F.embedding_bag(chosen, table, per_sample_weights=weights, mode="sum").to(dtype)


def vocabulary_mixture(
    hidden_states: Float[Tensor, "B T d"],
    head: Float[Tensor, "V d"],
    table: Float[Tensor, "V d"],
    top_k: int | None = None,
    temperature: float = 1.0,
    wide: bool = True,
    chunk: int = CHUNK_TOKENS,
    of_chunk: Callable[..., Tensor] = mixture_of_chunk,
) -> Float[Tensor, "B T d"]:
    """Σ_v softmax(h Wᵀ/temperature)_v · E_v for every token, `chunk` tokens at a time, recomputed in the backward pass.

    Args:
        hidden_states: h. head: W. table: E. top_k: mix only the k largest logits. wide: softmax in fp32 or wider.
        of_chunk: `mixture_of_chunk`, or that function compiled.
    """
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    mixed = []
    for part in flat.split(chunk):
        if torch.is_grad_enabled() and (part.requires_grad or head.requires_grad or table.requires_grad):
            mixed.append(
                checkpoint(
                    of_chunk, part, head, table, top_k, temperature, wide,
                    use_reentrant=False, preserve_rng_state=False,
                )
            )  # fmt: skip
        else:
            mixed.append(of_chunk(part, head, table, top_k, temperature, wide))
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view_as(hidden_states)
