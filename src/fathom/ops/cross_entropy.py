"""Next-token cross-entropy straight from hidden states, without a [tokens, V] tensor of logits in memory.

    loss = Σ_t −log softmax(h_t Wᵀ)[y_t] / items,   targets of −100 ignored

The chunked form computes the gradient in the forward pass, chunk by chunk: p − onehot(y) is at hand when the logits
are, so nothing is computed twice and nothing of size V is kept. Its FLOPs equal the plain form's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fathom.ops.autocast import product_dtype

IGNORE = -100
CHUNK_TOKENS = 8192  # 8192 tokens × 50k vocabulary × 2 bytes = 0.8 GB of transient logits


def without_token(logits: Float[Tensor, "*n V"], token: int) -> Float[Tensor, "*n V"]:
    """The logits with that of one token at −∞, so that it has no probability."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns == token, float("-inf"))


def cross_entropy(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """−log softmax(logits)[target] of every token, 0 without one; in fp32 or wider: the reference."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORE, reduction="none")


def mean_over_targets(values: Float[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """The mean of the values of positions that have a target."""
    valid = targets != IGNORE
    return (values * valid).sum() / valid.sum().clamp(min=1)


def losses_of_chunk(
    hidden: Float[Tensor, "N d"], weight: Float[Tensor, "V d"], targets: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """`cross_entropy` of h Wᵀ."""
    return cross_entropy(F.linear(hidden, weight), targets)


def token_cross_entropies(
    hidden_states: Float[Tensor, "B T d"],
    weight: Float[Tensor, "V d"],
    targets: Int[Tensor, "B T"],
    of_chunk: Callable[..., Tensor] = losses_of_chunk,
) -> Float[Tensor, "B T"]:
    """`losses_of_chunk`, or the compiled function given for it, of all tokens; logits live for a chunk at a time."""
    parts = zip(hidden_states.flatten(0, 1).split(CHUNK_TOKENS), targets.flatten().split(CHUNK_TOKENS), strict=True)
    if torch.is_grad_enabled():
        losses = [checkpoint(of_chunk, h, weight, y, use_reentrant=False, preserve_rng_state=False) for h, y in parts]
    else:
        losses = [of_chunk(h, weight, y) for h, y in parts]
    return torch.cat(losses).view_as(targets)


def gradients_of_chunk(
    hidden: Float[Tensor, "N d"],
    weight: Float[Tensor, "V d"],
    targets: Int[Tensor, " N"],
    wanted: bool,
    scales: Float[Tensor, " N"] | None = None,
    excluded: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, "N V"] | None]:
    """The cross-entropies, and where wanted the gradient of the logits of their sum, in the dtype of the product.
    `scales` multiply them; `excluded` is a token that has no probability."""
    logits = F.linear(hidden, weight)
    dtype = logits.dtype
    if excluded is not None:
        logits = without_token(logits, excluded)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    valid = (targets != IGNORE) if scales is None else (targets != IGNORE) * scales.to(logits.dtype)
    safe = targets.clamp(min=0)
    # softmax written out: the compiler then finds maximum and sum in one reading
    logits = logits - logits.amax(dim=-1, keepdim=True)
    e = logits.exp()
    total = e.sum(dim=-1, keepdim=True)
    losses = (total.log() - logits.gather(-1, safe[:, None]))[:, 0] * valid
    del logits  # what follows takes as much
    if not wanted:
        return losses, None
    onehot = safe[:, None] == torch.arange(weight.shape[0], device=targets.device)
    return losses, ((e / total - onehot.to(e.dtype)) * valid[:, None]).to(dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of h Wᵀ, its gradients made in the forward pass; and each of them, without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        of_chunk: Callable[..., Any],
        scales: Tensor | None,
        excluded: int | None,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        operand = weight.to(product_dtype(weight))  # once for all products
        losses, of_hidden, of_weight = [], [], None
        parts = [hidden.split(chunk), targets.split(chunk)] + ([] if scales is None else [scales.split(chunk)])
        for h, y, *of_part in zip(*parts, strict=True):
            more = () if scales is None and excluded is None else (*(of_part or [None]), excluded)
            found, of_logits = of_chunk(h, operand, y, need_hidden or need_weight, *more)
            losses.append(found)
            if need_hidden:
                of_hidden.append(of_logits @ operand)
            if need_weight:  # in the order of the weight: adding its transpose would take three times as long
                part = of_logits.T @ h.to(of_logits.dtype)
                of_weight = part.to(wide) if of_weight is None else of_weight.add_(part)
            del of_logits  # before the next
        ctx.save_for_backward(
            torch.cat(of_hidden).to(hidden.dtype) if need_hidden else None,
            of_weight.to(weight.dtype) if of_weight is not None else None,
        )
        every = torch.cat(losses)
        ctx.mark_non_differentiable(every)
        return every.sum(), every

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Any):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph: second gradients would lack the part of these, which have no graph
            raise RuntimeError(
                "create_graph=True: the loss of training mode has no second derivatives; use eval mode, or take the "
                "cross-entropy of the logits"
            )
        # grad_total, a wide number, leaves a gradient its dtype; rounded to that, 1/items would scale all of it wrongly
        scaled = [None if g is None else g * grad_total for g in ctx.saved_tensors]
        return scaled[0], scaled[1], None, None, None, None, None


def linear_cross_entropy(
    hidden_states: Float[Tensor, "B T d"],
    weight: Float[Tensor, "V d"],
    targets: Int[Tensor, "B T"],
    chunk: int = CHUNK_TOKENS,
    of_chunk: Callable[..., Any] = gradients_of_chunk,
    scales: Float[Tensor, "B T"] | None = None,
    excluded: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "B T"]]:
    """Sum over all targets ≠ −100 of −log softmax(h Wᵀ)[target], in fp32 or wider; and its terms, which have no
    gradient. `of_chunk`: `gradients_of_chunk`, or that function compiled. `scales` multiply the terms; `excluded` is a
    token that has no probability."""
    total, losses = LinearCrossEntropy.apply(
        hidden_states.reshape(-1, hidden_states.shape[-1]), weight, targets.reshape(-1), chunk, of_chunk,
        None if scales is None else scales.reshape(-1), excluded,
    )  # fmt: skip
    return total, losses.view(targets.shape)
