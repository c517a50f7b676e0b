"""Baselines of hardened AWM and HuRef: PCS, the σ-profile, and REEF-style CKA of activations."""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fathom.lineage.attack import stock_model
from fathom.lineage.cka import biased_cka
from fathom.lineage.reader import Checkpoint
from fathom.lineage.weights import Weights


def pcs(a: Checkpoint, b: Checkpoint) -> float:
    """Parameter cosine similarity (HuRef, arXiv 2312.04828): cosine over all equally shaped weights, matched by role.

    0 when no weight of the two has the same shape.
    """
    dot = energy_a = energy_b = 0.0
    for x, y in _same_roles(a, b):
        if x.shape == y.shape:
            dot += (x * y).sum(dtype=torch.float64).item()
            energy_a += x.square().sum(dtype=torch.float64).item()
            energy_b += y.square().sum(dtype=torch.float64).item()
    return dot / math.sqrt(energy_a * energy_b) if energy_a and energy_b else 0.0


def _same_roles(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
    """Every weight that both models store, by role: embedding, head where both are untied, norms, biases, layers."""
    yield a.embedding(), b.embedding()
    if not a.tied and not b.tied:
        yield a.head(), b.head()
    for role in set(a.outer_roles()) & set(b.outer_roles()):
        x, y = a.outer(role), b.outer(role)
        if x is not None and y is not None:
            yield x, y
    for layer in range(min(a.geometry.layers, b.geometry.layers)):
        for role in set(a.unfused_roles(layer)) & set(b.unfused_roles(layer)):
            yield a.read(layer, role), b.read(layer, role)


def sigma_profile(a: Checkpoint, b: Checkpoint) -> float:
    """Mean Pearson correlation over depth of the standard deviations of W_q, W_k, W_v, W_o (arXiv 2507.03014).

    Different depths: both curves are interpolated to the longer one. Needs at least three layers (else NaN).
    """
    depth = max(a.geometry.layers, b.geometry.layers)
    if min(a.geometry.layers, b.geometry.layers) < 3:
        return math.nan
    grid = np.linspace(0, 1, depth)
    scores = []
    for role in "qkvo":
        curves = []
        for model in (a, b):
            values = [model.read(l, role).std().item() for l in range(model.geometry.layers) if model.has(l, role)]
            curves.append(np.interp(grid, np.linspace(0, 1, len(values)), values))
        if all(c.std() > 0 for c in curves):
            scores.append(np.corrcoef(curves[0], curves[1])[0, 1])
    return float(np.mean(scores)) if scores else math.nan


def token_ids(text: str, vocabulary: Mapping[bytes, int], limit: int = 32) -> Tensor:
    """Up to `limit` ids of a text by greedy longest match, [T]: any two models read the same text without their
    tokenizers.

    Bytes that no token begins with are left out. A begin-of-sequence token is put first where the vocabulary has one.
    Raises ValueError when nothing of the text is in the vocabulary.
    """
    data, longest, at = text.encode(), max(map(len, vocabulary)), 0
    ids = [vocabulary[t] for t in (b"<bos>", b"<s>", b"<|begin_of_text|>") if t in vocabulary][:1]
    while at < len(data) and len(ids) < limit:
        size = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in vocabulary), None)
        if size is not None:
            ids.append(vocabulary[data[at : at + size]])
        at += size or 1
    if not ids:
        raise ValueError(f"text: {text[:40]!r} has nothing in common with the vocabulary")
    return torch.tensor(ids)


def activations(weights: Weights, texts: list[Tensor]) -> Tensor:
    """Hidden states of the last token of each text after every layer, [layers, texts, hidden], as transformers
    computes them."""
    with tempfile.TemporaryDirectory(prefix="fathom-reef-") as folder:
        path = weights.save(Path(folder) / "model", torch.float32)
        model = stock_model(path, torch.float32)
        with torch.no_grad():
            states = [model(t[None], output_hidden_states=True).hidden_states for t in texts]
    return torch.stack([torch.stack([h[l][0, -1] for h in states]) for l in range(1, len(states[0]))])


def reef(a: Tensor, b: Tensor) -> float:
    """REEF (arXiv 2410.14273): linear CKA of layer ⌊0.6·L⌋ of the victim with the best layer of the suspect.

    a, b: `activations` [layers, texts, hidden] on the same texts; widths may differ.
    """
    victim = a[int(0.6 * len(a))]
    return max(biased_cka(victim, layer) for layer in b)
