"""Which experts the tokens of a text run, layer by layer: of models with a mixture of experts.

Experts d·G … d·G + G − 1 are group d, the slices of one network: in a grown mixture a discipline, in the order of the
branches. A token's group is the one with the largest share of its gates, the mean over the layers.

The text is read in windows as `fathom evaluate` reads it (evaluate/text.py), so each token counts once.
"""

from __future__ import annotations

import colorsys
import dataclasses
import functools
import html
from typing import Any, Self

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from fathom.evaluate.text import scored_spans
from fathom.inspect.base import Picture, token_texts

PASSAGE = 240  # tokens of the shaded passage
HUE = 137.5  # degrees from a group to the next, which keeps neighbours apart however many there are


@dataclasses.dataclass(frozen=True)
class RoutingMap(Picture):
    """Routing of one text.

    Attributes:
        groups, slices: D and G.
        tokens, window: tokens counted, and how many were read at once.
        loads: of every layer, the share of its token-expert pairs that an expert has; each layer's sum to 1.
        shares: of every layer, the mean share of a token's gates that a group has; each layer's sum to 1.
        chosen: share of the tokens whose group each is.
        passage: [text, group, its share] of the first tokens.
    """

    name = "routing"
    title = "Which experts tokens run"
    shows = "models with feed_forward moe"

    groups: int
    slices: int
    tokens: int
    window: int
    loads: list[list[float]]
    shares: list[list[float]]
    chosen: list[float]
    passage: list[list[Any]]

    @classmethod
    def offered(cls, config) -> bool:
        return (getattr(config, "feed_forward", None) or {}).get("name") == "moe"

    @classmethod
    @torch.no_grad()
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        if len(token_ids) < 2:
            raise ValueError(f"the text has {len(token_ids)} tokens: at least 2 are needed, the first is context only")
        inputs = token_ids[:-1].to(model.device)
        window = min(window, len(inputs), model.config.max_position_embeddings)
        spans = list(scored_spans(len(inputs), window, max(1, window // 2)))
        networks = [layer.mlp for layer in model.model.layers]
        options = networks[0].options
        loads = torch.zeros(len(networks), options.experts, dtype=torch.float64)
        shares = torch.zeros(len(networks), options.groups, dtype=torch.float64)
        of_tokens = torch.zeros(len(inputs), options.groups)
        now: list[list[Tensor]] = [[] for _ in networks]  # a layer runs once a pass

        def keep(layer: int, module: Any, given: Any, z: Tensor) -> None:
            now[layer].append(z)

        hooks = [net.gate.register_forward_hook(functools.partial(keep, n)) for n, net in enumerate(networks)]
        passes = 1
        try:
            for at in range(0, len(spans), batch_size):
                batch = spans[at : at + batch_size]
                counted = torch.zeros(len(batch), window, device=inputs.device)
                for row, (start, stop) in enumerate(batch):
                    counted[row, window - (stop - start) :] = 1
                model(
                    torch.stack([inputs[stop - window : stop] for _, stop in batch]), use_cache=False, logits_to_keep=1
                )
                passes = len(now[0])
                of_batch = torch.zeros(*counted.shape, options.groups, device=inputs.device)
                for layer, (network, seen) in enumerate(zip(networks, now, strict=True)):
                    for z in seen:
                        _, chosen, gates = network.route(z)
                        share = gates / gates.sum(-1, keepdim=True)
                        by_expert = torch.zeros_like(z).scatter_(-1, chosen, share)
                        by_group = by_expert.unflatten(-1, (options.groups, options.slices)).sum(-1)
                        weight = counted.flatten()[:, None].to(z.dtype)
                        picked = torch.zeros_like(z).scatter_(-1, chosen, 1.0)
                        loads[layer] += (picked * weight).sum(0).double().cpu()
                        shares[layer] += (by_group * weight).sum(0).double().cpu()
                        of_batch += by_group.view(of_batch.shape)
                    seen.clear()
                for row, (start, stop) in zip(of_batch.cpu(), batch, strict=True):
                    of_tokens[start:stop] = row[window - (stop - start) :] / (len(networks) * passes)
        finally:
            for hook in hooks:
                hook.remove()
        largest, group = of_tokens.max(-1)
        texts = token_texts(tokenizer, token_ids)[:-1]
        return cls(
            groups=options.groups,
            slices=options.slices,
            tokens=len(inputs),
            window=window,
            loads=(loads / (len(inputs) * passes * options.active)).tolist(),
            shares=(shares / (len(inputs) * passes)).tolist(),
            chosen=(torch.bincount(group, minlength=options.groups) / len(group)).tolist(),
            passage=[
                [text, one, share]
                for text, one, share in zip(texts[:PASSAGE], group.tolist(), largest.tolist(), strict=False)
            ],
        )

    def summary(self):
        experts = self.groups * self.slices
        lines = [f"{experts} experts in {self.groups} groups of {self.slices}, over {self.tokens:,} tokens"]
        for group, share in enumerate(self.chosen):
            mean = sum(row[group] for row in self.shares) / len(self.shares)
            lines.append(f"group {group:>3}: {share:6.1%} of the tokens, {mean:6.1%} of the gates")
        for layer, row in enumerate(self.loads):
            idle = sum(load == 0 for load in row)
            lines.append(f"layer {layer:>3}: largest load {max(row) * experts:5.2f} × the mean, {idle} experts idle")
        return lines

    def figure(self, colours):
        figure = Figure(
            figsize=(11, 1.8 + 0.22 * len(self.loads)), dpi=160, facecolor=colours["page"], layout="constrained"
        )
        experts, groups = figure.subplots(1, 2, width_ratios=[1.6, 1])
        map_ = LinearSegmentedColormap.from_list("load", [colours["page"], colours["accent"]])
        loads = np.array(self.loads) * self.groups * self.slices
        image = experts.imshow(loads, aspect="auto", cmap=map_, vmin=0, interpolation="nearest")
        for group in range(1, self.groups):
            experts.axvline(group * self.slices - 0.5, color=colours["grid"], linewidth=0.8)
        experts.set_xlabel("expert (lines part the groups)", color=colours["muted"], fontsize=9)
        bar = figure.colorbar(image, ax=experts, fraction=0.03)
        bar.ax.tick_params(colors=colours["muted"], labelsize=8)
        left = np.zeros(len(self.shares))
        for group in range(self.groups):
            share = np.array([row[group] for row in self.shares])
            groups.barh(range(len(share)), share, left=left, color=_rgb(group), height=0.8, label=str(group))
            left += share
        groups.set_xlim(0, 1)
        groups.invert_yaxis()
        groups.set_xlabel("share of a token's gates, by group", color=colours["muted"], fontsize=9)
        if self.groups <= 12:
            groups.legend(fontsize=7, ncols=2, frameon=False, labelcolor=colours["ink"], loc="lower right")
        for axes, title in ((experts, "Load over its mean"), (groups, "Groups")):
            axes.set_title(title, fontsize=10, color=colours["ink"], loc="left")
            axes.set_ylabel("layer", color=colours["muted"], fontsize=9)
            axes.tick_params(colors=colours["muted"], labelsize=8.5, length=0)
            axes.set_facecolor(colours["page"])
            axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        return figure

    def html(self):
        legend = " ".join(
            f'<span style="background:{_css(group, 0.7)}">&nbsp;group {group}, {share:.0%} of the tokens&nbsp;</span>'
            for group, share in enumerate(self.chosen)
        )
        shaded = "".join(
            f'<span style="background:{_css(group, share)}" title="group {group}, {share:.0%} of the gates">'
            f"{html.escape(text)}</span>"
            for text, group, share in self.passage
        )
        return (
            f'<p class="note">{self.tokens:,} tokens, read {self.window} at once.</p>'
            "<h3>The beginning of the text, each token in the colour of the group with most of its gates</h3>"
            f'<p class="note">{legend}</p><blockquote style="white-space:pre-wrap">{shaded}</blockquote>'
        )


def _css(group: int, share: float) -> str:
    return f"hsl({group * HUE % 360:.0f} 65% 50% / {share:.0%})"


def _rgb(group: int) -> tuple[float, float, float]:
    """The colour of `_css` without its transparency."""
    return colorsys.hls_to_rgb(group * HUE % 360 / 360, 0.5, 0.65)
