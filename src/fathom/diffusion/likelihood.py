"""An upper bound on −log p(answer | rest) of a masked diffusion model, by Monte Carlo (LLaDA, arXiv 2502.09992).

    −log p(y | c) ≤ E_l E_hidden [ L/l · Σ_{j hidden} −log p(x_j | tokens not hidden) ]

L tokens in the answer; l ~ uniform on 1 … L of them are hidden, chosen without replacement. Of K draws the l are
spread: l_k = 1 + ⌊L · frac(u + k/K)⌋ with one u ~ U(0, 1), which leaves each l uniform, whatever L and K. An answer of
one token is exact with one draw. The mask token has no probability.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.models.causal_lm import FathomForCausalLM
from fathom.ops.cross_entropy import cross_entropy, without_token

CHUNK = 2048  # tokens whose logits are in memory at once


@torch.no_grad()
def bound(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    answer: Bool[Tensor, "B T"],
    samples: int,
    *,
    mask_token_id: int,
    shift: bool = False,
    attention_mask: Int[Tensor, "B T"] | None = None,
    position_ids: Int[Tensor, "B T"] | None = None,
    seed: int = 0,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """The bound of every row in nats, and its standard error.

    answer: tokens that are scored; the others are always seen.
    samples: K, forward passes a row. The error is that of K independent draws, which spreading them makes smaller; NaN
        for one draw of an answer of several tokens.
    seed: with it and the row's tokens the draws are fixed, whatever the batch.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    rows = input_ids.cpu()
    generators = [torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes(), seed)) for row in rows]
    lengths = answer.sum(1)
    starts = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
    drawn = []
    for k in range(samples):
        count = 1 + (lengths.cpu() * ((starts + k / samples) % 1)).long().minimum(lengths.cpu() - 1).clamp(min=0)
        keys = torch.stack([torch.rand(rows.shape[1], generator=g) for g in generators]).to(answer.device)
        order = keys.masked_fill(~answer, 2).argsort(1).argsort(1)  # ranks among the answer's tokens
        hidden = (order < count.to(answer.device)[:, None]) & answer
        each = hidden_losses(model, input_ids, hidden, mask_token_id, shift, attention_mask, position_ids)
        drawn.append(each.sum(1) * lengths / count.to(answer.device))
    values = torch.stack(drawn)
    error = values.std(0) / samples**0.5 if samples > 1 else torch.full_like(values[0], torch.nan)
    return values.mean(0), torch.where(lengths <= 1, 0, error)


def hidden_losses(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    hidden: Bool[Tensor, "B T"],
    mask_token_id: int,
    shift: bool,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Float[Tensor, "B T"]:
    """−log p of the hidden tokens given the others, 0 elsewhere. With `shift` the state before a token predicts it."""
    states = final_states(model, input_ids.masked_fill(hidden, mask_token_id), attention_mask, position_ids)
    row, column = hidden.nonzero(as_tuple=True)
    targets = input_ids[row, column]
    states = states[row, (column - int(shift)).clamp(min=0)]
    head = getattr(model, "module", model).get_output_embeddings()
    losses = [
        cross_entropy(without_token(head(h), mask_token_id), y)
        for h, y in zip(states.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    out = torch.zeros(input_ids.shape, dtype=losses[0].dtype, device=input_ids.device)
    out[hidden] = torch.cat(losses)
    return out


def final_states(
    model: Any, input_ids: Int[Tensor, "B T"], attention_mask: Tensor | None, position_ids: Tensor | None
) -> Float[Tensor, "B T d"]:
    """What the head reads, of our models and of stock ones."""
    model = getattr(model, "module", model)  # under DDP
    if isinstance(model, FathomForCausalLM):
        embeddings = model.model.embed(input_ids)
        stack = model.bind_stack(embeddings, attention_mask, position_ids, None, {"use_cache": False})
        return model.depth(stack, embeddings, model.vocabulary()).hidden_states
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
    return model.get_decoder()(input_ids, **given).last_hidden_state
