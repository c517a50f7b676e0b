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
from fathom.lineage.rows import ties
from fathom.lineage.shared_parts import SharedParts, sentence, shared_parts
from fathom.lineage.verdict import EXIT_CODES, Verdict, Word, combine, holm, judge

_COPIED = 0.9  # what a layer must score to be called copied: single layers of strangers stay below 0.6
Method = Literal["awm", "huref", "all"]
Alignment = Literal["auto", "lap", "procrustes"]


@dataclass(frozen=True)
class Comparison:
    """The outcome for a pair. `score`, `p` and `method` are those of the deciding method; `details` holds all. p is
    corrected for the number of methods (Holm).

    shared: parts that both models hold alike (see `parts`); inert: alike too, but no part of what the models compute.
    not_compared: by model, parameters that no method reads (a Fathom method's own ones): how many, names, share of all.
    files: by model, names of the files read, and of weight files beside them that transformers would not load either.
    """

    a: str
    b: str
    verdict: Word
    score: float
    p: float | None
    method: str
    coverage: float
    reasons: list[str]
    details: dict[str, dict[str, Any]]
    layers: list[dict[str, Any]] = field(default_factory=list)
    shared: list[dict[str, Any]] = field(default_factory=list)
    inert: list[dict[str, Any]] = field(default_factory=list)
    not_compared: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def abstain(a: str, b: str, reason: str) -> Comparison:
    """The comparison could not be made: inconclusive, with the reason."""
    return Comparison(a, b, "inconclusive", float("nan"), None, "none", 0.0, [reason], {})


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
    width, tied = min(a.geometry.hidden, b.geometry.hidden), ties(a) and ties(b)
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
            verdict = judge(
                result.mode, width, result.agreement, tied=tied, coverage=result.coverage, tries=result.anchors_tried,
                tokens=None if result.alignment.anchor == "identity" else result.alignment.tokens,
                layers=len(result.layers), suspicions=result.doubts,
            )  # fmt: skip
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
            verdict = judge(
                "huref-ics", width, outcome.agreement, tied=tied, coverage=outcome.coverage, suspicions=outcome.doubts
            )
            judged.append(("huref", verdict, outcome.coverage))
            details["huref"] = {**asdict(outcome), **verdict.as_dict(), "notes": outcome.notes}
    if not judged:
        raise NoEvidenceError("; ".join(dict.fromkeys(failures)))
    word = combine([v for _, v, _ in judged])
    family = (1 if method == "huref" else 2 if alignment == "auto" and not paper else 1) + (method == "all")
    corrected = holm([v.p for _, v, _ in judged], family)
    for (name, _, _), p in zip(judged, corrected):
        details[name] |= {"p_corrected": p, "tests": family}
    # AWM decides where it agrees with the outcome; of its alignments the one that stands further from its null.
    agreeing = [j for j in judged if j[1].verdict == word] or judged
    agreeing = [j for j in agreeing if j[0].startswith("awm")] or agreeing
    name, best, coverage = min(agreeing, key=lambda j: 1.0 if j[1].p is None else j[1].p)
    parts_of = SharedParts() if word == "related" else shared_parts(a, b)
    shared = [asdict(p) for p in parts_of.alike]
    said = [f"parts are the same in both models: {sentence(parts_of.alike)}"] if parts_of.alike else []
    if word != "related" and (agreeing_layers := _agreeing(layers)):
        shared += agreeing_layers
        said.append(f"{len(agreeing_layers)} of {len(layers)} layers agree once axes are matched")
    if shared:
        word = "shares parts"
    if parts_of.inert:
        said.append(f"alike but without effect in one of them, and no evidence: {sentence(parts_of.inert)}")
    reasons = [*said, *(f"the models as wholes: {r}" if shared else r for r in best.reasons), *failures]
    for record in details.values():
        reasons += [note for note in record.get("notes", ()) if note not in reasons]
    left_out = {side: found for side, model in (("a", a), ("b", b)) if (found := _not_compared(model))}
    for side, found in left_out.items():
        reasons.append(
            f"{side}: {found['tensors']} tensors ({found['share']:.2%} of the parameters) were not compared, "
            f"e.g. {found['names'][0]}"
        )
    return Comparison(
        a.source, b.source, word, details[name]["score"], details[name]["p_corrected"], name, coverage, reasons,
        details, layers, shared, [asdict(p) for p in parts_of.inert], left_out,
        {"a": _files(a), "b": _files(b)},
    )  # fmt: skip


def _agreeing(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers that agree as only copies do, whatever the rest says."""
    return [
        {"a": f"layer {l['layer_a']}", "b": f"layer {l['layer_b']}", "cosine": l["agreement"], "equal": False}
        for l in layers
        if l["agreement"] > _COPIED
    ]


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
        "score": result.score,
        "agreement": result.agreement,
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
