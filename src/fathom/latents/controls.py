"""Controls that show whether the decoder reads the vectors; every table of results has them.

    i    noise memory      the loss with z ~ N(0, I)
    ii   shuffled memory   the loss with the vectors of another row
    iii  reconstruction    tokens that greedy decoding gets right from x₀, and from corrupt(x₀)
    iv   memory_gap        NLL(shuffled) − NLL(true): near 0 the decoder is a language model that ignores the vectors

The decoder alone is a language model, so fluent text is no evidence that the diffusion works.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.latents.encoder import Latents
from fathom.latents.process import row_generators, row_noise

IGNORED_BELOW = 0.05  # nats per token
SEED = 1  # of the noise memory


@torch.no_grad()
def controls(model: Any, input_ids: Int[Tensor, "B L"], attention_mask: Tensor | None, task: Any) -> dict[str, float]:
    """The controls on rows of text, each corrupted by `task` (ContextualDecoding) with its own noise.

    Returns nll_true, nll_noise, nll_shuffled, noise_gap, memory_gap in nats per token; reconstruction,
    reconstruction_corrupted as shares of tokens, and exact, exact_corrupted as shares of rows. Raises ValueError for a
    single row, as there is no other to shuffle with.
    """
    if len(input_ids) < 2:
        raise ValueError(f"input_ids of {len(input_ids)} row: at least 2, as one is given the vectors of another")
    mask = None if attention_mask is None else attention_mask.bool().to(input_ids.device)
    x0 = model.space.encode(input_ids, mask)
    z = task.corrupted(model, x0, mask, generators=row_generators(input_ids))
    noise = row_noise(row_generators(input_ids, SEED), *x0.shape[1:]).to(x0)
    losses = {
        name: nll(model, input_ids, mask, memory)
        for name, memory in (("true", z), ("noise", noise), ("shuffled", z.roll(1, 0)))
    }
    found = {f"nll_{name}": value for name, value in losses.items()}
    found["noise_gap"] = losses["noise"] - losses["true"]
    found["memory_gap"] = losses["shuffled"] - losses["true"]
    for name, memory in (("", x0), ("_corrupted", z)):
        said = model.decode(Latents(memory, mask, model.space.fingerprint()), temperature=0.0)
        right = said == input_ids
        kept = torch.ones_like(right) if mask is None else mask
        found[f"reconstruction{name}"] = float((right & kept).sum() / kept.sum())
        found[f"exact{name}"] = float((right | ~kept).all(1).float().mean())
    return found


@torch.no_grad()
def nll(
    model: Any, input_ids: Int[Tensor, "B L"], mask: Tensor | None, z: Float[Tensor, "B L k"] | None,
    use_memory: bool = True,
) -> float:  # fmt: skip
    """−log p(y | z) in nats per token; the first token of each row is only context, as in every score."""
    logits = model.decoder_logits(input_ids, mask, z, use_memory=use_memory).float()
    each = F.cross_entropy(logits.flatten(0, 1), input_ids.flatten(), reduction="none").view_as(input_ids).double()
    kept = torch.ones_like(each) if mask is None else mask.to(each)
    return float((each * kept)[:, 1:].sum() / kept[:, 1:].sum())
