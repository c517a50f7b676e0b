r"""Linear centred kernel alignment (CKA), unbiased, of two matrices whose rows are the same d samples.

    HSIC_u(K, L) ∝ ‖XᵀY‖²_F − Σ kᵢlᵢ + (Σr)(Σs)/((d−1)(d−2)) − 2/(d−2)·Σ rᵢsᵢ
    UCKA(X, Y)   = HSIC_u(K, L) / √(HSIC_u(K, K) · HSIC_u(L, L)),     K = XXᵀ, L = YYᵀ without their diagonals,
    kᵢ = ‖xᵢ‖²,  r = X(Xᵀ1) − k (row sums of K),  l and s likewise for Y.

UCKA(XU, cY) = UCKA(X, Y) for orthogonal U and any c ≠ 0; for independent X, Y its mean is 0 however wide they are,
which
is the point of "unbiased". The same number follows from the U-centred Gram matrices (`centred_gram`), the form to use
when one matrix meets many others. Estimator: Song et al. 2012 ("Feature selection via dependence
maximization", JMLR 13); as CKA: Kornblith et al. 2019 (arXiv 1905.00414), Nguyen et al. 2021 (arXiv 2010.15327).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.lineage.short_products import gram, is_short, near_one, precision

# A self-term this small against ‖K‖²_F is rounding, not structure. Relative: scaling a matrix must not change the
# verdict.
_FLOOR = 1e-6
_ROUNDING = 1e-5  # what is left of a constant matrix when its mean is taken out


@dataclass(frozen=True)
class Samples:
    """A matrix X [d, p] with what every comparison of it needs: k, r (float64, [d]), HSIC_u(K, K), whether bfloat16
    holds X (see `short_products`), and XXᵀ where it is no larger than XᵀX."""

    x: Tensor
    short: bool
    gram: Tensor | None
    k: Tensor
    r: Tensor
    self_hsic: float

    @classmethod
    def of(cls, x: Tensor) -> "Samples":
        """x: [d, p], d ≥ 4 samples in rows, p features in columns."""
        if x.ndim != 2 or x.shape[0] < 4:
            raise ValueError(f"x: shape {tuple(x.shape)}; unbiased CKA needs a matrix with at least 4 rows")
        x = _steady(x)
        short, wide = is_short(x), x.shape[1] >= x.shape[0]
        with precision(short):
            inner = gram(x if wide else x.T)
        if wide:
            k = inner.diagonal().double()
            r = inner.sum(1).double() - k
        else:
            k = x.square().sum(1).double()
            r = (x @ x.sum(0)).double() - k
        square = _energy(inner)
        hsic = square - k.dot(k).item() + _mean_terms(r, r)
        return cls(x, short, inner if wide else None, k, r, hsic if hsic > _FLOOR * square else 0.0)


def _steady(x: Tensor) -> Tensor:
    """X [d, p] brought near 1, and without the means of its columns where they outweigh the rest: UCKA sees neither the
    scale nor a constant added to all samples, but float32 sums would lose the rest beside them."""
    scale = near_one(x)
    x = x if scale == 1 else x * scale
    mean, size = x.mean(0), torch.linalg.vector_norm(x)
    if mean.norm() * math.sqrt(2 * x.shape[0]) <= size:
        return x
    rest = x - mean
    return rest if torch.linalg.vector_norm(rest) > _ROUNDING * size else torch.zeros_like(x)


def _energy(x: Tensor) -> float:
    """‖X‖²_F: rows in the dtype of x, their sum in float64 (summing float32 entries in float64 costs ten times as
    much)."""
    return torch.linalg.vector_norm(x, dim=1).double().square().sum().item()


def _mean_terms(r: Tensor, s: Tensor) -> float:
    d = r.shape[0]
    return (r.sum() * s.sum()).item() / ((d - 1) * (d - 2)) - 2 / (d - 2) * r.dot(s).item()


def unbiased_cka(a: Samples, b: Samples) -> float:
    """UCKA(X, Y) from the closed form; 0 when either side is constant over the samples (or empty)."""
    if a.x.shape[0] != b.x.shape[0]:
        raise ValueError(f"a, b: {a.x.shape[0]} and {b.x.shape[0]} rows; CKA compares matrices over the same samples")
    if a.self_hsic == 0 or b.self_hsic == 0:
        return 0.0
    if a.gram is not None and b.gram is not None:
        cross = torch.linalg.vecdot(a.gram, b.gram).sum(dtype=torch.float64).item()
    else:
        with precision(a.short and b.short):
            cross = _energy(a.x.T @ b.x)
    hsic = cross - a.k.dot(b.k).item() + _mean_terms(a.r, b.r)
    return hsic / math.sqrt(a.self_hsic * b.self_hsic)


def centred_gram(x: Tensor) -> Tensor:
    """U-centred Gram matrix [d, d] of x [d, p], unit Frobenius norm (zero if x is constant): UCKA = ⟨K̃_X, K̃_Y⟩.

    K̃ᵢⱼ = Kᵢⱼ − mᵢ − mⱼ off the diagonal and 0 on it, with mᵢ = Σⱼ Kᵢⱼ/(d−2) − Σ K/(2(d−1)(d−2)).
    """
    d, x = x.shape[0], _steady(x)
    with precision(is_short(x)):
        centred = gram(x).fill_diagonal_(0)
    square = _energy(centred)
    m = centred.sum(1, dtype=torch.float64) / (d - 2)
    m = (m - m.sum() / (2 * (d - 1))).to(centred.dtype)
    centred -= m[:, None] + m
    centred.fill_diagonal_(0)
    norm = _energy(centred)
    if norm <= _FLOOR * square:
        return torch.zeros_like(centred)
    return centred.div_(math.sqrt(norm))


def biased_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of column-centred x [n, p] and y [n, q]: ‖XᵀY‖²_F / (‖XᵀX‖_F ‖YᵀY‖_F), in [0, 1]."""
    x, y = x - x.mean(0), y - y.mean(0)

    def cross(u: Tensor, v: Tensor) -> float:
        # ‖UᵀV‖²_F = ⟨UUᵀ, VVᵀ⟩: whichever side is smaller
        if u.shape[0] < min(u.shape[1], v.shape[1]):
            return ((u @ u.T) * (v @ v.T)).sum(dtype=torch.float64).item()
        return (u.T @ v).square().sum(dtype=torch.float64).item()

    scale = math.sqrt(cross(x, x) * cross(y, y))
    return cross(x, y) / scale if scale > 0 else 0.0
