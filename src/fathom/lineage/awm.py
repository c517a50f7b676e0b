r"""AWM, "Accurate Weight-Matrix fingerprint for large language models" (Zeng et al., arXiv 2510.06738), and its
hardened form.

    1  align residual axes from shared token embeddings (see `align`)
    2  per layer, unbiased CKA of the aligned W_q and W_k, residual dims as samples (see `cka`)
    3  score = ½ · (mean over matched layers of UCKA(W_q) + the same for W_k)

Paper mode reads weights as stored and aligns by LAP. It is evaded by folding norm gains and rotating the residual
stream.
Hardened mode reads `canonical` weights and aligns by LAP or Procrustes: what EXACT lists (see `transforms`) scores 1.

The score alone convicts the innocent: models trained on the same text share what the text puts into every layer. What
is judged is therefore the agreement of layers beyond that,

    o_l = mean of s(A_l, B_{l±1}), s(A_{l±1}, B_l), at most ½
    agreement = median over l of (s(A_l, B_l) − o_l)/(1 − o_l)

with s = ½(UCKA(W_q) + UCKA(W_k)). Where the axes were taken as they are (anchor "identity"), text has nothing to act
on, and the median of s itself is judged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import kendalltau
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.align import Alignment, TokenTable, align, fixed_frame, identity
from fathom.lineage.cka import Samples, centred_gram, unbiased_cka
from fathom.lineage.errors import NoAnchorError, NoEvidenceError
from fathom.lineage.reader import Checkpoint
from fathom.lineage.rows import Rows, matched_rows
from fathom.lineage.token_rows import shared_rows

Anchor = Literal["auto", "embedding", "head", "identity"]
PARTS = ("gate", "up", "v", "o", "down")  # evidence beside q and k; o and down write the stream, the others read it
_CLEAR = 0.5  # an anchor whose probe scores this much needs no second opinion
_UNMOVED = 0.15  # axes as they are: strangers reach 0.07 by chance at width 64, and less at any other
_COMMON = 0.5  # more than layers of strangers have in common; models that repeat a layer must not divide by nothing
_SKETCH = 256  # axes by which layers are matched
_MOVED = 0.05  # what another order of layers must add to the mean score before it is believed
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerScore:
    """UCKA of one matched pair of layers, and how far it exceeds what neighbouring layers share; parts only when asked
    for."""

    layer_a: int
    layer_b: int
    q: float
    k: float
    agreement: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AWMResult:
    """The result of a comparison. `score` in about [−1, 1] is AWM's own; verdicts use `agreement`; coverage is
    the part of live layers that had q and k to compare."""

    mode: str
    score: float
    agreement: float
    score_q: float
    score_k: float
    layers: list[LayerScore]
    alignment: Alignment
    anchors_tried: int
    coverage: float
    order: float  # Kendall τ of matched layers; 1 when the order is kept
    doubts: list[str]  # why a low score may be a disguise
    notes: list[str]


@dataclass
class _Side:
    """One model as AWM reads it: raw (paper) or canonical (hardened)."""

    model: Checkpoint
    hardened: bool
    power: float
    layers: list[int] = field(init=False)
    live: int = field(init=False)
    dims: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.layers, self.live = query_key_layers(self.model, self.hardened)
        self.dims = canonical.residual_dims(self.model) if self.hardened else None
        if self.width < 4:  # unbiased CKA divides by d − 3
            raise NoEvidenceError(f"{self.model.source}: {self.width} residual dims; AWM compares models of at least 4")

    @property
    def width(self) -> int:
        return self.model.geometry.hidden if self.dims is None else len(self.dims)

    def anchor(self, name: str) -> TokenTable:
        model, dims, embedding = self.model, self.dims, name == "embedding"
        if self.hardened:
            read = canonical.embedding if embedding else canonical.output_head
            return TokenTable(lambda rows: read(model, dims, rows), self.width)
        return TokenTable(model.embedding if embedding else model.head, self.width)

    def query_key(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.hardened:
            q, k = canonical.query_key(self.model, layer, self.dims)
        else:
            q, k = self.model.read(layer, "q"), self.model.read(layer, "k")
        return self._flatten(q), self._flatten(k)

    def parts(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Extra matrices as readers [n, d]; writers come transposed, experts stacked (their order does not matter)."""
        model, dims = self.model, self.dims
        if model.has(layer, "v") and model.has(layer, "o"):
            v, o = (
                canonical.value_output(model, layer, dims)
                if self.hardened
                else (model.read(layer, "v"), model.read(layer, "o"))
            )
            yield from (("v", self._flatten(v)), ("o", self._flatten(o.T)))
        gates: list[Tensor] = []
        ups: list[Tensor] = []
        downs: list[Tensor] = []
        for prefix in model.feed_forwards(layer):
            if prefix == "shared." and ups:
                continue
            if self.hardened:
                gate, up, down = canonical.feed_forward(model, layer, prefix, dims)
            else:
                gate = model.read(layer, prefix + "gate") if model.has(layer, prefix + "gate") else None
                up, down = model.read(layer, prefix + "up"), model.read(layer, prefix + "down")
            gates += [] if gate is None else [gate]
            ups.append(up)
            downs.append(down.T)
        for role, stack in (("gate", gates), ("up", ups), ("down", downs)):
            if stack:
                yield role, self._flatten(torch.cat(stack))

    def _flatten(self, weight: Tensor) -> Tensor:
        return weight if self.power == 1 else spectral_power(weight, self.power)


