"""The held-out loss in pieces, to test whether a difference of two models depends on the choice of texts.

    score = Σ values / Σ weights over the pieces;   values: bits of a piece's targets,   weights: its bytes

Pieces are documents, or groups of neighbouring ones if there are more than `PIECES`; a text with fewer than `FEWEST`
documents is cut into its blocks instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fathom.data import PreparedData, token_byte_lengths
from fathom.data.packing import IGNORED
from fathom.ops.cross_entropy import cross_entropy

PIECES, FEWEST = 256, 8
TOKENS = 4096  # of a batch
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Attributes:
    unit: "documents", or "blocks".
    values, weights: of the pieces, in the text's order.
    """

    unit: str
    values: list[float]
    weights: list[float]


@torch.no_grad()
def bits_of_pieces(model: Any, data: PreparedData, collate: Callable[..., dict[str, Any]]) -> Pieces | None:
    """Bits of the model's next-token predictions on the held-out blocks, by piece; None without held-out blocks."""
    if data.validation is None:
        return None
    blocks, end = data.validation, data.tokenizer.eos_token_id
    lengths = torch.as_tensor(token_byte_lengths(data.tokenizer), dtype=torch.float64)
    nats, owners, sizes, document = [], [], [], 0
    size = max(1, TOKENS // len(blocks[0]["input_ids"]))
    for first in range(0, len(blocks), size):
        batch = collate([blocks[i] for i in range(first, min(first + size, len(blocks)))])
        ids = batch["input_ids"]
        targets = batch.get("labels", ids)[:, 1:]
        given = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        logits = model(**given, use_cache=False).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device)).view(targets.shape)
        ends = (ids == end).flatten().long().cumsum(0).view(ids.shape)
        owner = document + ends - (ids == end).long()  # a document's end is its own
        document += int(ends.flatten()[-1])
        scored = targets != IGNORED
        nats.append(losses.cpu().double()[scored])
        owners.append(owner[:, 1:][scored])
        sizes.append(lengths[targets[scored]])
    loss, owner, size_of = torch.cat(nats), torch.cat(owners), torch.cat(sizes)
    unit = "documents"
    if len(owner.unique()) < FEWEST:
        unit, owner = "blocks", torch.arange(len(loss)) // max(1, len(blocks[0]["input_ids"]) - 1)
    owner = owner.unique(return_inverse=True)[1]
    owner = owner * min(PIECES, int(owner.max()) + 1) // (int(owner.max()) + 1)  # neighbours together
    count = int(owner.max()) + 1
    values = torch.zeros(count, dtype=torch.float64).index_add(0, owner, loss / math.log(2))
    weights = torch.zeros(count, dtype=torch.float64).index_add(0, owner, size_of)
    kept = weights > 0
    return Pieces(unit, [round(v, 4) for v in values[kept].tolist()], weights[kept].tolist())


def bootstrap(differences: list[float], weights: list[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % bootstrap interval of Σ differences / Σ weights, with pieces drawn with replacement."""
    draws = np.random.default_rng(0).integers(0, len(weights), (resamples, len(weights)))
    means = np.asarray(differences)[draws].sum(1) / np.asarray(weights)[draws].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
