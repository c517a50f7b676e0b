r"""Which residual axis of one model is which of the other: a signed permutation or a rotation, from shared token rows.

    LAP          S = cos(columns of E_a, columns of E_b) ∈ R^{d_a×d_b};   max_π Σ_j |S_{π(j), j}|,   sign_j = sign
    S_{π(j), j}
    Procrustes   E_aᵀE_b = U Σ Vᵀ;   R = U Vᵀ = argmin ‖E_a R − E_b‖_F over (semi-)orthogonal R ∈ R^{d_a×d_b}

Model a is the wider one. LAP is AWM's step 1 (arXiv 2510.06738, section 4); Procrustes also undoes rotations of
the residual
stream (QuaRot, SliceGPT), at the price of a higher score for unrelated models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fathom.lineage.errors import NoAnchorError
from fathom.lineage.short_products import is_short, length, near_one, precision

Mode = Literal["lap", "procrustes"]
_CHUNK = 512  # token rows at a time: what a core's cache holds
LOUD = 4.0  # times the median norm: rows that are longer say little about the rest


@dataclass(frozen=True)
class Alignment:
    """A map of residual axes. `apply` takes a reader or embedding [n, d_a] to b's axes [n, d_b].

    confidence: mean |cosine| of matched columns.  margin: mean distance to the best other candidate of the same column.
    """

    mode: str
    anchor: str
    tokens: int
    index: Tensor | None
    sign: Tensor | None
    rotation: Tensor | None
    confidence: float
    margin: float

    def apply(self, weight: Tensor) -> Tensor:
        if self.rotation is not None:
            return weight @ self.rotation
        if self.index is None or self.sign is None:
            return weight
        return weight.index_select(1, self.index).mul_(self.sign)

    @property
    def moved(self) -> bool:
        """Whether any axis has another place or sign than before."""
        if self.index is None or self.sign is None:
            return self.rotation is not None
        return bool(
            (self.index != torch.arange(len(self.index), device=self.index.device)).any() or (self.sign < 0).any()
        )


class TokenTable:
    """An embedding or head [V, d] that is read when asked for: slices by themselves, scattered rows from the whole."""

    def __init__(self, read: Callable[[slice | None], Tensor], width: int) -> None:
        self._read, self.width = read, width

    @cached_property
    def _whole(self) -> Tensor:
        return self._read(None)

    def rows(self, rows: list[int]) -> Tensor:
        """Rows as listed, [len(rows), d]."""
        # Rows follow one another where both models have one tokenizer.
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return self._read(slice(rows[0], rows[0] + len(rows)))
        return self._whole[torch.tensor(rows, device=self._whole.device)]


def _held(table: Tensor) -> TokenTable:
    return TokenTable(lambda rows: table if rows is None else table[rows], table.shape[1])


def identity(mode: str, anchor: str = "identity") -> Alignment:
    """Axes taken as they are: for models of equal width without a usable anchor."""
    return Alignment(mode, anchor, 0, None, None, None, float("nan"), float("nan"))


def cross_covariance(
    a: TokenTable, b: TokenTable, rows_a: list[int], rows_b: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(AᵀB [d_a, d_b], column norms of A, of B) over matched rows, gathered in chunks, each up to a power of two.

    Rows longer than 4 times the median are halved until they are not: one loud row, of a token that no text has, would
    decide the map alone.
    """
    like = a.rows(rows_a[:1])
    # A scaled residual stream changes no cosine; its squares must stay within float32.
    scale_a, scale_b = (near_one(t.rows(r[:_CHUNK])) for t, r in ((a, rows_a), (b, rows_b)))
    limit_a, limit_b = (_loudest(t, r) * s for t, r, s in ((a, rows_a, scale_a), (b, rows_b, scale_b)))
    cross = like.new_zeros(a.width, b.width)
    norm_a = like.new_zeros(a.width, dtype=torch.float64)
    norm_b = like.new_zeros(b.width, dtype=torch.float64)
    size = _CHUNK if like.device.type == "cpu" else 32 * _CHUNK
    for start in range(0, len(rows_a), size):
        part_a, part_b = (t.rows(r[start : start + size]) for t, r in ((a, rows_a), (b, rows_b)))
        part_a = quiet(part_a if scale_a == 1 else part_a * scale_a, limit_a)
        part_b = quiet(part_b if scale_b == 1 else part_b * scale_b, limit_b)
        with precision(is_short(part_a) and is_short(part_b)):
            cross.addmm_(part_a.T, part_b)
        norm_a += part_a.square().sum(0).double()
        norm_b += part_b.square().sum(0).double()
    return cross, norm_a.sqrt(), norm_b.sqrt()