def query_key_layers(model: Checkpoint, hardened: bool = True) -> tuple[list[int], int]:
    """(layers that AWM compares, number of live layers). Raises NoEvidenceError when there is none to compare."""
    alive = canonical.live_layers(model) if hardened else list(range(model.geometry.layers))
    layers = [l for l in alive if model.has(l, "q") and model.has(l, "k")]
    if hardened:  # queries and keys of heads that write nothing are not part of the function
        asked = layers
        layers = [l for l in layers if canonical.attends(model, l)]
        silent = [l for l in asked if l not in layers]
        alive = [l for l in alive if l not in silent or canonical.writes(model, l)]
    if not layers:
        raise NoEvidenceError(f"{model.source}: no live layer with query and key weights; AWM has nothing to compare")
    return layers, len(alive)


def spectral_power(weight: Tensor, power: float) -> Tensor:
    """U·diag(σ^p)·Vᵀ for W = U·diag(σ)·Vᵀ [n, d]: p < 1 flattens the spectrum, which lowers the score of unrelated
    models."""
    wide = weight.shape[0] <= weight.shape[1]
    gram = (weight @ weight.T if wide else weight.T @ weight).double()
    values, vectors = torch.linalg.eigh(gram)
    # Below 1e-7 of the largest, an eigenvalue of a float32 Gram is rounding: those directions are left out.
    keep = values > 1e-7 * values[-1]
    factor = torch.where(keep, values.clamp_min(1e-300).pow((power - 1) / 2), 0.0)
    middle = ((vectors * factor) @ vectors.T).to(weight.dtype)
    return middle @ weight if wide else weight @ middle


def awm(
    a: Checkpoint,
    b: Checkpoint,
    *,
    hardened: bool = True,
    alignment: Literal["lap", "procrustes"] = "lap",
    anchor: Anchor = "auto",
    power: float = 1.0,
    parts: bool = False,
    progress: Progress | None = None,
) -> AWMResult:
    """Score how far the readers of two models agree once their residual axes are matched.

    hardened:  canonical weights (see `canonical`); False = the published method on stored weights.
    alignment: "lap" (signed permutation) or "procrustes" (rotation; undoes T5, has the higher null).
    anchor:    what axes are matched by. "auto": the identity where layers agree on axes as they are, else the
               embedding and, only where that settles it, the output head; `anchors_tried` says how many were tried.
               Paper mode: embedding.
    power:     spectral power p of every matrix (1 = off).
    parts:     also score gate, up, v and the writers o and down; never part of the score.

    Raises NoAnchorError when no axis can be matched, NoEvidenceError when a model has no query and key weights.
    """
    sides = [_Side(m, hardened, power) for m in (a, b)]
    swapped = sides[0].width < sides[1].width
    base, target = reversed(sides) if swapped else sides
    notes: list[str] = []
    found, tried, doubt, notes = _anchor(
        base, target, alignment, anchor if hardened or anchor != "auto" else "embedding", notes
    )
    frame = _Frame(base, target, found)

    matched, scores, constant = _match(frame, parts, progress)
    tau = float(kendalltau(*zip(*matched)).statistic) if len(matched) > 1 else 1.0
    if len(base.layers) != len(target.layers):
        notes.append(
            f"{len(base.layers)} and {len(target.layers)} layers can be compared: they were matched by their content"
        )
    elif matched != list(zip(base.layers, target.layers)):
        notes.append("layers were matched by their content: by their place they agree less")
    if swapped:
        scores = [replace(s, layer_a=s.layer_b, layer_b=s.layer_a) for s in scores]
    score_q = sum(s.q for s in scores) / len(scores)
    score_k = sum(s.k for s in scores) / len(scores)
    agreement = [(s.q + s.k) / 2 if found.anchor == "identity" else s.agreement for s in scores]
    coverage = min(len(s.layers) / s.live for s in sides)
    if coverage < 1:
        notes.append(f"only {coverage:.0%} of the layers have query and key weights of their own")
    doubts = [doubt] if doubt else []
    if constant:
        doubts.append(f"{len(constant)} matrices are constant over the residual axes, as no training leaves them, and "
                      f"say nothing: {constant[0]}")  # fmt: skip
    mode = mode_name(hardened, alignment, power, found.anchor)
    return AWMResult(
        mode, (score_q + score_k) / 2, float(np.median(agreement)), score_q, score_k, scores, found, tried, coverage,
        tau, doubts, notes,
    )  # fmt: skip


