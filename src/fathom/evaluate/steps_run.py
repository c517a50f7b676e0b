"""How many steps the tokens of a text run under a model whose tokens stop on their own, and their loss.

The text is read in windows as text.py reads it, so that each token counts once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fathom.evaluate.text import scored_spans
from fathom.models.registry import REGISTRIES


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps and losses of every token but the last: entry i is of reading token i and predicting token i + 1.

    Attributes:
        passes: steps that the token ran.
        losses: −log p of the next token, nats.
        most: steps that a token can run.
        window: tokens that were read at once.
    """

    passes: Int[Tensor, " n"]
    losses: Float[Tensor, " n"]
    most: int
    window: int

    @property
    def ran(self) -> tuple[float, ...]:
        """The share of tokens that ran step 0, 1, …: what `fathom.cost` takes as `ran`."""
        return tuple((self.passes > step).double().mean().item() for step in range(self.most))

    @property
    def mean(self) -> float:
        return self.passes.double().mean().item()


def is_adaptive(config: Any) -> bool:
    """Whether tokens stop on their own under this config: not where a method with steps=0 is the ordinary decoder."""
    depth = getattr(config, "depth", None) or {}
    adaptive = getattr(REGISTRIES["depth"].get(depth.get("name", "")), "adaptive", False)
    return adaptive and config.most_steps > 1


@torch.no_grad()
def steps_run(model: Any, token_ids: Int[Tensor, " n"], window: int, batch_size: int = 8) -> Steps:
    """Read a token sequence in windows of at most `window` tokens that overlap by half.

    Raises ValueError for fewer than two tokens, and for a model whose tokens all run the same steps.
    """
    if not is_adaptive(model.config):
        raise ValueError(f"depth={model.config.depth['name']!r}: all tokens run the same steps")
    if len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens: at least 2 are needed, the first is context only")
    inputs, targets = token_ids[:-1].to(model.device), token_ids[1:].to(model.device)
    window = min(window, len(inputs), model.config.max_position_embeddings)
    spans = list(scored_spans(len(inputs), window, max(1, window // 2)))
    passes, losses = torch.zeros(len(inputs), dtype=torch.long), torch.zeros(len(inputs))
    seen: list[Tensor] = []
    training = model.training
    model.eval()
    hook = model.depth.register_forward_hook(lambda module, args, output: seen.append(output.trace["passes"]))
    try:
        for at in range(0, len(spans), batch_size):
            batch = spans[at : at + batch_size]
            keep = max(stop - start for start, stop in batch)
            rows = torch.stack([inputs[stop - window : stop] for _, stop in batch])
            logits = model(rows, use_cache=False, logits_to_keep=keep).logits
            for row, ran, (start, stop) in zip(logits, seen.pop(), batch, strict=True):
                scored = row[-(stop - start) :].to(torch.promote_types(row.dtype, torch.float32))
                losses[start:stop] = F.cross_entropy(scored, targets[start:stop], reduction="none").float().cpu()
                passes[start:stop] = ran[-(stop - start) :].cpu()
    finally:
        hook.remove()
        model.train(training)
    return Steps(passes, losses, model.depth.most_steps(model.depth.options), window)
