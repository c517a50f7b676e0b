r"""Which embedding row of one model is which of another: by token, by number, or, where neither fits, by content.

A copy whose rows were renumbered, with its tokenizer removed or left as it was, still has the same rows. Turned by any
rotation R and scaled, a row e keeps

    eᵀCᵏe (k = 0, 1, 2),   eᵀCᵏμ,   eᵀCᵏν (k = 0 … 3),    μ = mean of rows,  C = EᵀE/V,  ν = mean of ‖e‖²e

eleven numbers that hardly any two rows share. Rows that are each other's nearest in them are matched; a rotation is
fitted to those, and those that it brings together are kept.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.align import LOUD, quiet
from fathom.lineage.cka import Samples, unbiased_cka
from fathom.lineage.reader import Checkpoint
from fathom.lineage.short_products import length
from fathom.lineage.token_rows import shared_rows

_SAMPLE = 2048  # rows on which it is seen whether two tables correspond
_SHUFFLES = 8
_FACTOR = 4.0  # times the most that shuffled rows have in common
_FEW = 64  # fewer rows say nothing about whether they correspond
_TIED = 0.5
_TOGETHER = 0.9  # cosine of matched rows after the rotation


@dataclass(frozen=True)
class Rows:
    """Matched rows of two embeddings. how: "token", "number" or "content". doubt: why the match may be wrong, or ""."""

    a: list[int]
    b: list[int]
    how: str
    doubt: str = ""


def matched_rows(a: Checkpoint, b: Checkpoint) -> Rows:
    """Rows of the same token, or by number where a tokenizer is missing; by content where those do not correspond."""
    rows = shared_rows(a.vocabulary, b.vocabulary, a.vocab_rows, b.vocab_rows)
    how = "number" if a.vocabulary is None or b.vocabulary is None else "token"
    if how == "token" and len(rows[0]) < _FEW:
        return Rows(*rows, how)
    if _correspond(a, b, rows):
        return Rows(*rows, how)
    found = _by_content(canonical.embedding(a, None), canonical.embedding(b, None))
    if found is not None:
        return Rows(*found, "content")
    doubt = (
        "one model has no tokenizer, and rows with one number have nothing in common"
        if how == "number"
        else "embedding rows of one token have nothing in common"
    )
    return Rows(
        *rows, how, f"{doubt}: renumbered rows, or an embedding that was redrawn or never trained, hide any origin"
    )


def _correspond(a: Checkpoint, b: Checkpoint, rows: tuple[list[int], list[int]]) -> bool:
    """Whether matched rows are more alike than shuffled ones; unbiased CKA with rows as samples needs no alignment."""
    step = max(1, len(rows[0]) // _SAMPLE)
    picked = [torch.tensor(r[::step][:_SAMPLE]) for r in rows]
    if len(picked[0]) < 4:
        return False
    left, right = (
        _quiet(canonical.embedding(m, None)[i.to(m.device)]) for m, i in zip((a, b), picked)
    )  # rows of a table that is memory-mapped: only their pages are read
    ours = Samples.of(left)
    generator = torch.Generator().manual_seed(0)
    mixed = [right[torch.randperm(len(right), generator=generator).to(right.device)] for _ in range(_SHUFFLES)]
    chance = max(abs(unbiased_cka(ours, Samples.of(m))) for m in mixed)
    return unbiased_cka(ours, Samples.of(right)) > _FACTOR * chance


def ties(model: Checkpoint) -> bool:
    """Whether embedding and output head are one, in effect: also where the head is stored apart with a gain folded in.
    Unbiased CKA of the two over rows is about 1 for tied models, 0.01 to 0.07 for trained untied ones."""
    if model.tied:
        return True
    rows = slice(0, _SAMPLE)
    tables = [
        _quiet(t[:_SAMPLE]) for t in (canonical.embedding(model, None, rows), canonical.output_head(model, None, rows))
    ]
    return len(tables[0]) >= 4 and unbiased_cka(*(Samples.of(t) for t in tables)) > _TIED


def _quiet(rows: Tensor) -> Tensor:
    return quiet(rows, LOUD * length(rows, 1).median().item())


def _features(table: Tensor) -> np.ndarray:
    e = _quiet(table).double()
    e = e / e.norm(dim=1).median().clamp_min(1e-300)
    c = e.T @ e / len(e)
    c = c / c.diagonal().sum()
    turned, square = e @ c, e.square().sum(1)
    found = [square, (e * turned).sum(1), turned.square().sum(1)]
    for vector in (e.mean(0), (square[:, None] * e).mean(0)):
        for _ in range(4):
            vector = vector / vector.norm().clamp_min(1e-300)
            found.append(e @ vector)
            vector = c @ vector
    table = torch.stack(found, 1)
    spread = (table - table.median(0).values).abs().median(0).values
    return (table / spread.clamp_min(1e-12)).cpu().numpy()


def _by_content(a: Tensor, b: Tensor) -> tuple[list[int], list[int]] | None:
    """Rows that are each other's nearest by content and meet after one rotation; None when fewer than the width do."""
    features = _features(a), _features(b)
    there = cKDTree(features[1]).query(features[0])[1]
    back = cKDTree(features[0]).query(features[1])[1]
    mutual = np.nonzero(back[there] == np.arange(len(there)))[0]
    least = max(_FEW, min(a.shape[1], b.shape[1]))
    if len(mutual) < least:
        return None
    rows_a, rows_b = torch.from_numpy(mutual).to(a.device), torch.from_numpy(there[mutual]).to(b.device)
    x, y = _quiet(a)[rows_a], _quiet(b)[rows_b]
    u, _, vt = torch.linalg.svd(x.T @ y, full_matrices=False)
    keep = torch.cosine_similarity(x @ (u @ vt), y) > _TOGETHER
    if int(keep.sum()) < least:
        return None
    return rows_a[keep].tolist(), rows_b[keep].tolist()
