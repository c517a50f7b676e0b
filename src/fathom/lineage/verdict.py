"""From a score to a verdict: against the scores of unrelated models, with their number taken into account.

    z = (s − μ) / (σ·√(1 + 1/n)),   p = P(t_{n−1} ≥ z) × anchors tried

μ, σ, n come from measured pairs of independent models (`calibration.json`, each entry with its origin). A
prediction interval
with n − 1 degrees of freedom: few negatives make wide verdicts. Related: p < 1e-4 and clear of every negative seen.
Unrelated: within what negatives reach. Between: inconclusive.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from scipy.stats import t as student

Word = Literal["related", "inconclusive", "unrelated"]
EXIT_CODES: dict[Word, int] = {"related": 0, "inconclusive": 3, "unrelated": 4}

_RELATED_P = 1e-4
_CLEAR = 0.03  # share of the way from the highest negative to a perfect score that a related pair must pass
_UNRELATED_Z = 4.0


@dataclass(frozen=True)
class Null:
    """Scores of unrelated pairs in one mode at one range of widths; `perfect` is the score of a model with itself."""

    mode: str
    d_min: int
    d_max: int
    n: int
    mean: float
    std: float
    max: float
    source: str
    perfect: float = 1.0

    def z(self, score: float) -> float:
        return (score - self.mean) / (self.std * math.sqrt(1 + 1 / self.n))

    def p(self, score: float) -> float:
        return float(student.sf(self.z(score), self.n - 1))


@cache
def nulls() -> list[Null]:
    """The measured null distributions shipped with Fathom."""
    return [Null(**entry) for entry in json.loads((files("fathom.lineage") / "calibration.json").read_text())]


def null_for(mode: str, width: int) -> tuple[Null | None, bool]:
    """(the null for a mode, whether the width lies in its range). The nearest range when none holds; None when
    unmeasured."""
    known = [n for n in nulls() if n.mode == mode]
    if not known:
        return None, False

    def gap(n: Null) -> float:
        return max(math.log(n.d_min / width), math.log(width / n.d_max), 0.0)

    best = min(known, key=lambda n: (gap(n), -n.n))
    return best, gap(best) == 0


@dataclass(frozen=True)
class Verdict:
    """The word, the numbers behind it, and sentences for a reader."""

    verdict: Word
    score: float
    z: float | None
    p: float | None
    null: Null | None
    reasons: list[str]

    def as_dict(self) -> dict:
        return {**asdict(self), "null": None if self.null is None else asdict(self.null)}


def judge(
    mode: str,
    width: int,
    score: float,
    coverage: float = 1.0,
    tries: int = 1,
    tokens: int | None = None,
    layers: int | None = None,
) -> Verdict:
    """Judge one score.

    width:    residual width of the narrower model.
    coverage: part of the layers that were compared; below 1 the evidence must be stronger, below ½ it is inconclusive.
    tries:    number of alignments the best of which gave the score.
    tokens:   shared tokens that fixed the residual axes; fewer than `width` leave some free, so that a rotated copy
              would score low too and a low score is inconclusive. None: the method needs no axes.
    layers:   layers whose CKA was averaged. By chance alone that mean scatters by 1/((width − 2)·√layers), even where
              the measured negatives, wider or deeper, scatter less. None: the score is no CKA.
    """
    null, inside = null_for(mode, width)
    if null is None:
        return Verdict(
            "inconclusive", score, None, None, None, [f"no null distribution was measured for mode {mode!r}"]
        )
    reasons = []
    if layers is not None and (chance := 1 / ((width - 2) * math.sqrt(layers))) > null.std:
        null = replace(null, std=chance)
        reasons.append(f"few layers or dims: chance alone scatters by {chance:.3f}, more than the measured null")
        if null.p(null.perfect) * tries >= _RELATED_P:
            reasons.append("even equal weights would not stand out")
            return Verdict("inconclusive", score, null.z(score), min(1.0, null.p(score) * tries), null, reasons)
    z, p = null.z(score), min(1.0, null.p(score) * tries)
    if not inside:
        reasons.append(f"width {width} is outside the range {null.d_min}–{null.d_max} of the null: read z with care")
    if coverage < 0.5:
        reasons.append(f"only {coverage:.0%} of the layers could be compared")
        return Verdict("inconclusive", score, z, p, null, reasons)
    clear = null.max + _CLEAR * (null.perfect - null.max) / coverage
    if not inside:  # twice as far from chance where the null is borrowed
        clear = null.max + 2 * (clear - null.max)
    word: Word
    if p < _RELATED_P * coverage and score > clear:
        word = "related"
        reasons.insert(0, "consistent with a common origin of the weights")
    elif tokens is not None and tokens < width:
        word = "inconclusive"
        reasons.insert(0, f"{tokens} shared tokens cannot fix {width} residual axes: a rotated copy would score as low")
    elif z < _UNRELATED_Z or score <= null.max:
        word = "unrelated"
        reasons.insert(0, "within what independently trained models show")
    else:
        word = "inconclusive"
        reasons.insert(0, "above what most independent models show, but not clear of them")
    return Verdict(word, score, z, p, null, reasons)


def combine(verdicts: list[Verdict]) -> Word:
    """Several methods on one pair: related if one says so, unrelated if all do, else inconclusive."""
    words = {v.verdict for v in verdicts}
    if "related" in words:
        return "related"
    return "unrelated" if words == {"unrelated"} else "inconclusive"
