"""A picture of a mixture's routing over training, from the statistics of layers in a run's metrics.jsonl.

The run is the folder that a model lies in. Nothing is measured anew, and no text is read.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from fathom.inspect.base import Picture


@dataclasses.dataclass(frozen=True)
class RoutingHistory(Picture):
    """Load over training.

    Attributes:
        slices: G, experts of a group.
        steps: of the lines.
        loads: of every line, the share of the token-expert pairs that an expert has, the mean over the layers.
        largest: of every line and layer, the largest share over the mean one.
        information: likewise, nats that an expert tells of its token's source; empty where sources have no names.
    """

    name = "routing_history"
    title = "Load of the experts over training"
    shows = "models with feed_forward moe in the folder of their run"

    slices: int
    steps: list[int]
    loads: list[list[float]]
    largest: list[list[float]]
    information: list[list[float]]

    @classmethod
    def offered(cls, config) -> bool:
        return (getattr(config, "feed_forward", None) or {}).get("name") == "moe" and bool(lines_of(config))

    @classmethod
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        lines = lines_of(model.config)
        return cls(
            slices=model.config.feed_forward["slices"],
            steps=[line["step"] for line in lines],
            loads=[np.mean(line["expert_load"], 0).tolist() for line in lines],
            largest=[line["load_max_over_mean"] for line in lines],
            information=[line["domain_information"] for line in lines if "domain_information" in line],
        )

    def summary(self):
        def span(values: list[float]) -> str:
            return f"{min(values):.2f} to {max(values):.2f}"

        curves = [("largest load over the mean", self.largest), ("nats of a token's source", self.information)]
        return [f"load over {len(self.steps)} lines of a run, up to step {self.steps[-1]:,}"] + [
            f"{what}, by layer: {span(values[0])} at first, {span(values[-1])} at last"
            for what, values in curves
            if values
        ]

    def figure(self, colours):
        figure = Figure(figsize=(11, 3.4), dpi=160, facecolor=colours["page"], layout="constrained")
        panels = figure.subplots(1, 3 if self.information else 2)
        map_ = LinearSegmentedColormap.from_list("load", [colours["page"], colours["accent"]])
        loads = np.array(self.loads).T * len(self.loads[0])
        edges = np.arange(len(self.loads) + 1), np.arange(len(loads) + 1)
        image = panels[0].pcolormesh(*edges, loads, cmap=map_, vmin=0)
        panels[0].invert_yaxis()
        ticks = np.unique(np.linspace(0, len(self.steps) - 1, 5).astype(int))
        panels[0].set_xticks(ticks + 0.5, [str(self.steps[at]) for at in ticks])
        for line in range(self.slices, len(loads), self.slices):
            panels[0].axhline(line, color=colours["grid"], linewidth=0.8)
        panels[0].set_ylabel("expert (lines part the groups)", color=colours["muted"], fontsize=9)
        bar = figure.colorbar(image, ax=panels[0], fraction=0.04)
        bar.ax.tick_params(colors=colours["muted"], labelsize=8)
        for axes, values in zip(panels[1:], (self.largest, self.information), strict=False):
            layers = np.array(values).T
            for layer, row in enumerate(layers):
                depth = 0.25 + 0.75 * (layer + 1) / len(layers)
                axes.plot(self.steps[-len(row) :], row, color=colours["accent"], alpha=depth, linewidth=1.2)
            axes.set_ylim(bottom=0)
        titles = "Load over its mean, of all layers", "Largest load over the mean", "Nats an expert tells of the source"
        for axes, title in zip(panels, titles, strict=False):
            axes.set_title(title, fontsize=10, color=colours["ink"], loc="left")
            axes.set_xlabel("step (later layers darker)", color=colours["muted"], fontsize=9)
            axes.tick_params(colors=colours["muted"], labelsize=8.5, length=0)
            axes.set_facecolor(colours["page"])
            axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        panels[0].set_xlabel("step", color=colours["muted"], fontsize=9)
        return figure


def lines_of(config: Any) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl that say what experts had to do; none where there is no run."""
    folder = getattr(config, "_name_or_path", "")
    file = Path(folder).resolve().parent / "metrics.jsonl"
    if not folder or not file.is_file():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a killed process wrote half of it
            break
        if "expert_load" in line:
            lines.append(line)
    return lines
