"""An upper bound on −log p(answer | rest) of a masked diffusion model, by Monte Carlo (LLaDA, arXiv 2502.09992).

    −log p(y | c) ≤ E_l E_hidden [ L/l · Σ_{j hidden} −log p(x_j | tokens not hidden) ]

The answer has L tokens; l of them, uniform on 1 … L, are hidden, chosen without replacement. The l of K draws are
spread
evenly: l_k = 1 + ⌊L · frac(u + k/K)⌋ with one u ~ U(0, 1), which leaves each l uniform for any L and K. For an answer
of one token one draw is exact. The mask token has no probability.

For block diffusion (arXiv 2503.09573) the bound is the sum over blocks, each given earlier blocks without masks. Every
block has its own l, and one pass scores all blocks. With blocks of one token the bound is exact.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fathom.diffusion.base import own_blocks
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

    answer: mask of the tokens that are scored; the others are always seen.
    samples: K, forward passes a row. The error is that of K independent draws; spread draws have a smaller one. It is
        NaN for one draw of an answer of several tokens.
    seed: of the draws, which depend on it and on the row's tokens and padding, but not on other rows.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    rows, device = input_ids.cpu(), answer.device
    generators = [torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes(), seed)) for row in rows]
    size = own_blocks(getattr(model, "module", model)) or rows.shape[1]
    block = torch.arange(rows.shape[1], device=device) // size  # of every column
    blocks = -(-rows.shape[1] // size)
    lengths = torch.zeros(len(rows), blocks, dtype=torch.long, device=device)
    lengths.index_add_(1, block, answer.long())  # tokens of the answer in each block
    starts = torch.stack([torch.rand(blocks, dtype=torch.float64, generator=g) for g in generators])
    drawn = []
    for k in range(samples):
        at = (starts + k / samples) % 1
        count = 1 + (lengths.cpu() * at).long().minimum(lengths.cpu() - 1).clamp(min=0).to(device)
        keys = torch.stack([torch.rand(rows.shape[1], generator=g) for g in generators]).to(device)
        keys = keys.masked_fill(~answer, 2).argsort(1)
        keys = keys.gather(
            1, block[keys].argsort(dim=1, stable=True)
        )  # a block after the other, its answer's tokens first
        order = keys.argsort(1) - block * size  # ranks among the answer's tokens of the block
        hidden = (order < count[:, block]) & answer
        each = hidden_losses(model, input_ids, hidden, mask_token_id, shift, attention_mask, position_ids)
        drawn.append((each * lengths[:, block] / count[:, block]).sum(1))
    values = torch.stack(drawn)
    error = values.std(0) / samples**0.5 if samples > 1 else torch.full_like(values[0], torch.nan)
    return values.mean(0), torch.where((lengths <= 1).all(1), 0, error)


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
    noisy = input_ids.masked_fill(hidden, mask_token_id)
    clean = input_ids if own_blocks(getattr(model, "module", model)) else None
    states = final_states(model, noisy, attention_mask, position_ids, clean)
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
    model: Any,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    clean_ids: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T d"]:
    """The states that the head reads, for our models and stock ones. clean_ids: as in FathomForMaskedDiffusion."""
    model = getattr(model, "module", model)  # under DDP
    if clean_ids is not None:
        ids, mask, positions, visibility = model.two_streams(input_ids, clean_ids, attention_mask, position_ids)
        embeddings = model.model.embed(ids)
        stack = model.bind_stack(embeddings, mask, positions, None, {"use_cache": False}, visibility)
        return model.depth(stack, embeddings, model.vocabulary()).hidden_states[:, : input_ids.shape[1]]
    if isinstance(model, FathomForCausalLM):
        embeddings = model.model.embed(input_ids)
        stack = model.bind_stack(embeddings, attention_mask, position_ids, None, {"use_cache": False})
        return model.depth(stack, embeddings, model.vocabulary()).hidden_states
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
    return model.get_decoder()(input_ids, **given).last_hidden_state
