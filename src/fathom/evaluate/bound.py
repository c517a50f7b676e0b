"""Text under a masked diffusion model: an upper bound on its loss, over the windows and targets of `text.py`.

In each draw some of a window's targets are hidden (fathom.diffusion.likelihood). Tokens before the targets are always
seen, and none follow. So the numbers compare with those of an autoregressive model, as upper bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fathom.diffusion.likelihood import bound

DRAWS = 16  # forward passes a window


@torch.no_grad()
def text_bound(
    model: Any, ids: Int[Tensor, " n"], spans: list[tuple[int, int]], window: int, batch_size: int, draws: int = DRAWS
) -> tuple[float, float]:
    """The bound in nats on all targets of `spans`, and its variance. `ids`: the context token and the targets."""
    own = model.diffusion
    nats, variance, training = 0.0, 0.0, model.training
    model.eval()
    try:
        for at in range(0, len(spans), batch_size):
            some = spans[at : at + batch_size]
            rows = torch.stack([ids[stop - window : stop + 1] for _, stop in some]).to(model.device)
            answer = torch.zeros_like(rows, dtype=torch.bool)
            for row, (start, stop) in zip(answer, some, strict=True):
                row[window - (stop - start) + 1 :] = True
            found, error = bound(model, rows, answer, draws, mask_token_id=own.mask_token_id, shift=own.shift)
            nats, variance = nats + float(found.double().sum()), variance + float(error.double().square().sum())
    finally:
        model.train(training)
    return nats, variance
