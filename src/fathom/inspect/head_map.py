"""A picture of how far back real and imaginary heads of RoPE++ look, and how much noise on either adds to the loss.

    share(Δ) = Σ of attention weights at distance Δ,  a mean over queries, heads and layers
    c_re(Δ) = mean_n cos ω_n Δ,   c_im(Δ) = mean_n sin ω_n Δ        (arXiv 2512.07525; positions/rope_pp.py)

The curves are what queries and keys that are alike score on average at a distance. Noise is Gaussian and on the rotated
queries of one group of heads, as in the paper's probe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from fathom.inspect.base import Picture
from fathom.inspect.step_map import dressed

WINDOWS = 16  # stretches of the text that are read
LONGEST = 1024  # tokens of one: all weights of a layer are held at once
SCALES = (0.5, 1.0)  # standard deviations of the noise
GROUPS = ("real", "imaginary")


@dataclasses.dataclass(frozen=True)
class HeadMap(Picture):
    """Attention by distance and the loss under noise, of each group of heads.

    Attributes:
        windows, window: stretches of the text, and their tokens.
        edges: of the buckets of distances; the last bucket ends at `window`.
        shares: group → layer → bucket, the share of attention that falls into it; a layer's buckets sum to 1.
        curves: group → c at the first distance of every bucket.
        loss: nats a token.
        noise: group → by standard deviation, nats a token more.
    """

    name = "heads"
    title = "How far real and imaginary heads look"
    shows = "models with positions rope_pp (both kinds of heads, one slot a token)"

    windows: int
    window: int
    edges: list[int]
    shares: dict[str, list[list[float]]]
    curves: dict[str, list[float]]
    loss: float
    noise: dict[str, dict[str, float]]

    @classmethod
    def offered(cls, config) -> bool:
        positions = getattr(config, "positions", None) or {}
        if positions.get("name") != "rope_pp" or positions.get("mode", "imag") != "imag":
            return False
        return getattr(config, "is_causal", True) and config.depth["name"] == "vanilla"

    @classmethod
    @torch.no_grad()
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        if len(token_ids) < 2:
            raise ValueError(f"token_ids of {len(token_ids)} tokens: give at least two")
        window = min(window, LONGEST, model.config.max_position_embeddings, len(token_ids))
        rows = token_ids[: len(token_ids) // window * window].view(-1, window)[:WINDOWS].to(model.device)
        edges = [0, *(2**i for i in range((window - 1).bit_length()))]
        place = torch.arange(window)
        distance = (place[:, None] - place).to(model.device)
        bucket = torch.bucketize(distance.clamp(min=0), torch.tensor(edges, device=model.device), right=True) - 1
        found: dict[str, list[Tensor]] = {group: [] for group in GROUPS}

        def read(
            number: int, attention: Any, before: Callable[..., Any], tables: Any, query: Tensor, key: Tensor
        ) -> Any:
            query, key = before(tables, query, key)
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            for row in range(len(query)):
                scores = (query[row].float() @ keys[row].float().mT) * attention.scaling
                weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1).unflatten(0, (-1, 2)).mean(0)
                for group, mean in zip(GROUPS, weights, strict=True):
                    total = torch.zeros(len(edges), device=mean.device).index_add_(0, bucket.flatten(), mean.flatten())
                    if len(found[group]) <= number:
                        found[group].append(torch.zeros(len(edges)))
                    found[group][number] += total.cpu() / (window * len(rows))
            return query, key

        with around(model, read):
            loss = nats(model, rows, batch_size)
        noise: dict[str, dict[str, float]] = {}
        for group, scale in itertools.product(GROUPS, SCALES):
            with noisy(model, group, scale):
                noise.setdefault(group, {})[str(scale)] = nats(model, rows, batch_size) - loss
        angles = torch.tensor(edges, dtype=torch.float64)[:, None] * model.model.rotary_emb.inv_freq.double().cpu()
        return cls(
            windows=len(rows),
            window=window,
            edges=edges,
            shares={group: [layer.tolist() for layer in layers] for group, layers in found.items()},
            curves={"real": angles.cos().mean(1).tolist(), "imaginary": angles.sin().mean(1).tolist()},
            loss=loss,
            noise=noise,
        )

    def mean(self, group: str) -> list[float]:
        """The share of every bucket, over layers."""
        return torch.tensor(self.shares[group]).mean(0).tolist()

    def summary(self):
        lines = [f"{self.windows} stretches of {self.window} tokens, {self.loss:.3f} nats a token"]
        for group in GROUPS:
            far = sum(share for edge, share in zip(self.edges, self.mean(group), strict=True) if edge >= 32)
            hurt = ", ".join(f"{more:+.3f} at σ = {scale}" for scale, more in self.noise[group].items())
            lines.append(
                f"{group:>10} heads: {far:.3f} of attention is 32 tokens or more away; noise costs {hurt} nats"
            )
        return lines

    def figure(self, colours):
        figure = Figure(figsize=(11, 3.6), dpi=160, facecolor=colours["page"], layout="constrained")
        shares, curves, noise = figure.subplots(1, 3)
        dressed(shares, "Share of attention by distance", colours)
        dressed(curves, "What alike queries and keys score", colours)
        dressed(noise, "Nats more under noise", colours)
        for group, colour in zip(GROUPS, (colours["ink"], colours["accent"]), strict=True):
            shares.plot(range(len(self.edges)), self.mean(group), color=colour, marker="o", markersize=3, label=group)
            curves.plot(range(len(self.edges)), self.curves[group], color=colour, label=group)
            noise.plot([0, *map(float, self.noise[group])], [0, *self.noise[group].values()], color=colour, marker="o",
                       markersize=3, label=group)  # fmt: skip
        every = max(1, len(self.edges) // 6)
        for axes in (shares, curves):
            axes.set_xticks(range(0, len(self.edges), every), [str(edge) for edge in self.edges[::every]])
            axes.set_xlabel("tokens back, from", color=colours["muted"], fontsize=9)
        noise.set_xlabel("standard deviation on rotated queries", color=colours["muted"], fontsize=9)
        legend = shares.legend(frameon=False, fontsize=9)
        for text in legend.get_texts():
            text.set_color(colours["ink"])
        return figure

    def html(self):
        return (
            f'<p class="note">{self.windows} stretches of {self.window} tokens. Buckets of distances double; shares '
            "are means over queries, heads and layers. Noise is on the rotated queries of one group of heads alone.</p>"
        )


@torch.no_grad()
def nats(model: Any, rows: Tensor, batch_size: int) -> float:
    """Mean −log p of all tokens but the first of each row."""
    total = 0.0
    for some in rows.split(batch_size):
        logits = model(some, use_cache=False).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum"))
    return total / (len(rows) * (rows.shape[1] - 1))


@contextlib.contextmanager
def around(model: Any, call: Callable[..., Any]) -> Iterator[None]:
    """`call(layer's number, attention, its own expand, tables, query, key)` in place of every layer's `expand`."""
    attentions = [layer.self_attn for layer in model.model.layers]
    plain = [attention.expand for attention in attentions]
    for number, (attention, before) in enumerate(zip(attentions, plain, strict=True)):
        attention.expand = functools.partial(call, number, attention, before)
    try:
        yield
    finally:
        for attention, before in zip(attentions, plain, strict=True):
            attention.expand = before


def noisy(model: Any, heads: str, scale: float, seed: int = 0) -> contextlib.AbstractContextManager[None]:
    """Noise on the rotated queries of the "real" or the "imaginary" heads, which stand in turn."""
    generator = torch.Generator(model.device).manual_seed(seed)

    def call(number: int, attention: Any, before: Callable[..., Any], tables: Any, query: Tensor, key: Tensor) -> Any:
        query, key = before(tables, query, key)
        pairs = query.unflatten(1, (-1, 2)).clone()
        noised = pairs[:, :, GROUPS.index(heads)]
        noised += scale * torch.randn(noised.shape, generator=generator, device=noised.device).to(noised.dtype)
        return pairs.flatten(1, 2), key

    return around(model, call)
