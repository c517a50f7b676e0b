"""The token-recovery study: how much of a text each head recovers from its noised vectors.

All heads learn on the same vectors, x_t with t ~ U(0, t_max), in the same order and for the same steps. They are scored
on held-out text at fixed noise levels:

    NLL of pointwise heads = H(y|z) + TC(y|z) + Σ_i I(y_i; z_−i | z_i)      at best
    NLL of factorised ones = H(y|z) + TC(y|z)                               context removes the last sum
    NLL of contextual ones = H(y|z)                                         choosing token after token removes TC

with the total correlation TC = Σ_i H(y_i|z) − H(y|z) ≥ 0. So differences of measured NLL estimate both terms, as far as
the heads have learned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fathom.latents.heads import HEADS, Head, new_head
from fathom.models.method import check_number, check_range
from fathom.writing import whole

EVALUATED = 64  # rows at once


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """Options of how heads are trained and scored.

    Attributes:
        heads: names of `HEADS`.
        steps, rows, lr: optimiser steps, rows of a step, and the peak learning rate, which falls to 0 along a cosine.
        t_max: time of the noisiest vectors that heads learn from.
        levels: times at which heads are scored; 0: clean vectors.
        examples: number of held-out rows.
        seed: of weights, order and noise.
    """

    heads: tuple[str, ...] = ("linear", "mlp", "factorised", "contextual", "language")
    steps: int = 400
    rows: int = 32
    lr: float = 2e-3
    t_max: float = 0.4
    levels: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    examples: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "examples"):
            check_range("recovery", name, getattr(self, name), 1)
        check_number("recovery", "t_max", self.t_max, 0, 1)
        for level in self.levels:
            check_number("recovery", "levels", level, 0, 1)
        unknown = [name for name in self.heads if name not in HEADS]
        if unknown:
            raise ValueError(f"recovery option heads={unknown[0]!r}: must be some of {', '.join(HEADS)}")


def study(
    model: Any,
    train: Int[Tensor, "N L"],
    held_out: Int[Tensor, "M L"],
    config: RecoveryConfig,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train the heads on a model's vectors and score them.

    Returns `config`, `parameters` of the heads, and `rows`: head, t, sigma, accuracy, nll (nats per token), exact
    (share of rows), free_accuracy and free_exact. The free scores are of text written without the true earlier tokens;
    they differ only for heads that write token after token. After each head, `keep` gets the results so far.
    """
    rows: list[dict[str, Any]] = []
    parameters: dict[str, int] = {}
    found = {"config": dataclasses.asdict(config), "parameters": parameters, "rows": rows}
    held = held_out[: config.examples]
    for name in config.heads:
        head = trained_head(model, name, train, config)
        parameters[name] = sum(p.numel() for p in head.parameters())
        rows += [{"head": name, **scored(model, head, held, t, config.seed)} for t in config.levels]
        best = ", ".join(f"{row['nll']:.3f}" for row in rows[-len(config.levels) :])
        say(f"{name}: {parameters[name]:,} parameters, nats per token {best}")
        if keep is not None:
            keep(found)
    return found


def trained_head(model: Any, name: str, train: Int[Tensor, "N L"], config: RecoveryConfig) -> Head:
    """A trained head. Under one seed all heads see the same rows, times and noise in the same order."""
    torch.manual_seed(config.seed)
    head = new_head(name, model).to(model.device)
    if not head.trains:
        return head.eval()
    head.train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_peak(step, config.steps))
    generator = torch.Generator().manual_seed(config.seed)
    of_noise = torch.Generator(model.device).manual_seed(config.seed)
    for _ in range(config.steps):
        chosen = torch.randint(len(train), (config.rows,), generator=generator)
        t = torch.rand(config.rows, generator=generator) * config.t_max
        text = train[chosen].to(model.device)
        z, noise = noised(model, text, t, of_noise)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            logits = head.logits(z, text, noise)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return head.eval()


