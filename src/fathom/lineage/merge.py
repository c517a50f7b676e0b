r"""The parents of a merged model and their proportions, by least squares in aligned, norm-folded weight space.

    min_w Σ_layers Σ_matrices ‖ S − Σ_i w_i P_i ‖² / ‖S‖²

Axes of every parent are first matched to the suspect's (LAP on shared embeddings). Norm gains are folded in, so
moving them
about changes nothing; q/k balance is left alone, because it is not linear and merges are. Error bars: delete-one-layer
jackknife (Efron & Stein 1981).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.align import align
from fathom.lineage.awm import Progress
from fathom.lineage.errors import NoEvidenceError
from fathom.lineage.reader import Checkpoint
from fathom.lineage.token_rows import shared_rows

_READERS = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "gate": "ffn_norm", "up": "ffn_norm"}


@dataclass(frozen=True)
class MergeEstimate:
    """weights ± errors (one standard error) for each parent, in order.

    explained: 1 − residual/total energy.
    unexplained: the same residual relative to what the best single parent, scaled to fit, leaves; a true merge of these
    parents leaves little of it, a stranger about 1.
    """

    weights: list[float]
    errors: list[float]
    explained: float
    unexplained: float
    layers: int


def merge_weights(
    suspect: Checkpoint, parents: Sequence[Checkpoint], progress: Progress | None = None
) -> MergeEstimate:
    """Estimate mixing weights of a linear merge (SLERP of near models is one to first order).

    Raises ValueError unless there are at least two parents of the suspect's shape, NoAnchorError without shared tokens.
    """
    if len(parents) < 2:
        raise ValueError(f"parents: {len(parents)} given; mixing weights need at least two candidates")
    for parent in parents:
        if parent.geometry != suspect.geometry:
            raise ValueError(f"parents: {parent.source} has another shape than {suspect.source}; merges keep the shape")
    table = canonical.embedding(suspect, None)
    maps = []
    for parent in parents:
        rows = shared_rows(parent.vocabulary, suspect.vocabulary, parent.vocab_rows, suspect.vocab_rows)
        maps.append(align(canonical.embedding(parent, None), table, *rows, "lap"))
    n, depth = len(parents), suspect.geometry.layers
    gram = torch.zeros(depth, n, n, dtype=torch.float64)
    right = torch.zeros(depth, n, dtype=torch.float64)
    total = torch.zeros(depth, dtype=torch.float64)
    for layer in range(depth):
        for role, norm in _READERS.items():
            if not all(model.has(layer, role) for model in (suspect, *parents)):
                continue
            target = canonical.fold(suspect, layer, suspect.read(layer, role), norm, None)
            energy = _dot(target, target)
            if energy == 0:  # a dead matrix says nothing about proportions
                continue
            scale = 1 / energy
            mapped = [
                found.apply(canonical.fold(parent, layer, parent.read(layer, role), norm, None))
                for parent, found in zip(parents, maps)
            ]
            # Differences from the suspect keep the digits that products of nearly equal parents would lose.
            away = [m - target for m in mapped]
            for i in range(n):
                right[layer, i] += scale * _dot(away[i], target)
                for j in range(n):
                    gram[layer, i, j] += scale * _dot(away[i], away[j])
            total[layer] += 1
        if progress:
            progress(layer + 1, depth)
    if not total.any():
        raise NoEvidenceError(
            f"{suspect.source}: every matrix is zero or missing from a parent; there is nothing to estimate from"
        )
    weights, residual = _solve(gram.sum(0), right.sum(0), total.sum())
    if depth > 1:
        rest = torch.stack(
            [_solve(gram.sum(0) - gram[l], right.sum(0) - right[l], total.sum() - total[l])[0] for l in range(depth)]
        )
        errors = ((depth - 1) / depth * (rest - rest.mean(0)).square().sum(0)).sqrt()
    else:
        errors = torch.full((n,), float("nan"), dtype=torch.float64)
    alone = [_solve(gram.sum(0)[i : i + 1, i : i + 1], right.sum(0)[i : i + 1], total.sum())[1] for i in range(n)]
    nearest = torch.stack(alone).min()
    # A suspect that is one of the parents leaves nothing to explain.
    ratio = (residual / nearest).clamp(0, 1).item() if nearest > 1e-9 * total.sum() else 0.0
    return MergeEstimate(weights.tolist(), errors.tolist(), 1 - (residual / total.sum()).item(), ratio, depth)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64).cpu()


def _solve(gram: Tensor, right: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of P_i = S + D_i from ⟨D_i, D_j⟩ and ⟨D_i, S⟩ with ‖S‖² = total; and the residual energy."""
    products = gram + right[:, None] + right[None, :] + total  # ⟨P_i, P_j⟩
    against = right + total  # ⟨P_i, S⟩
    weights = torch.linalg.lstsq(products, against[:, None], driver="gelsd").solution[:, 0]
    # S − Σ wP = (1 − Σw)S − Σ wD
    rest = 1 - weights.sum()
    residual = rest**2 * total - 2 * rest * (weights @ right) + weights @ gram @ weights
    return weights, residual.clamp_min(0)