def _loudest(table: TokenTable, rows: list[int]) -> float:
    """4 times the median norm of a row, from up to 8 chunks spread over the table."""
    starts = range(0, len(rows), max(_CHUNK, len(rows) // 8))
    return LOUD * torch.cat([length(table.rows(rows[i : i + _CHUNK]), 1) for i in starts]).median().item()


def quiet(rows: Tensor, limit: float) -> Tensor:
    """Rows [n, d] longer than `limit` halved until they are not; powers of two round nothing."""
    norm = length(rows, 1).double()
    if limit == 0 or not (norm > limit).any():
        return rows
    return rows * torch.where(norm > limit, (limit / norm).log2().floor().exp2(), 1.0).to(rows.dtype)


def align(
    a: Tensor | TokenTable,
    b: Tensor | TokenTable,
    rows_a: list[int],
    rows_b: list[int],
    mode: Mode,
    anchor: str = "embedding",
) -> Alignment:
    """Align the columns of a [V_a, d_a] with those of b [V_b, d_b], d_a ≥ d_b, over the rows of shared tokens.

    Raises NoAnchorError when no token is shared, ValueError when d_a < d_b.
    """
    if not rows_a:
        raise NoAnchorError("no shared tokens: the two vocabularies have no entry in common, so axes cannot be matched")
    a, b = (t if isinstance(t, TokenTable) else _held(t) for t in (a, b))
    if a.width < b.width:
        raise ValueError(f"a: {a.width} columns, b: {b.width}; pass the wider model first")
    cross, norm_a, norm_b = cross_covariance(a, b, rows_a, rows_b)
    cosine = cross / (norm_a[:, None] * norm_b).clamp_min(1e-30).to(cross.dtype)
    if mode == "procrustes":
        u, s, vt = torch.linalg.svd(cross, full_matrices=False)
        rotation = u @ vt
        # Σσ / (‖E_a‖‖E_b‖) is the cosine of the two tables after rotation.
        confidence = (s.sum(dtype=torch.float64) / (norm_a.norm() * norm_b.norm()).clamp_min(1e-30)).item()
        return Alignment(mode, anchor, len(rows_a), None, None, rotation, confidence, float("nan"))
    strength = cosine.abs()
    _, columns = linear_sum_assignment((1 - strength.T).cpu().numpy())  # every column of b gets its own column of a
    index = torch.as_tensor(columns, device=cross.device)
    here = torch.arange(b.width, device=cross.device)
    matched = strength[index, here]
    sign = torch.where(cosine[index, here] < 0, -1.0, 1.0).to(cross.dtype)  # sign(0) is +1: no axis is deleted
    strength[index, here] = -1
    margin = (matched - strength.amax(0)).mean().item()
    return Alignment(mode, anchor, len(rows_a), index, sign, None, matched.mean().item(), margin)


def fixed_frame(width: int, like: Tensor) -> Tensor:
    """One orthogonal matrix [width, width] for all: unbiased CKA drops a diagonal, so scores depend on the frame.

    After Procrustes both sides are turned by it, which makes the score independent of the frame a model came in
    (to about 3e-4).
    """
    generator = torch.Generator().manual_seed(20251006)
    gaussian = torch.randn(width, width, generator=generator, dtype=torch.float32).to(like.device, like.dtype)
    return torch.linalg.qr(gaussian)[0]
