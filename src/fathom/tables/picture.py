"""A picture of a question and a database: each word's relation to each part of the schema, and its attention to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fathom.tables.relations import NUMBER
from fathom.tables.source import Encoded

# What a cell of the left picture is, from the relations of words to parts of the schema.
KINDS = {"no match": ("none", "generic"), "partial": ("partial",), "exact": ("exact",), "value": ("value",)}
_COLOURS = ("#eeeeee", "#f2c879", "#3f7fb5", "#5da271")


def matches(made: Encoded) -> tuple[list[str], list[str], np.ndarray, np.ndarray]:
    """Words, parts of the schema, the kind of each pair [words, parts] by its number in KINDS, and their rows."""
    text = made.text.text
    words = [item for item in made.text.items if item.kind == "word"]
    parts = [item for item in made.text.items if item.kind in ("table", "column")]
    order = dict(zip(made.text.items, made.places.tolist(), strict=True))
    rows, columns = np.array([order[w] for w in words]), np.array([order[p] for p in parts])
    names = {number: name.partition(":")[2] for name, number in NUMBER.items()}
    kinds = {name: index for index, (_, said) in enumerate(KINDS.items()) for name in said}
    known = made.table[np.ix_(rows, columns)]
    kind = np.vectorize(lambda number: kinds.get(names.get(int(number), ""), 0))(known)
    said = [text[item.start : item.stop] for item in words], [text[item.start : item.stop] for item in parts]
    return *said, kind, np.concatenate([rows, columns])


def draw(made: Encoded, attention: np.ndarray) -> Figure:
    """Relations on the left, attention from words to the schema on the right."""
    words, parts, kind, rows = matches(made)
    present = sorted({row for row in made.rows.tolist() if row >= 0})
    known = {row: index for index, row in enumerate(present)}
    height, width = max(3.0, 0.3 * len(words)), max(8.0, 0.36 * len(parts) + 4)
    figure = Figure((width, height + 2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.imshow(kind, cmap=ListedColormap(_COLOURS), vmin=0, vmax=len(KINDS) - 1, aspect="auto")
    left.set_title("relation of a word to the schema")
    seen = np.full(kind.shape, np.nan)
    for i, row in enumerate(rows[: len(words)]):
        for j, column in enumerate(rows[len(words) :]):
            if row in known and column in known:
                seen[i, j] = attention[known[row], known[column]]
    image = right.imshow(seen, cmap="viridis", aspect="auto")
    right.set_title("attention, mean over layers and heads")
    figure.colorbar(image, ax=right)
    for axes in (left, right):
        axes.set_xticks(range(len(parts)), parts, rotation=90, fontsize=7)
    left.set_yticks(range(len(words)), words, fontsize=8)
    handles: list[Any] = [left.scatter([], [], marker="s", color=c, label=name) for c, name in zip(_COLOURS, KINDS)]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(KINDS), fontsize=8)
    return figure
