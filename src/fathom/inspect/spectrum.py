"""Where along the frequencies of the sequence an encoder's hidden states have their energy, layer by layer.

    C_k = DCT-II of X along the tokens, orthonormal, for every channel;   E_k = Σ_channels C_k²

What the Fourier Transformer stands on (arXiv 2305.15099): if the energy of deeper layers lies at low frequencies, their
sequences can be shorter. k = 0 is the mean over tokens, which any shortening keeps: it is counted apart, and shares are
of what remains. Frequencies are fractions of the highest one of the layer's own sequence. White noise has equal shares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from fathom.inspect.base import Picture
from fathom.inspect.step_map import dressed
from fathom.ops.dct import dct

WINDOWS = 16  # stretches of the text that are read
LONGEST = 4096  # tokens of one
BINS = 20
ROUNDING = 1e-12  # of the whole energy: less is what rounding makes of states that are equal
LAYERS = {  # where the layers of an encoder are; ours tell of themselves (`run_layer`)
    "bart": "model.encoder.layers", "t5": "encoder.block", "longt5": "encoder.block", "fathom_longt5": "encoder.block",
    "bert": "encoder.layer",
}  # fmt: skip
OWN = {"fathom_bart": "model.encoder", "fathom_encoder": ""}  # what has `run_layer`


@dataclasses.dataclass(frozen=True)
class Spectrum(Picture):
    """Energy by frequency of the hidden states of one text, a mean over windows.

    Attributes:
        windows, window: stretches of the text, and their tokens.
        tokens: of every layer's output, the embeddings first: fewer where an encoder shortens.
        means: layer → the share of the mean over tokens in the whole energy.
        energy: layer → the share of every of `BINS` equal bands of frequencies in the rest; they sum to 1, or are all
            0 where the states of all tokens are equal, which have no rest.
    """

    name = "spectrum"
    title = "Energy by frequency along the sequence"
    shows = "encoders (our own classifiers, BART, T5, LongT5 and BERT, stock or with a method)"

    windows: int
    window: int
    tokens: list[int]
    means: list[float]
    energy: list[list[float]]

    @classmethod
    def offered(cls, config) -> bool:
        return config.model_type in {*LAYERS, *OWN}

    @classmethod
    @torch.no_grad()
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        room = getattr(model.config, "max_position_embeddings", None) or len(token_ids)
        window = min(window, LONGEST, room - getattr(model.config, "first", 0), len(token_ids))
        if window < 2:
            raise ValueError(f"a window of {window} tokens: at least 2 are needed for a frequency")
        rows = token_ids[: len(token_ids) // window * window].view(-1, window)[:WINDOWS].to(model.device)
        sums: list[Tensor] = []
        for some in rows.split(batch_size):
            with states_of(model) as states:
                encode(model, some)
            for layer, x in enumerate(states):
                found = dct(x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32)))
                found = found.double().square().sum((0, 1)).cpu()
                if len(sums) <= layer:
                    sums.append(torch.zeros_like(found))
                sums[layer] += found
        return cls(
            windows=len(rows),
            window=window,
            tokens=[len(found) for found in sums],
            means=[float(found[0] / found.sum()) if found.any() else 0.0 for found in sums],
            energy=[bands(found) for found in sums],
        )

    def lowest(self, share: float) -> list[float]:
        """Every layer's energy in this share of the frequencies, from the lowest, without the mean's."""
        edges = np.linspace(0, 1, BINS + 1)
        return [float(np.interp(share, edges, np.cumsum([0, *energy]))) for energy in self.energy]

    def summary(self):
        lines = [f"{self.windows} stretches of {self.window} tokens; energy of hidden states beside that of their mean"]
        parts = zip(self.tokens, self.lowest(0.1), self.lowest(0.2), self.lowest(0.5), self.means, strict=True)
        for layer, (tokens, tenth, fifth, half, mean) in enumerate(parts):
            name = f"layer {layer - 1:>3}" if layer else "embeddings"
            if not any(self.energy[layer]):
                lines.append(f"{name:>10}  {tokens:>6} tokens   all states are equal: they have no frequencies")
                continue
            lines.append(
                f"{name:>10}  {tokens:>6} tokens   lowest tenth {tenth:.1%}, fifth {fifth:.1%}, half {half:.1%}   "
                f"the mean has {mean:.1%} of all"
            )
        return lines

    def figure(self, colours):
        figure = Figure(figsize=(11, 3.6), dpi=160, facecolor=colours["page"], layout="constrained")
        curves, shares, means = figure.subplots(1, 3)
        dressed(curves, "Energy below a frequency", colours)
        dressed(shares, "Energy at low frequencies, by depth", colours)
        dressed(means, "Share of the mean over tokens", colours)
        last = max(len(self.energy) - 1, 1)
        ramp = LinearSegmentedColormap.from_list("depth", [colours["grid"], colours["accent"]])
        edges = np.linspace(0, 1, BINS + 1)
        for layer, energy in enumerate(self.energy):
            name = {0: "embeddings", last: f"layer {last - 1}"}.get(layer)
            curves.plot(edges, np.cumsum([0, *energy]), color=ramp(0.15 + 0.85 * layer / last), label=name)
        dashed = (0, (3, 2))
        curves.plot([0, 1], [0, 1], color=colours["muted"], linewidth=1, linestyle=dashed, label="white noise")
        curves.set_xlabel("share of the frequencies, from the lowest", color=colours["muted"], fontsize=9)
        layers = [*range(len(self.energy))]
        for share, word, colour in ((0.1, "tenth", "accent"), (0.5, "half", "ink")):
            shares.plot(
                layers, self.lowest(share), color=colours[colour], marker="o", markersize=3, label=f"lowest {word}"
            )
            shares.axhline(share, color=colours[colour], linewidth=1, linestyle=dashed)
        shares.set_ylim(0, 1)
        means.plot(layers, self.means, color=colours["accent"], marker="o", markersize=3)
        means.set_ylim(0, 1)
        every = max(1, len(layers) // 7)
        names = ["E", *map(str, range(len(layers) - 1))]
        for axes in (shares, means):
            axes.set_xticks(layers[::every], names[::every])
            axes.set_xlabel("layer's output (E: embeddings)", color=colours["muted"], fontsize=9)
        for axes in (curves, shares, means):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        for axes, place in ((curves, "lower right"), (shares, "upper right")):
            for text in axes.legend(frameon=False, fontsize=8, loc=place).get_texts():
                text.set_color(colours["ink"])
        return figure

    def html(self):
        shorter = "" if len(set(self.tokens)) == 1 else f" Tokens of the layers' outputs: {self.tokens}."
        return (
            f'<p class="note">{self.windows} stretches of {self.window} tokens. Frequencies are along the sequence, as '
            "fractions of the highest one that a layer's own tokens have; dashed lines are white noise. "
            f"The mean over tokens is counted apart.{shorter}</p>"
        )


def bands(energy: Tensor) -> list[float]:
    """The share of every band in the energy of frequencies 1 … T − 1, 0 where there is none. A frequency that lies in
    two bands is parted."""
    if energy[1:].sum() <= ROUNDING * energy.sum():
        return [0.0] * BINS
    rest = energy[1:] / energy[1:].sum()
    edges = np.linspace(0, len(rest), BINS + 1)
    below = np.interp(edges, np.arange(len(rest) + 1), [0.0, *rest.cumsum(0).tolist()])
    return np.diff(below).tolist()


def encode(model: Any, rows: Tensor) -> None:
    """Run the encoder alone."""
    if model.config.model_type == "fathom_encoder":
        model.encode(rows, None)
    elif model.config.is_encoder_decoder:
        model.get_encoder()(input_ids=rows)
    else:
        model(input_ids=rows)


@contextlib.contextmanager
def states_of(model: Any) -> Iterator[list[Tensor]]:
    """Fills a list with the embeddings and every layer's output [B, T, d] as the encoder runs."""
    found: list[Tensor] = []

    def keep(before: Tensor, after: Any) -> None:
        if not found:
            found.append(before)
        found.append(after if isinstance(after, Tensor) else after[0])

    family = model.config.model_type
    if family in OWN:
        owner = operator.attrgetter(OWN[family])(model) if OWN[family] else model
        plain = owner.run_layer

        @functools.wraps(plain)
        def run(layer: Any, shared: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y = plain(layer, shared, x, *args, **kwargs)
            keep(x, y)
            return y

        owner.run_layer = run
        try:
            yield found
        finally:
            del owner.run_layer
        return

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: Any) -> None:
        keep(args[0] if args else kwargs["hidden_states"], after)

    handles = [
        layer.register_forward_hook(hook, with_kwargs=True) for layer in operator.attrgetter(LAYERS[family])(model)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
