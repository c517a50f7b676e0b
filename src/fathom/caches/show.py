"""A picture of a cache: which tokens of the text each layer and head kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fathom.caches.base import CacheMethod
from fathom.caches.compress import compress, prefill
from fathom.caches.token_budget import tracking
from fathom.caches.versions import CACHE_NAME
from fathom.writing import naming


@torch.no_grad()
def kept_tokens(model: nn.Module, input_ids: Tensor, method: CacheMethod, chunk: int = 512) -> Tensor:
    """Whether each layer and head still holds each token of one row [1,T] after reading it: bool [layers, heads, T].

    Raises:
        ValueError: more than one row, or a method whose slots are not tokens (FreqKV) or that keeps every token.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has {input_ids.shape[0]} rows: a picture shows one")
    token = tracking.set(True)
    try:
        with compress(model, method):
            cache = prefill(model, input_ids, chunk_size=chunk)[CACHE_NAME]
    finally:
        tracking.reset(token)
    rows = []
    for layer in cache.compressed_layers():
        positions = layer.states[0].kept_positions()
        if positions is None:
            raise ValueError(f"{type(method).__name__} has no kept tokens to show: choose a token-budgeted method")
        kept = torch.zeros(positions.shape[1], input_ids.shape[1], dtype=torch.bool)
        rows.append(kept.scatter(1, positions[0].cpu(), True))
    return torch.stack(rows)


def draw(kept: Tensor, words: list[str], title: str, path: str | os.PathLike) -> None:
    """Write the picture, in the format of the file's ending. A row is one head of a layer, a column is a token; below
    stands the share of heads that keep each token. Short texts are written beside the columns.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    layers, heads, tokens = kept.shape
    named = tokens <= 160
    width = min(24.0, max(8.0, tokens * (0.16 if named else 0.01)))
    height = min(14.0, max(3.5, layers * heads * 0.07 + 2.2))
    figure, (grid, share) = plt.subplots(
        2, 1, figsize=(width, height), sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    grid.imshow(kept.flatten(0, 1).numpy(), aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1.25)
    step = max(1, layers // 12)
    grid.set_yticks([heads * layer + (heads - 1) / 2 for layer in range(0, layers, step)], range(0, layers, step))
    for layer in range(1, layers):
        grid.axhline(heads * layer - 0.5, color="white", linewidth=0.4)
    grid.set_ylabel(f"layer ({heads} key heads each)")
    grid.set_title(f"{title}: {int(kept.sum(-1).float().mean())} of {tokens} tokens kept per head")
    share.fill_between(range(tokens), kept.float().mean((0, 1)).numpy(), step="mid", color="#2a6fb0")
    share.set_ylim(0, 1.02)
    share.set_ylabel("kept by")
    if named:
        shown = [word.replace("\n", "↵").replace("$", r"\$").strip() or "·" for word in words]
        share.set_xticks(range(tokens), shown, rotation=90, fontsize=6)
    else:
        share.set_xlabel("token")
    temporary = Path(os.fspath(path)).with_suffix(f".{os.getpid()}.part{Path(os.fspath(path)).suffix}")
    with naming(path):
        figure.savefig(temporary, dpi=150)
        temporary.replace(path)
    plt.close(figure)


def as_text(kept: Tensor, words: list[Any], columns: int = 100) -> str:
    """The picture for a terminal: the text, each word marked with the share of heads that keep it (tenths, 0 … 9)."""
    share = kept.float().mean((0, 1))
    lines, line = [], ""
    for word, part in zip(words, share.tolist()):
        piece = f"{str(word).strip() or '·'}·{min(9, int(part * 10))} "
        if len(line) + len(piece) > columns:
            lines.append(line)
            line = ""
        line += piece
    return "\n".join([*lines, line])
