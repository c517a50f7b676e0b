"""The depth map of Depth-Attention: how much of its value each layer takes from which earlier layer.

    α_j = softmax_j( <q̄^ℓ, k^j> / √D ),    j ∈ D(ℓ) ∪ {ℓ}        (arXiv 2606.05014; mixers/depth_attention.py)

averaged over the tokens of a text, for every layer and key/value head; and for every token its *shallow weight*: the α
on sources in the lower half of the layers, averaged over the layers that mix and their heads. Under a multi-pass depth
method a layer of one pass is a layer of its own, named pass·layer.

The text is read in windows as `fathom evaluate` reads it (evaluate/text.py), so each token counts once, and beyond the
first window it has at least half a window of context. Of the text's length only a number a token stays in memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from fathom.evaluate.text import scored_spans
from fathom.inspect.base import Picture, shaded, token_texts
from fathom.models.registry import build_options, lookup

SHOWN = 10  # tokens that draw most, and least
PASSAGE = 240  # tokens of the shaded passage


@dataclasses.dataclass(frozen=True)
class DepthMap(Picture):
    """Mean depth-attention weights of one text.

    Attributes:
        layers, passes, heads: of the decoder; heads are key/value heads.
        tokens, window: tokens counted, and how many were read at once.
        rows: of every layer that mixes: `index` pass·L + ℓ, `sources` (indices), and `weights` [heads, sources + 1],
            the layer itself last; each head's weights sum to 1.
        shallow: the mean shallow weight of a token.
        most, least: tokens (by their text) with the largest and smallest mean shallow weight: `token`, `weight`, and
            `count` in the text. Empty where all tokens have the same.
        least_count: how often a token must occur to be listed.
        passage: [text, shallow weight] of the first tokens.
    """

    name = "depth_map"
    title = "Where values come from"
    shows = "models with mixer depth_attention that has sources (one slot a token)"

    layers: int
    passes: int
    heads: int
    tokens: int
    window: int
    rows: list[dict[str, Any]]
    shallow: float
    most: list[dict[str, Any]]
    least: list[dict[str, Any]]
    least_count: int
    passage: list[list[Any]]

    @classmethod
    def offered(cls, config) -> bool:
        if (getattr(config, "mixer", None) or {}).get("name") != "depth_attention":
            return False
        slots = lookup("depth", config.depth["name"]).counts(config, build_options("depth", config.depth)).slots  # type: ignore[attr-defined]
        mixer = lookup("mixer", "depth_attention")(config, build_options("mixer", config.mixer))
        return slots == 1 and any(mixer.sources)

    @classmethod
    @torch.no_grad()
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        if len(token_ids) < 2:
            raise ValueError(f"the text has {len(token_ids)} tokens: at least 2 are needed, the first is context only")
        inputs = token_ids.to(model.device)
        window = min(window, len(inputs), model.config.max_position_embeddings)
        spans = list(scored_spans(len(inputs), window, max(1, window // 2)))
        mixer, layers = model.model.mixer, model.config.num_hidden_layers
        middle = len(mixer.sources) / 2
        sums = {index: torch.zeros((), dtype=torch.float64) for index, sources in enumerate(mixer.sources) if sources}
        shallow = torch.zeros(len(inputs))

        for at in range(0, len(spans), batch_size):
            batch = spans[at : at + batch_size]
            counted = torch.zeros(len(batch), window, device=inputs.device)
            for row, (start, stop) in enumerate(batch):
                counted[row, window - (stop - start) :] = 1
                counted[row, : max(0, 1 - (stop - window))] = 0  # the first token of all is context only
            drawn = torch.zeros_like(counted)
            with depth_weights_of(model) as weights:
                rows = torch.stack([inputs[stop - window : stop] for _, stop in batch])
                model(rows, use_cache=False, logits_to_keep=1)
            for index, alpha in weights.items():
                sums[index] = sums[index] + (alpha * counted[:, None, :, None]).sum((0, 2)).double().cpu()
                below = [i for i, j in enumerate(mixer.sources[index]) if j < middle]
                drawn += alpha[..., below].sum(-1).mean(1) / len(sums)
            for row, (start, stop) in zip(drawn, batch, strict=True):
                shallow[start:stop] = row[window - (stop - start) :].float().cpu()

        texts, shallow = token_texts(tokenizer, token_ids)[1:], shallow[1:]
        most, least, least_count = _extremes(texts, shallow.tolist())
        return cls(
            layers=layers,
            passes=len(mixer.sources) // layers,
            heads=model.config.num_key_value_heads,
            tokens=len(texts),
            window=window,
            rows=[
                {"index": index, "sources": list(mixer.sources[index]), "weights": (total / len(texts)).tolist()}
                for index, total in sums.items()
            ],
            shallow=float(shallow.double().mean()),
            most=most,
            least=least,
            least_count=least_count,
            passage=[[text, weight] for text, weight in zip(texts[:PASSAGE], shallow.tolist(), strict=False)],
        )

    @property
    def columns(self) -> list[int]:
        """Every layer that is a source."""
        return sorted({j for row in self.rows for j in row["sources"]})

    def label(self, index: int) -> str:
        """A layer's name: its number, or pass·layer."""
        return str(index) if self.passes == 1 else "{}·{}".format(*divmod(index, self.layers))

    def matrix(self, head: int) -> np.ndarray:
        """[mixing layers, sources + 1] of a head, the layer itself last; NaN where a layer does not read a source."""
        columns = {j: i for i, j in enumerate(self.columns)}
        found = np.full((len(self.rows), len(columns) + 1), np.nan)
        for number, row in enumerate(self.rows):
            found[number, [*(columns[j] for j in row["sources"]), -1]] = row["weights"][head]
        return found

    def summary(self):
        lines = [f"mean weight over {self.tokens:,} tokens and {self.heads} key/value heads; itself, then every source"]
        for row in self.rows:
            *given, own = np.mean(row["weights"], axis=0)
            parts = (f"{self.label(j)}: {weight:.3f}" for j, weight in zip(row["sources"], given, strict=True))
            lines.append(f"layer {self.label(row['index']):>4}  itself {own:.3f}   {'   '.join(parts)}")
        lines.append(f"weight on the lower half of the layers: {self.shallow:.3f} a token")
        for word, listed in (("most", self.most), ("least", self.least)):
            if listed:
                lines.append(f"draw {word}: " + "  ".join(f"{_shown(t['token'])} {t['weight']:.3f}" for t in listed))
        return lines

    def figure(self, colours):
        across = min(self.heads, 4 if len(self.columns) <= 8 else 2)
        down = -(-self.heads // across)
        column = min(0.34, 6.0 / len(self.columns))  # inches; numbers stand in cells that have room for them
        row = min(0.24, 7.0 / len(self.rows))
        width = max(8.0, across * max(1.9, column * (len(self.columns) + 1) + 0.8))
        maps = down * max(1.4, row * len(self.rows) + 0.5) + 0.8
        bars = 0.2 * SHOWN + 0.9 if self.most else 0.0
        figure = Figure(figsize=(width, maps + bars), dpi=160, facecolor=colours["page"])
        figure.set_layout_engine("constrained", wspace=0.05, hspace=0.05)
        upper: Any = figure
        if bars:
            upper, lower = figure.subfigures(2, 1, height_ratios=[maps, bars], facecolor=colours["page"]).flat  # type: ignore[union-attr]
            self._draw_tokens(lower.subplots(1, 2, sharex=True), colours)
        cells = upper.subplots(down, across, squeeze=False, sharey=True, sharex=True)
        shades = LinearSegmentedColormap.from_list("depth", [_blend(colours, 0.06), colours["accent"]])
        for head, axes in enumerate(cells.flat):
            axes.set_visible(head < self.heads)
            if head < self.heads:
                image = self._draw_head(axes, head, shades, colours, column >= 0.3 and row >= 0.15)
        bar = upper.colorbar(image, ax=cells, fraction=0.04, pad=0.02, aspect=30)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=colours["muted"], labelsize=8, length=0)
        bar.set_label("mean weight", color=colours["ink"], fontsize=9)
        unit = "layer" if self.passes == 1 else "pass·layer"
        upper.suptitle("Weight of every source in a layer's values", color=colours["ink"], fontsize=11.5)
        upper.supylabel(unit, color=colours["ink"], fontsize=10)
        upper.supxlabel(f"source {unit}, and the layer itself", color=colours["ink"], fontsize=10)
        return figure

    def _draw_head(self, axes: Axes, head: int, shades: Any, colours: dict[str, str], numbers: bool) -> Any:
        values, count = self.matrix(head), len(self.columns)
        top = max(float(np.max(row["weights"])) for row in self.rows)
        gap = 0.35  # the layer itself stands apart
        edges = [*range(count + 1)]
        rows = np.arange(len(self.rows) + 1)
        style: dict[str, Any] = {
            "cmap": shades,
            "vmin": 0,
            "vmax": top,
            "edgecolors": colours["page"],
            "linewidth": 0.8,
        }
        axes.pcolormesh(edges, rows, values[:, :-1], **style)
        image = axes.pcolormesh([count + gap, count + gap + 1], rows, values[:, -1:], **style)
        if numbers:
            for (row, column), value in np.ndenumerate(values):
                if not np.isnan(value):
                    colour = _readable(shades(value / top))
                    at = column + 0.5 + (gap if column == count else 0)
                    axes.text(at, row + 0.5, f"{value:.2f}"[1:] if value < 0.995 else "1", color=colour, fontsize=7,
                              ha="center", va="center")  # fmt: skip
        every = max(1, count // 12)
        ticks = [*range(0, count, every)]
        axes.set_xticks([*(i + 0.5 for i in ticks), count + gap + 0.5],
                        [*(self.label(self.columns[i]) for i in ticks), "itself"])  # fmt: skip
        every = max(1, len(self.rows) // 24)
        axes.set_yticks([i + 0.5 for i in range(0, len(self.rows), every)],
                        [self.label(row["index"]) for row in self.rows[::every]])  # fmt: skip
        axes.tick_params(colors=colours["muted"], labelsize=8, length=0)
        axes.set_facecolor(colours["page"])
        axes.spines[:].set_visible(False)
        if not axes.yaxis_inverted():  # shared
            axes.invert_yaxis()
        axes.set_title(f"head {head}", fontsize=9, color=colours["ink"])
        return image

    def _draw_tokens(self, panels: Any, colours: dict[str, str]) -> None:
        for axes, listed, word in zip(panels, (self.most, self.least), ("most", "least"), strict=True):
            names = [_shown(entry["token"]) for entry in listed]
            weights = [entry["weight"] for entry in listed]
            axes.barh(range(len(listed)), weights, color=_blend(colours, 0.6), height=0.55)
            axes.axvline(self.shallow, color=colours["ink"], linewidth=1, linestyle=(0, (3, 2)))
            axes.set_yticks(range(len(listed)), [name.replace("$", r"\$") for name in names], family="DejaVu Sans Mono")
            for i, weight in enumerate(weights):
                axes.text(
                    weight,
                    i,
                    f" {weight:.3f}",
                    va="center",
                    fontsize=7.5,
                    color=colours["muted"],
                    bbox={"facecolor": colours["page"], "edgecolor": "none", "pad": 0.2},
                )
            axes.set_ylim(SHOWN - 0.5, -0.5)
            axes.margins(x=0.14)
            axes.set_title(f"Tokens that draw on shallow layers {word}", fontsize=10, color=colours["ink"], loc="left")
            axes.tick_params(colors=colours["muted"], labelsize=8.5, length=0)
            axes.tick_params(axis="y", labelcolor=colours["ink"])
            axes.set_facecolor(colours["page"])
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.spines["left"].set_color(colours["muted"])
        panels[0].set_xlabel(f"weight on the lower half of the layers (dashed: mean, {self.shallow:.3f})",
                             color=colours["muted"], fontsize=8.5, loc="left")  # fmt: skip

    def html(self):
        said = (
            f"Mean over {self.tokens:,} tokens, read {self.window} at once. A row is a layer, a column the earlier "
            "layer whose value it mixes in; a row's weights sum to 1, and an empty cell is no source of that layer. "
        )
        if not self.most:
            return f'<p class="note">{said}All tokens have the same weights.</p>'
        low, high = np.quantile([weight for _, weight in self.passage], [0.05, 0.95])
        passage = "".join(shaded(text, _percent(weight, low, high), f"{weight:.3f}") for text, weight in self.passage)
        return (
            f'<p class="note">{said}Tokens listed occur at least {self.least_count} '
            f"{'time' if self.least_count == 1 else 'times'}.</p>"
            f"<h3>The beginning of the text, shaded more where a token draws more on shallow layers "
            f"({low:.2f} to {high:.2f})</h3>"
            f'<blockquote style="white-space:pre-wrap">{passage}</blockquote>'
        )


@contextlib.contextmanager
def depth_weights_of(model: Any) -> Iterator[dict[int, Tensor]]:
    """Fills a dict with α [B, heads, T, sources + 1] of every layer that mixes, by pass·L + ℓ, as the model runs."""
    found: dict[int, Tensor] = {}
    current = 0

    def enter(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal current
        current = kwargs["cache_layer"]

    def read(mixer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        query, key, _, sources = args
        if sources:
            found[current] = torch.cat(mixer.weights(query, key, sources), dim=-1).expand(*key.shape[:3], -1)

    blocks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in model.model.layers]
    handle = model.model.mixer.register_forward_pre_hook(read, with_kwargs=True)
    try:
        yield found
    finally:
        for hook in (*blocks, handle):
            hook.remove()


def _extremes(texts: list[str], weights: list[float]) -> tuple[list[dict], list[dict], int]:
    """Tokens by mean weight, largest and smallest, among those that occur often enough to have a mean."""
    places = collections.defaultdict(list)
    for text, weight in zip(texts, weights, strict=True):
        if text.strip():
            places[text].append(weight)
    least_count = next((n for n in (5, 3, 2) if sum(len(p) >= n for p in places.values()) >= 2 * SHOWN), 1)
    listed: list[dict[str, Any]] = [
        {"token": text, "weight": float(np.mean(found)), "count": len(found)}
        for text, found in places.items()
        if len(found) >= least_count
    ]
    listed.sort(key=lambda entry: -entry["weight"])
    if not listed or listed[0]["weight"] - listed[-1]["weight"] < 1e-6:
        return [], [], least_count
    shown = min(SHOWN, len(listed) // 2)
    return listed[:shown], listed[: -shown - 1 : -1], least_count


def _shown(token: str) -> str:
    return token.replace("\n", "↵").replace(" ", "␣")


def _percent(weight: float, low: float, high: float) -> int:
    return round(70 * min(max((weight - low) / max(high - low, 1e-9), 0), 1))


def _blend(colours: dict[str, str], share: float) -> Any:
    """The page with a share of the accent."""
    page, accent = np.array(to_rgb(colours["page"])), np.array(to_rgb(colours["accent"]))
    return tuple(page + share * (accent - page))


def _readable(colour: Any) -> str:
    """Black or white, whichever reads better on it."""
    return "#000000" if np.dot(colour[:3], (0.299, 0.587, 0.114)) > 0.55 else "#ffffff"
