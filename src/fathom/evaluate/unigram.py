"""The unigram model: the baseline that knows only how often each token occurs."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def unigram_loss(train_tokens: Int[Tensor, " n"], targets: Int[Tensor, " m"], vocab_size: int) -> float:
    """−Σ_t log p(target_t) in nats, p(v) = (count of v in `train_tokens` + 1) / (n + vocab_size).

    Give it the targets that the model is scored on, and divide by the same bytes (`bits_per_byte`).
    """
    counts = torch.bincount(train_tokens, minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[targets].sum())
