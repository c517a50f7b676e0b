"""What Fovea's blocks read: at which resolution a block of tokens sees every other, and what stays unseen.

    y_b = softmax(q_b K_bᵀ + bias) V_b,   K_b the nodes of block b        (arXiv 2311.07102; ops/fovea_attention)

A node of level p stands for 2^p blocks, by means of 2^p tokens. With `boundary` "drop" a node that would pass the end
of the text is left out, and what it would have covered stays unseen. All follows from the text's length alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fathom.inspect.base import Picture
from fathom.inspect.step_map import dressed
from fathom.models.registry import ENCODER, build_options
from fathom.ops.fovea_attention.nodes import chosen

LISTED = 8  # blocks whose nodes are written out
OUTLINED = 48  # blocks up to which every node has an outline
UNSEEN = "#c8553d"  # apart from the accent, which is the levels'


@dataclasses.dataclass(frozen=True)
class NodeMap(Picture):
    """The nodes of every block of one text.

    Attributes:
        tokens, block_len: of the text, as far as it is read at once, and of a block.
        lists: of every block its nodes in the order of the text, [first block, level].
    """

    name = "nodes"
    title = "What every block of tokens reads"
    shows = "models with encoder fovea"

    tokens: int
    block_len: int
    lists: list[list[list[int]]]

    @classmethod
    def offered(cls, config) -> bool:
        return (getattr(config, ENCODER, None) or {}).get("name") == "fovea"

    @classmethod
    def measure(cls, model, tokenizer, token_ids, window, batch_size=8) -> Self:
        if len(token_ids) < 2:
            raise ValueError(f"token_ids of {len(token_ids)} tokens: give at least two")
        options: Any = build_options(ENCODER, model.config.encoder)
        tokens = min(window, len(token_ids))
        blocks = -(-tokens // options.block_len)
        lists = chosen(blocks, options.wing_size, options.stop_level, options.boundary, options.steps)
        return cls(tokens, options.block_len, [[list(node) for node in nodes] for nodes in lists])

    @property
    def keys(self) -> list[int]:
        """Keys that a token of every block reads."""
        return [len(nodes) * self.block_len for nodes in self.lists]

    @property
    def levels(self) -> np.ndarray:
        """[reading block, block]: the level at which it is read, −1 where it is not."""
        found = np.full((len(self.lists), len(self.lists)), -1)
        for block, nodes in enumerate(self.lists):
            for start, level in nodes:
                found[block, start : start + 2**level] = level
        return found

    def unseen(self, block: int) -> list[tuple[int, int]]:
        """The stretches of blocks that a block does not read, first and last."""
        ends = [0, *(end for start, level in self.lists[block] for end in (start, start + 2**level)), len(self.lists)]
        return [(start, stop - 1) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]

    @property
    def unseen_share(self) -> float:
        """The share of pairs of blocks of which one does not read the other."""
        return float((self.levels < 0).mean())

    def summary(self):
        blocks, mean = len(self.lists), float(np.mean(self.keys))
        lines = [
            f"{self.tokens:,} tokens in {blocks} blocks of {self.block_len}; a token reads {mean:,.0f} keys, "
            f"{mean / (blocks * self.block_len):.1%} of all; {self.unseen_share:.1%} of the pairs of blocks stay unseen"
        ]
        places = sorted({round(place) for place in np.linspace(0, blocks - 1, min(LISTED, blocks))})
        for block in places:
            nodes = "  ".join(_named(start, level) for start, level in self.lists[block])
            missing = ", ".join(_span(*ends) for ends in self.unseen(block)) or "none"
            lines.append(f"block {block:>4} reads {nodes};  unseen: {missing}")
        return lines

    def figure(self, colours):
        levels, blocks = self.levels, len(self.lists)
        most = int(levels.max())
        figure = Figure(figsize=(11, 5.2), dpi=160, facecolor=colours["page"], layout="constrained")
        cells, lines = figure.subplots(1, 2, width_ratios=[1.5, 1])
        dressed(cells, "The resolution at which a block reads another", colours)
        dressed(lines, "Share of the text, by reading block", colours)

        ramp = LinearSegmentedColormap.from_list("levels", [colours["accent"], colours["grid"]])
        shades: list[Any] = [ramp(level / max(most, 1)) for level in range(most + 1)]
        edges, shading = np.arange(blocks + 1), ListedColormap([UNSEEN, *shades])
        cells.pcolormesh(edges, edges, levels, cmap=shading, norm=BoundaryNorm(np.arange(-1.5, most + 1.5), most + 2))
        if blocks <= OUTLINED:
            for block, nodes in enumerate(self.lists):
                for start, level in nodes:
                    edge = {"edgecolor": colours["page"], "facecolor": "none", "linewidth": 1}
                    cells.add_patch(Rectangle((start, block), 2**level, 1, **edge))
        cells.set_xlim(0, blocks)
        cells.set_ylim(blocks, 0)
        cells.set_aspect("equal")
        every = max(1, -(-blocks // 8))
        ticks = range(0, blocks, every)
        cells.set_xticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
        cells.set_yticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
        cells.set_xlabel(f"block of {self.block_len} tokens that is read", color=colours["muted"], fontsize=9)
        cells.set_ylabel("block that reads", color=colours["muted"], fontsize=9)
        named = [(shades[level], "every token" if level == 0 else f"means of {2**level}") for level in range(most + 1)]
        if (levels < 0).any():
            named.append((UNSEEN, "unseen"))
        legend = cells.legend(
            handles=[Patch(facecolor=shade, label=label) for shade, label in named], frameon=False, fontsize=8,
            loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_color(colours["ink"])

        place = np.arange(blocks)
        whole = blocks * self.block_len
        lines.plot(
            place, np.array(self.keys) / whole, color=colours["accent"], drawstyle="steps-mid", label="keys read"
        )
        lines.plot(place, (levels < 0).mean(1), color=UNSEEN, drawstyle="steps-mid", label="unseen tokens")
        lines.set_ylim(0, 1.02 if blocks < 4 else None)
        lines.set_ylim(bottom=0)
        lines.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        lines.set_xlabel("block that reads", color=colours["muted"], fontsize=9)
        legend = lines.legend(frameon=False, fontsize=9)
        for text in legend.get_texts():
            text.set_color(colours["ink"])
        return figure

    def html(self):
        return (
            f'<p class="note">{self.tokens:,} tokens, {len(self.lists)} blocks. A row is a block of queries, a column '
            "what it reads: its neighbours in full, blocks farther away by means. All follows from the length.</p>"
        )


def _named(start: int, level: int) -> str:
    return str(start) if level == 0 else f"{_span(start, start + 2**level - 1)} (/{2**level})"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
