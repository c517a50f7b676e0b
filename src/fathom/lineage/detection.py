"""How well a score separates related from unrelated pairs: the measures of LeaFBench and AWM."""

import numpy as np


def detection(positives: np.ndarray, negatives: np.ndarray) -> dict[str, float]:
    """AUC, partial AUC (FPR ≤ 5 %, divided by 0.05), TPR at ≤ 1 % FPR, d', and the gap between hardest pairs.

    d' = (μ₊ − μ₋)/√((σ₊² + σ₋²)/2). gap = min(positives) − max(negatives): above 0 means perfect separation.
    With fewer than 100 negatives, ≤ 1 % FPR means none. Raises ValueError when a side is empty.
    """
    p, n = np.sort(np.asarray(positives, dtype=float)), np.sort(np.asarray(negatives, dtype=float))
    if not len(p) or not len(n):
        raise ValueError(f"positives, negatives: {len(p)} and {len(n)} scores; both are needed")
    wins = (p[:, None] > n).sum() + 0.5 * (p[:, None] == n).sum()
    fpr, tpr = roc(p, n)
    grid = np.linspace(0, 0.05, 2001)
    # a ROC curve is a staircase: at each FPR the highest TPR reached without exceeding it
    best = np.array([tpr[fpr <= g].max() for g in grid])
    spread = np.sqrt((p.var() + n.var()) / 2)
    return {
        "auc": wins / (len(p) * len(n)),
        "pauc": float(np.trapezoid(best, grid) / 0.05),
        "tpr_at_1pct_fpr": float(tpr[fpr <= 0.01].max()),
        "d_prime": float((p.mean() - n.mean()) / spread) if spread > 0 else float("inf"),
        "gap": float(p.min() - n.max()),
        "positives": len(p),
        "negatives": len(n),
        "null_mean": float(n.mean()),
        "null_std": float(n.std(ddof=1)) if len(n) > 1 else float("nan"),
        "null_max": float(n.max()),
    }


def roc(positives: np.ndarray, negatives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(FPR, TPR) at every threshold, from none called positive to all."""
    thresholds = np.concatenate([[np.inf], np.unique(np.concatenate([positives, negatives]))[::-1]])
    return (
        np.array([(negatives >= t).mean() for t in thresholds]),
        np.array([(positives >= t).mean() for t in thresholds]),
    )