def share_of_peak(step: int, steps: int) -> float:
    """Learning rate / peak learning rate: a warm-up over a twentieth of the steps, then a cosine to 0."""
    return min(1.0, (step + 1) / (0.05 * steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def noised(
    model: Any, text: Int[Tensor, "B L"], t: Tensor, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x_t of texts, and its α and σ [B, 1, 1]; t = 0 is x₀."""
    x0 = model.space.encode(text)
    noise = torch.randn(x0.shape, generator=generator, device=generator.device).to(x0)
    alpha, sigma = (part[:, None, None].to(x0) for part in model.process.alpha_sigma(t.to(x0.device)))
    clean = (t == 0)[:, None, None].to(x0.device)
    alpha, sigma = alpha.masked_fill(clean, 1.0), sigma.masked_fill(clean, 0.0)
    return alpha * x0 + sigma * noise, (alpha, sigma)


@torch.no_grad()
def scored(
    model: Any, head: Head, held_out: Int[Tensor, "M L"], t: float, seed: int, estimated: bool = False
) -> dict[str, float]:
    """A head's scores on held-out texts at one noise level, with the same noise for every head.

    estimated: score on the denoiser's estimates (two passes) instead of on noised vectors.
    """
    generator = torch.Generator(model.device).manual_seed(seed + 1)
    total = right = free = exact = free_exact = 0.0
    for text in held_out.split(EVALUATED):
        text = text.to(model.device)
        times = torch.full((len(text),), t)
        z, noise = noised(model, text, times, generator)
        if estimated:
            z = model.denoise(z, times, model.denoise(z, times))
        logits = head.logits(z, text, noise).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), text.flatten(), reduction="sum"))
        hit, written = logits.argmax(-1) == text, head.write(z, noise) == text
        right, exact = right + float(hit.sum()), exact + float(hit.all(1).sum())
        free, free_exact = free + float(written.sum()), free_exact + float(written.all(1).sum())
    tokens, sigma = held_out.numel(), float(noise[1][0])
    return {
        "t": t, "sigma": sigma, "nll": total / tokens, "accuracy": right / tokens, "exact": exact / len(held_out),
        "free_accuracy": free / tokens, "free_exact": free_exact / len(held_out),
    }  # fmt: skip


def draw(found: dict[str, Any], path: Path, title: str, colours: dict[str, str]) -> None:
    """Draw NLL and free-running accuracy against the noise level, with one line for each head."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), dpi=150, facecolor=colours["page"], layout="constrained")
    marks = dict(zip(HEADS, "vosD^x", strict=True))
    for axes, quantity, label in zip(
        figure.subplots(1, 2), ("nll", "free_accuracy"), ("nats per token", "tokens right, written alone"), strict=True
    ):
        axes.set_facecolor(colours["page"])
        for name in dict.fromkeys(row["head"] for row in found["rows"]):
            points = [(row["sigma"], row[quantity]) for row in found["rows"] if row["head"] == name]
            axes.plot(*zip(*points, strict=True), marker=marks[name], label=name, linewidth=1.6, markersize=4)
        axes.set_xlabel("noise σ", color=colours["ink"])
        axes.set_ylabel(label, color=colours["ink"])
        axes.tick_params(colors=colours["muted"])
        axes.grid(color=colours["grid"])
        for side in axes.spines.values():
            side.set_color(colours["muted"])
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False, labelcolor=colours["ink"])
    figure.suptitle(title, color=colours["ink"], fontsize=11)
    with whole(path) as partial:
        figure.savefig(partial, format="png")


def terms(found: dict[str, Any]) -> Sequence[dict[str, float]]:
    """The gains from context and from order at every level, in nats per token: NLL of pointwise (mlp) − NLL of
    factorised, and NLL of factorised − NLL of contextual.
    """
    nll = {(row["head"], row["t"]): row["nll"] for row in found["rows"]}
    out = []
    for t in dict.fromkeys(row["t"] for row in found["rows"]):
        if all((name, t) in nll for name in ("mlp", "factorised", "contextual")):
            out.append({"t": t, "context": nll["mlp", t] - nll["factorised", t],
                        "total_correlation": nll["factorised", t] - nll["contextual", t]})  # fmt: skip
    return out