def mode_name(hardened: bool, alignment: str, power: float = 1.0, anchor: str = "embedding") -> str:
    """The name under which a null distribution is kept: `paper-lap`, `hardened-procrustes`, `hardened-identity` (axes
    as they are), `hardened-lap-head` (matched by the output head) …"""
    kind = "hardened" if hardened else "paper"
    power_of = "" if power == 1 else f"-p{power:g}"
    if anchor == "identity":
        return f"{kind}-identity{power_of}"
    return f"{kind}-{alignment}" + ("-head" if anchor == "head" else "") + power_of


def exceeds(score: float, beside: Sequence[float]) -> float:
    """How far the score of two layers exceeds what neighbours share: 1 for equal layers, about 0 for strangers."""
    common = min(max(sum(beside) / len(beside), 0.0), _COMMON) if beside else 0.0
    return (score - common) / (1 - common)


class _Frame:
    """Both models on common residual axes: scores of any pair of their layers."""

    def __init__(self, base: _Side, target: _Side, found: Alignment) -> None:
        self.base, self.target, self.found = base, target, found
        self._turn_a = self._turn_b = None
        if found.rotation is not None:
            like = target.model.embedding(slice(0, 1))
            self._turn_b = fixed_frame(target.width, like)
            self._turn_a = found.rotation @ self._turn_b

    def on_base(self, weight: Tensor) -> Tensor:
        """Base reader [n, d_a] → samples [d_b, n]."""
        return (self.found.apply(weight) if self._turn_a is None else weight @ self._turn_a).T

    def on_target(self, weight: Tensor) -> Tensor:
        return (weight if self._turn_b is None else weight @ self._turn_b).T

    def samples(self, l: int, m: int) -> tuple[list[Samples], list[Samples]]:
        """(q and k of layer l of the base, of layer m of the target)."""
        ours = [Samples.of(self.on_base(x)) for x in self.base.query_key(l)]
        return ours, [Samples.of(self.on_target(y)) for y in self.target.query_key(m)]

    def score(self, l: int, m: int) -> float:
        """s(A_l, B_m) = ½(UCKA(W_q) + UCKA(W_k))."""
        return _shared(*self.samples(l, m))

    def score_parts(self, l: int, m: int) -> dict[str, float]:
        ours, theirs = dict(self.base.parts(l)), dict(self.target.parts(m))
        return {
            role: unbiased_cka(Samples.of(self.on_base(ours[role])), Samples.of(self.on_target(theirs[role])))
            for role in PARTS
            if role in ours and role in theirs
        }


def _shared(ours: Sequence[Samples], theirs: Sequence[Samples]) -> float:
    return sum(unbiased_cka(x, y) for x, y in zip(ours, theirs)) / len(ours)


def _anchor(
    base: _Side, target: _Side, mode: Literal["lap", "procrustes"], wanted: Anchor, notes: list[str]
) -> tuple[Alignment, int, str, list[str]]:
    """The alignment to use, the number of anchors tried, why it may be wrong, and what to tell the reader about it."""
    same_width = base.width == target.width
    probes = _probe_layers(base.layers, target.layers)

    def probe(found: Alignment) -> float:
        frame = _Frame(base, target, found)
        return float(np.median([frame.score(l, m) for l, m in probes]))

    if wanted == "identity":
        if not same_width:
            raise NoAnchorError(
                f"widths {base.width} and {target.width} differ and there is no anchor to match axes by"
            )
        return identity(mode), 1, "", notes
    tried = 0
    if wanted == "auto" and same_width:
        # Axes as they are need no map: what agrees there agrees by origin (chance scatters by 1/(d√n)).
        tried += 1
        if probe(identity(mode)) > max(_UNMOVED, 8 / ((target.width - 2) * len(probes) ** 0.5)):
            return identity(mode), tried, "", notes
    rows = matched_rows(base.model, target.model) if base.hardened else _by_token(base.model, target.model)
    if rows.how != "token":
        notes = [*notes, f"no tokenizer fits both models: embedding rows were matched by their {rows.how}"]
    if not rows.a:
        if not same_width or wanted != "auto":
            raise NoAnchorError(
                "no shared tokens: the two vocabularies have no entry in common, so axes cannot be matched"
            )
        return identity(mode), tried, "no token is shared: axes that were moved cannot be found", [
            *notes, "no shared tokens: residual axes were taken as they are"
        ]  # fmt: skip

    def make(name: str) -> Alignment:
        return align(base.anchor(name), target.anchor(name), rows.a, rows.b, mode, name)

    if wanted != "auto":
        return make(wanted), 1, rows.doubt, notes
    tried += 1
    best = make("embedding")
    if not (base.model.tied and target.model.tied) and probe(best) <= _CLEAR:
        # The head replaces the embedding only where it settles the matter: heads of strangers agree more.
        tried += 1
        if probe(head := make("head")) > _CLEAR:
            best, notes = head, [*notes, "embeddings did not match the axes; they were matched by the output head"]
    return best, tried, rows.doubt, notes


