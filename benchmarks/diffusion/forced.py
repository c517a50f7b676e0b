"""Held-out text through a sampler's own order: what an order, a cache or fewer steps cost, in nats and without a judge.

A policy says which hidden tokens a step reveals. Here the true ones are written there instead of the model's own, and
their −log p counts:

    nats = Σ_steps Σ_{j revealed} −log p(x_j | what the sampler sees at that step)

With one token a step and no cache that is the exact −log p of the text in this order, which follows from the tokens
revealed so far. With more tokens a step, or kept states, it is that of the factors that the sampler draws from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom import FathomForCausalLM, FathomForMaskedDiffusion
from fathom.diffusion import POLICIES, DiffusionGenerationConfig, Fourier
from fathom.diffusion.base import Policy, View
from fathom.diffusion.passes import sampling_attention
from fathom.diffusion.sampling import Sampler

# Orders of unmasking that the benchmarks compare: policies of a fixed number a step, and FourierSampler's ablations.
ORDERS: dict[str, Any] = {
    **{name: POLICIES[name]() for name in ("low_confidence", "random", "left_to_right", "margin", "entropy")},
    "fourier": Fourier(),
    "fourier_0.2": Fourier(rho=0.2),
    "fourier_noise": Fourier(phi="noise"),
    "fourier_low": Fourier(phi="low"),
    "fourier_rho1": Fourier(rho=1.0),
}


@dataclasses.dataclass(frozen=True)
class Watched(Policy):
    """A policy whose views are looked at."""

    inner: Policy = dataclasses.field(default_factory=Policy)
    views: list[View] = dataclasses.field(default_factory=list)
    name = "watched"

    @property
    def beyond_block(self) -> bool:  # type: ignore[override]
        return self.inner.beyond_block

    @property
    def whole_block(self) -> bool:  # type: ignore[override]
        return self.inner.whole_block

    def new_memory(self, rows: int) -> Any:
        return self.inner.new_memory(rows)

    def of_step(self, block: Any, step: int, device: torch.device) -> Tensor | None:
        return self.inner.of_step(block, step, device)

    def rank(self, view: View, memory: Any) -> Tensor:
        self.views[:] = [view]
        return self.inner.rank(view, memory)

    def count(self, view: View, order: Tensor, quota: Tensor) -> Tensor:
        return self.inner.count(view, order, quota)


class Forced(Sampler):
    """One run over rows of true tokens, of which the first `prompt` are given. `nats` and `right` (whether the model's
    own choice is the true token) are of every token, 0 where it was given."""

    def __init__(self, model: Any, truth: Tensor, prompt: int, config: DiffusionGenerationConfig):
        assert isinstance(config.policy, Policy)
        super().__init__(model, truth[:, :prompt], None, dataclasses.replace(config, policy=Watched(config.policy)))
        self.truth = truth
        self.nats = torch.zeros(truth.shape, dtype=torch.float64, device=truth.device)
        self.right = torch.zeros_like(self.nats)

    def step(self, canvas: Any, hidden: Any, block: Any, *others: Any) -> tuple[Tensor, Tensor]:
        new, probability = super().step(canvas, hidden, block, *others)
        (view,) = self.config.policy.views  # type: ignore[union-attr]
        inside = slice(block.start, block.stop)
        truth, shown = self.truth[:, inside], new >= 0
        found = view.spread(view.log_probs.gather(1, truth[view.candidates][:, None])[:, 0]).double()
        self.nats[:, inside] -= torch.where(shown, found, 0)
        self.right[:, inside] += shown & (new == truth)
        return torch.where(shown, truth, new), probability


def forced(model: Any, truth: Tensor, prompt: int, batch: int = 64, **options: Any) -> dict[str, Any]:
    """Nats and share of right choices of each row, and what the run cost."""
    nats, right, nfe, kept, columns = [], [], 0, 0, 0
    for rows in truth.split(batch):
        config = DiffusionGenerationConfig(max_new_tokens=truth.shape[1] - prompt, **options)
        with sampling_attention(model), torch.no_grad():
            run = Forced(model, rows, prompt, config)
            out = run.run(None)
        nats += run.nats.sum(1).tolist()
        right += (run.right.sum(1) / config.max_new_tokens).tolist()
        nfe = max(nfe, sum(out.nfe.values()))
        kept = max(kept, out.cache_bytes // len(rows))
        columns += out.columns
    return {"nats": nats, "right": right, "nfe": nfe, "cache_bytes_a_row": kept, "columns_a_row": columns / len(truth)}


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean over rows and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values) / scale, "error": error / scale}


def compared(values: Sequence[float], base: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """The mean difference over the same rows and its standard error."""
    return summary([a - b for a, b in zip(values, base, strict=True)], scale)


def load(folder: str | Path, **changes: Any) -> Any:
    """A trained model on the GPU if there is one, in fp32 with TF32 products; stock options over its config."""
    torch.set_float32_matmul_precision("high")
    section = json.loads((Path(folder) / "config.json").read_text())["diffusion"]["name"]
    kind: Any = FathomForCausalLM if section == "none" else FathomForMaskedDiffusion
    model = kind.from_pretrained(folder, dtype=torch.float32, **changes).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(texts: Sequence[str], tokenizer: Any, length: int, count: int, device: Any) -> Tensor:
    """`count` rows of `length` tokens, evenly spread over the texts."""
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    count = min(count, len(ids) // length)
    starts = [round(i * (len(ids) - length) / max(1, count - 1)) for i in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts], device=device)
