"""Next-token cross-entropy straight from hidden states, without a [tokens, V] tensor of logits in memory.

    loss = Σ_t −log softmax(h_t Wᵀ)[y_t] / items,   targets of −100 ignored

The chunked form computes the gradient in the forward pass, chunk by chunk: p − onehot(y) is at hand when the logits
are, so nothing is computed twice and nothing of size V is kept. Its FLOPs equal the plain form's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK_TOKENS = 8192  # 8192 tokens × 50k vocabulary × 2 bytes = 0.8 GB of transient logits


def cross_entropy(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """The sum over targets, in fp32 or wider: the reference."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORE, reduction="sum")


def mean_over_targets(values: Float[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """The mean of the values of positions that have a target."""
    valid = targets != IGNORE
    return (values * valid).sum() / valid.sum().clamp(min=1)


def token_cross_entropies(
    hidden_states: Float[Tensor, "B T d"], weight: Float[Tensor, "V d"], targets: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """−log softmax(h Wᵀ)[target] of every token, 0 without one; logits live for a chunk of tokens at a time."""

    def of_chunk(h: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(h, weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, y, ignore_index=IGNORE, reduction="none")

    parts = zip(hidden_states.flatten(0, 1).split(CHUNK_TOKENS), targets.flatten().split(CHUNK_TOKENS), strict=True)
    if torch.is_grad_enabled():
        losses = [checkpoint(of_chunk, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in parts]
    else:
        losses = [of_chunk(h, y) for h, y in parts]
    return torch.cat(losses).view_as(targets)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of h Wᵀ, its gradients made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        grad_hidden = []
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = F.linear(h, weight).to(wide)
            valid = y != IGNORE
            safe = y.clamp(min=0)
            log_normaliser = logits.logsumexp(dim=-1)
            picked = logits.gather(-1, safe[:, None])[:, 0]
            total = total + ((log_normaliser - picked) * valid).sum()
            if need_hidden or need_weight:
                p = (logits - log_normaliser[:, None]).exp()
                onehot = safe[:, None] == torch.arange(weight.shape[0], device=y.device)
                grad_logits = ((p - onehot.to(wide)) * valid[:, None]).to(hidden.dtype)
                if need_hidden:
                    grad_hidden.append(grad_logits @ weight.to(hidden.dtype))
                if grad_weight is not None:
                    grad_weight += (grad_logits.T @ h).to(wide)
        ctx.save_for_backward(
            torch.cat(grad_hidden) if need_hidden else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor):  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = [None if g is None else g * grad_total.to(g.dtype) for g in (grad_hidden, grad_weight)]
        return scaled[0], scaled[1], None, None


def linear_cross_entropy(
    hidden_states: Float[Tensor, "B T d"],
    weight: Float[Tensor, "V d"],
    targets: Int[Tensor, "B T"],
    chunk: int = CHUNK_TOKENS,
) -> Float[Tensor, ""]:
    """Sum over all targets ≠ −100 of −log softmax(h Wᵀ)[target], in fp32 or wider."""
    return LinearCrossEntropy.apply(
        hidden_states.reshape(-1, hidden_states.shape[-1]), weight, targets.reshape(-1), chunk
    )