def _by_token(a: Checkpoint, b: Checkpoint) -> Rows:
    """As published: rows of the same token, or of the same number."""
    how = "number" if a.vocabulary is None or b.vocabulary is None else "token"
    return Rows(*shared_rows(a.vocabulary, b.vocabulary, a.vocab_rows, b.vocab_rows), how)


def _probe_layers(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """First, middle and last pair: enough to tell a right alignment from a wrong one."""
    return [
        (a[round(t * (len(a) - 1))], b[round(t * (len(b) - 1))]) for t in ((0.0, 0.5, 1.0) if len(a) > 1 else (0.0,))
    ]


def _match(
    frame: _Frame, parts: bool, progress: Progress | None
) -> tuple[list[tuple[int, int]], list[LayerScore], list[str]]:
    """Matched layers, their scores and the constant matrices among them.

    Equal depth: by place, unless the contents of the layers fit another order better. Contents are compared on up to
    256 residual axes, which is enough to tell layers apart and cheap.
    """
    ours, theirs = frame.base.layers, frame.target.layers
    axes = torch.linspace(0, frame.target.width - 1, min(_SKETCH, frame.target.width)).round().long()
    if len(ours) == len(theirs):
        pairs = list(zip(ours, theirs))
        scores, constant, sketches = _walk(frame, pairs, axes, progress)
        table = sketches[0] @ sketches[1].T
        rows, columns = linear_sum_assignment(-table)
        if table[rows, columns].mean() > table.diagonal().mean() + _MOVED:
            pairs = [(ours[i], theirs[j]) for i, j in zip(rows, columns)]
            scores, constant, _ = _walk(frame, pairs, axes, progress)
    else:
        table = (
            _sketches(frame.base, ours, frame.on_base, axes) @ _sketches(frame.target, theirs, frame.on_target, axes).T
        )
        pairs = [(ours[i], theirs[j]) for i, j in zip(*linear_sum_assignment(-table))]
        scores, constant, _ = _walk(frame, pairs, axes, progress)
    if parts:
        scores = [replace(s, parts=frame.score_parts(s.layer_a, s.layer_b)) for s in scores]
    return pairs, scores, constant


def _walk(
    frame: _Frame, pairs: Sequence[tuple[int, int]], axes: Tensor, progress: Progress | None
) -> tuple[list[LayerScore], list[str], list[np.ndarray]]:
    """Scores of matched layers in their order, constant matrices, and sketches of both sides' layers."""
    found: list[tuple[float, float]] = []
    beside: list[list[float]] = [[] for _ in pairs]
    sketches: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    constant: list[str] = []
    before: tuple[list[Samples], list[Samples]] | None = None
    for at, (l, m) in enumerate(pairs):
        here = frame.samples(l, m)
        q, k = (unbiased_cka(x, y) for x, y in zip(*here))
        found.append((q, k))
        for side, layer, samples, sketch in zip((frame.base, frame.target), (l, m), here, sketches):
            sketch.append(_sketch([s.x[axes.to(s.x.device)] for s in samples]))
            constant += [
                f"W_{role} of layer {layer} of {side.model.source}"
                for role, s in zip("qk", samples)
                if s.self_hsic == 0
            ]
        if before is not None:
            across = [_shared(before[0], here[1]), _shared(here[0], before[1])]
            beside[at - 1] += across
            beside[at] += across
        before = here
        if progress:
            progress(at + 1, len(pairs))
    scores = [LayerScore(l, m, q, k, exceeds((q + k) / 2, near)) for (l, m), (q, k), near in zip(pairs, found, beside)]
    return scores, constant, [np.stack(s) for s in sketches]


def _sketches(side: _Side, layers: Sequence[int], turn: Callable[[Tensor], Tensor], axes: Tensor) -> np.ndarray:
    return np.stack([_sketch([turn(x)[axes.to(x.device)] for x in side.query_key(layer)]) for layer in layers])


def _sketch(samples: Sequence[Tensor]) -> np.ndarray:
    """q and k of a layer on a few axes: the inner product of two sketches is their mean UCKA there."""
    grams = [centred_gram(x).flatten() / math.sqrt(len(samples)) for x in samples]
    return torch.cat(grams).float().cpu().numpy()
