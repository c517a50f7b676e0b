"""Two models, or many: run the methods, judge the scores, keep the evidence in one record."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
from scipy.spatial.distance import squareform

from fathom.lineage.awm import Anchor, AWMResult, Progress, awm, query_key_layers
from fathom.lineage.errors import NoAnchorError, NoEvidenceError
from fathom.lineage.huref import ics
from fathom.lineage.reader import Checkpoint
from fathom.lineage.verdict import EXIT_CODES, Verdict, Word, combine, judge

Method = Literal["awm", "huref", "all"]
Alignment = Literal["auto", "lap", "procrustes"]


@dataclass(frozen=True)
class Comparison:
    """The outcome for a pair. `score`, `z` and `method` are those of the deciding method; `details` holds all.

    not_compared: by model, parameters that no method reads (a Fathom method's own ones): how many, names, share of all.
    files: by model, names of the files read, and of weight files beside them that transformers would not load either.
    """

    a: str
    b: str
    verdict: Word
    score: float
    z: float | None
    p: float | None
    method: str
    coverage: float
    reasons: list[str]
    details: dict[str, dict[str, Any]]
    layers: list[dict[str, Any]] = field(default_factory=list)
    not_compared: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def abstain(a: str, b: str, reason: str) -> Comparison:
    """The comparison could not be made: inconclusive, with the reason."""
    return Comparison(a, b, "inconclusive", float("nan"), None, None, "none", 0.0, [reason], {})


def compare(
    a: Checkpoint,
    b: Checkpoint,
    method: Method = "all",
    alignment: Alignment = "auto",
    *,
    paper: bool = False,
    anchor: Anchor = "auto",
    power: float = 1.0,
    parts: bool = False,
    progress: Callable[[str], Progress] | None = None,
) -> Comparison:
    """Is b's origin in a's weights, or the reverse, or a common one?

    method:    "awm", "huref" or "all".
    alignment: "lap", "procrustes", or "auto": LAP, and Procrustes too unless LAP already says related.
    paper:     the published AWM (stored weights, LAP) instead of the hardened one.

    Raises NoEvidenceError when nothing ties the models together, CheckpointError when a weight cannot be read,
    ValueError for paper with Procrustes.
    """
    if paper and alignment == "procrustes":
        raise ValueError("alignment: 'procrustes' is not in the published AWM (paper), which aligns by LAP; drop one")
    width = min(a.geometry.hidden, b.geometry.hidden)
    details: dict[str, dict[str, Any]] = {}
    judged: list[tuple[str, Verdict, float]] = []
    layers: list[dict[str, Any]] = []
    failures: list[str] = []
    if method in {"awm", "all"}:
        modes: list[Literal["lap", "procrustes"]] = ["lap"] if alignment == "auto" or paper else [alignment]
        while modes:
            mode = modes.pop()
            report = progress(f"AWM, {mode}") if progress else None
            try:
                result = awm(
                    a, b, hardened=not paper, alignment=mode, anchor=anchor, power=power, parts=parts, progress=report
                )
            except NoEvidenceError as error:
                failures.append(str(error))
                break
            tokens, count = result.alignment.tokens, len(result.layers)
            verdict = judge(result.mode, width, result.score, result.coverage, result.anchors_tried, tokens, count)
            judged.append((f"awm {result.mode}", verdict, result.coverage))
            details[f"awm {result.mode}"] = _awm_record(result, verdict)
            if not layers or verdict.verdict == "related":
                layers = [asdict(s) for s in result.layers]
            if alignment == "auto" and not paper and mode == "lap" and verdict.verdict != "related":
                modes = ["procrustes"]
    if method in {"huref", "all"}:
        try:
            outcome = ics(a, b)
        except NoEvidenceError as error:
            failures.append(str(error))
        else:
            verdict = judge("huref-ics", width, outcome.score, outcome.coverage)
            judged.append(("huref", verdict, outcome.coverage))
            details["huref"] = {**asdict(outcome), **verdict.as_dict(), "notes": outcome.notes}
    if not judged:
        raise NoEvidenceError("; ".join(dict.fromkeys(failures)))
    word = combine([v for _, v, _ in judged])
    # AWM decides where it agrees with the outcome: z of different methods are no common scale.
    agreeing = [j for j in judged if j[1].verdict == word] or judged
    agreeing = [j for j in agreeing if j[0].startswith("awm")] or agreeing
    name, best, coverage = max(agreeing, key=lambda j: -1e9 if j[1].z is None else j[1].z)
    reasons = [*best.reasons, *failures]
    for record in details.values():
        reasons += [note for note in record.get("notes", ()) if note not in reasons]
    left_out = {side: found for side, model in (("a", a), ("b", b)) if (found := _not_compared(model))}
    for side, found in left_out.items():
        reasons.append(
            f"{side}: {found['tensors']} tensors ({found['share']:.2%} of the parameters) were not compared, "
            f"e.g. {found['names'][0]}"
        )
    return Comparison(
        a.source, b.source, word, best.score, best.z, best.p, name, coverage, reasons, details, layers, left_out,
        {"a": _files(a), "b": _files(b)},
    )  # fmt: skip


def _files(model: Checkpoint) -> dict[str, list[str]]:
    return {"read": [f.name for f in model.files], "beside": [f.name for f in model.files_beside]}


def _not_compared(model: Checkpoint) -> dict[str, Any]:
    def size(names: Iterable[str]) -> int:
        return sum(math.prod(model.store.shape(name)) for name in names)

    if not (extra := model.extra):
        return {}
    return {"tensors": len(extra), "share": size(extra) / size(model.store.names()), "names": extra}


def _awm_record(result: AWMResult, verdict: Verdict) -> dict[str, Any]:
    found = result.alignment
    return {
        **verdict.as_dict(),
        "score_q": result.score_q,
        "score_k": result.score_k,
        "coverage": result.coverage,
        "layer_order_kendall_tau": result.order,
        "alignment": {
            "mode": found.mode,
            "anchor": found.anchor,
            "shared_tokens": found.tokens,
            "confidence": found.confidence,
            "margin": found.margin,
            "anchors_tried": result.anchors_tried,
        },
        "notes": result.notes,
    }


@dataclass(frozen=True)
class Matrix:
    """Scores of all pairs, and a tree by average linkage on 1 − score; left_out: models without evidence, and why."""

    names: list[str]
    scores: np.ndarray
    tree: np.ndarray
    order: list[int]
    left_out: dict[str, str] = field(default_factory=dict)


def matrix(
    models: Sequence[Checkpoint],
    alignment: Alignment = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Matrix:
    """Hardened AWM of every pair. Pairs without an anchor score 0; models without query and key weights are left out.

    alignment: "lap", "procrustes", or "auto": LAP, and below ½ the higher of LAP and Procrustes.

    Raises ValueError for fewer than two models, NoEvidenceError when fewer than two can be compared.
    """
    if len(models) < 2:
        raise ValueError(f"models: {len(models)} given; a matrix needs at least two")
    kept: list[Checkpoint] = []
    left_out: dict[str, str] = {}
    for model in models:
        try:
            query_key_layers(model)
            kept.append(model)
        except NoEvidenceError as error:
            left_out[model.source] = str(error)
    n = len(kept)
    if n < 2:
        raise NoEvidenceError("; ".join(left_out.values()))
    scores = np.eye(n)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    for done, (i, j) in enumerate(pairs, 1):
        try:
            score = awm(kept[i], kept[j], alignment="lap" if alignment == "auto" else alignment).score
            if alignment == "auto" and score < 0.5:
                score = max(score, awm(kept[i], kept[j], alignment="procrustes").score)
        except NoAnchorError:
            score = 0.0
        scores[i, j] = scores[j, i] = score
        if progress:
            progress(done, len(pairs))
    distances = squareform(np.clip(1 - scores, 0, 2), checks=False)
    tree = optimal_leaf_ordering(linkage(distances, "average"), distances)
    return Matrix([m.source for m in kept], scores, tree, leaves_list(tree).tolist(), left_out)
