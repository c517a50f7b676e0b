"""From a score to a verdict: against the scores of models that were trained apart, and counting no more than were
trained.

    p = tries · (1 + #{null scores ≥ s}) / (n + 1)

`calibration.json` holds the scores of pairs of independent models by mode, by tying of embedding and head, and by
width. A pair is held against the pairs that are no wider than it, since scores of strangers fall with the width. n
counts pairs of which no two share a model: pairs that do are dependent. p is never below tries/(n + 1), and one family
of methods is corrected by Holm.

Related: above every pair of the null, and clear of those of like width, in a method where strangers stay below ½.
Unrelated: no higher than the null reaches. Between: inconclusive.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Word = Literal["related", "shares parts", "inconclusive", "unrelated"]
EXIT_CODES: dict[Word, int] = {"related": 0, "inconclusive": 3, "unrelated": 4, "shares parts": 5}

_CLEAR = 0.2  # share of the way from the highest null score of like widths to a perfect one that related pairs pass
_CHANCE = 8.0  # deviations of pure chance that it must pass as well: few, narrow layers agree by chance
_BLUNT = 0.5  # a method in which strangers reach this much cannot call anything related
_ALONE = 0.9  # what one layer must score: it has no neighbours to be held against, and no null was measured


@dataclass(frozen=True)
class Null:
    """Scores of independent pairs in one mode and tying, no wider than the pair that is judged.

    scores: those of pairs without a common model, rising. max: the highest of all `pairs`, dependent ones included.
    near: the highest of those at least a quarter as wide as the pair that is judged.
    """

    mode: str
    tied: bool
    widths: tuple[int, int]
    models: int
    pairs: int
    scores: tuple[float, ...]
    max: float
    near: float
    source: str

    @property
    def n(self) -> int:
        return len(self.scores)

    def p(self, score: float) -> float:
        return (1 + sum(s >= score for s in self.scores)) / (self.n + 1)

    def as_dict(self) -> dict[str, Any]:
        middle = self.scores[self.n // 2]
        return {"mode": self.mode, "tied": self.tied, "widths": self.widths, "models": self.models, "pairs": self.pairs,
                "pairs_without_common_model": self.n, "median": middle, "max": self.max,
                "max_of_near_widths": self.near, "source": self.source}  # fmt: skip


@cache
def nulls() -> dict[str, Any]:
    """The measured null distributions shipped with Fathom: {"source": …, "nulls": [{"mode", "tied", "by_width"}]}."""
    return json.loads((files("fathom.lineage") / "calibration.json").read_text())


@cache
def null_for(mode: str, tied: bool, width: int) -> Null | None:
    """The null of pairs no wider than `width` (of the narrowest, when all are wider); None when none was measured."""
    shipped = nulls()
    entry = next((e for e in shipped["nulls"] if (e["mode"], e["tied"]) == (mode, tied)), None)
    if entry is None:
        return None
    known = {int(w): found for w, found in entry["by_width"].items()}
    used = {w: found for w, found in known.items() if w <= max(width, min(known))}
    near = [w for w in used if w >= width / 4] or [max(used)]
    scores = tuple(sorted(s for found in used.values() for s in found["scores"]))
    return Null(
        mode, tied, (min(used), max(used)), sum(f["models"] for f in used.values()),
        sum(f["pairs"] for f in used.values()), scores, max(f["max"] for f in used.values()),
        max(used[w]["max"] for w in near), shipped["source"],
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The word, the numbers behind it, and sentences for a reader. beyond: no null score is as high, p is a bound."""

    verdict: Word
    score: float
    p: float | None
    beyond: bool
    null: Null | None
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "judged": self.score, "p": self.p, "p_is_bound": self.beyond,
                "null": None if self.null is None else self.null.as_dict(), "reasons": self.reasons}  # fmt: skip


def judge(
    mode: str,
    width: int,
    score: float,
    *,
    tied: bool = False,
    coverage: float = 1.0,
    tries: int = 1,
    tokens: int | None = None,
    layers: int | None = None,
    suspicions: Sequence[str] = (),
) -> Verdict:
    """Judge one score, 1 for a model with itself.

    width:      residual width of the narrower model.
    tied:       whether both models use their embedding as output head, which makes strangers more alike.
    coverage:   part of the layers that were compared; below 1 the evidence must be stronger, below ½ it is
                inconclusive.
    tries:      number of alignments the best of which gave the score.
    tokens:     shared tokens that fixed the residual axes; fewer than `width` leave some free, so that a rotated copy
                would score low too and a low score is inconclusive. None: the method needs no axes.
    layers:     layers whose CKA was averaged: by chance alone their mean scatters by 1/((width − 2)·√layers). None: the
                score is no CKA.
    suspicions: why a low score may be a disguise; any makes it inconclusive.
    """
    null = null_for(mode, tied, width)
    if null is None:
        return Verdict(
            "inconclusive", score, None, False, None, [f"no null distribution was measured for mode {mode!r}"]
        )
    p, beyond = min(1.0, tries * null.p(score)), score > null.max
    reasons = []
    if not null.widths[0] <= width <= null.widths[1]:
        reasons.append(
            f"width {width}: the null was measured on widths {null.widths[0]}–{null.widths[1]}"
            + ("; wider strangers scored lower as far as measured" if width > null.widths[1] else "")
        )
    clear = max(null.max, null.near + _CLEAR * (1 - null.near))
    if layers is not None:
        clear = max(clear, _CHANCE / ((width - 2) * math.sqrt(layers)), _ALONE if layers == 1 else 0.0)
        if clear >= 1:
            reasons.append("so few layers and dims agree by chance: even equal weights would not stand out")
            return Verdict("inconclusive", score, p, beyond, null, reasons)
    if coverage < 0.5:
        reasons.append(f"only {coverage:.0%} of the layers could be compared")
        return Verdict("inconclusive", score, p, beyond, null, reasons)
    highest = f"{null.pairs} pairs of independently trained models reach {null.max:.3f} at most, this pair {score:.3f}"
    word: Word
    if null.max <= _BLUNT and score > min(1 - 1e-4, null.max + (clear - null.max) / coverage):
        word = "related"
        reasons.insert(0, f"consistent with a common origin of the weights: {highest}")
    elif suspicions:
        word = "inconclusive"
        reasons = [*suspicions, *reasons]
    elif tokens is not None and tokens < width:
        word = "inconclusive"
        reasons.insert(0, f"{tokens} shared tokens cannot fix {width} residual axes: a rotated copy would score as low")
    elif not beyond:
        word = "unrelated"
        reasons.insert(0, f"no trace found; disguise is not excluded: {highest}")
    else:
        word = "inconclusive"
        reasons.insert(0, f"consistent with a common origin, or with training on the same text: {highest}")
        if null.max > _BLUNT:
            reasons.append("strangers score so high here that this method cannot tell relatives from them")
    return Verdict(word, score, p, beyond, null, reasons)


def holm(ps: Sequence[float | None], family: int) -> list[float | None]:
    """p values corrected for `family` tests of one question (Holm 1979); tests that were not run count as highest."""
    found: list[float | None] = [None] * len(ps)
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    least = 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, (family - rank) * p))
        found[i] = least
    return found


def combine(verdicts: Sequence[Verdict]) -> Word:
    """Several methods on one pair: related if one says so, unrelated if all do, else inconclusive."""
    words = {v.verdict for v in verdicts}
    if "related" in words:
        return "related"
    return "unrelated" if words == {"unrelated"} else "inconclusive"
