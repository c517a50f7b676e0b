r"""AWM, "Accurate Weight-Matrix fingerprint for large language models" (Zeng et al., arXiv 2510.06738), and its
hardened form.

    1  align residual axes from shared token embeddings (see `align`)
    2  per layer, unbiased CKA of the aligned W_q and W_k, residual dims as samples (see `cka`)
    3  score = ½ · (mean over matched layers of UCKA(W_q) + the same for W_k)

Paper mode reads weights as stored and aligns by LAP. It is evaded by folding norm gains and rotating the residual
stream.
Hardened mode reads `canonical` weights and aligns by LAP or Procrustes, so every exact re-parameterisation scores 1.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from fathom.lineage.token_rows import shared_rows

Anchor = Literal["auto", "embedding", "head", "identity"]
PARTS = ("gate", "up", "v", "o", "down")  # evidence beside q and k; o and down write the stream, the others read it
_CLEAR = 0.5  # an anchor whose probe scores this much needs no second opinion
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerScore:
    """UCKA of one matched pair of layers; parts only when asked for."""

    layer_a: int
    layer_b: int
    q: float
    k: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AWMResult:
    """What a comparison saw. `score` in about [−1, 1]; coverage is the part of live layers that had q and k to
    compare."""

    mode: str
    score: float
    score_q: float
    score_k: float
    layers: list[LayerScore]
    alignment: Alignment
    anchors_tried: int
    coverage: float
    order: float  # Kendall τ of matched layers; 1 when the order is kept
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
        layers = [l for l in layers if canonical.attends(model, l)]
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
    anchor:    what axes are matched by. "auto": the embedding and, only if that does not settle it, the identity and
               the output head, where one of them does; `anchors_tried` says how many were tried. Paper mode: embedding.
    power:     spectral power p of every matrix (1 = off).
    parts:     also score gate, up, v and the writers o and down; never part of the score.

    Raises NoAnchorError when no axis can be matched, NoEvidenceError when a model has no query and key weights.
    """
    sides = [_Side(m, hardened, power) for m in (a, b)]
    swapped = sides[0].width < sides[1].width
    base, target = reversed(sides) if swapped else sides
    notes: list[str] = []
    if a.vocabulary is None or b.vocabulary is None:
        notes.append("no tokenizer beside one model: embedding rows were matched by their number")
    found, tried, notes = _anchor(
        base, target, alignment, anchor if hardened or anchor != "auto" else "embedding", notes
    )
    frame = _Frame(base, target, found)

    if len(base.layers) == len(target.layers):
        pairs = list(zip(base.layers, target.layers))
        scores = []
        for done, (l, m) in enumerate(pairs, 1):
            scores.append(frame.score(l, m, parts))
            if progress:
                progress(done, len(pairs))
        tau = 1.0
    else:
        matched, scores = _match_depths(frame, progress)
        if parts:
            scores = [
                LayerScore(s.layer_a, s.layer_b, s.q, s.k, frame.score_parts(s.layer_a, s.layer_b)) for s in scores
            ]
        tau = float(kendalltau(*zip(*matched)).statistic) if len(matched) > 1 else 1.0
        notes.append(
            f"{len(base.layers)} and {len(target.layers)} layers can be compared: they were matched by their scores"
        )
    if swapped:
        scores = [LayerScore(s.layer_b, s.layer_a, s.q, s.k, s.parts) for s in scores]
    score_q = sum(s.q for s in scores) / len(scores)
    score_k = sum(s.k for s in scores) / len(scores)
    coverage = min(len(s.layers) / s.live for s in sides)
    if coverage < 1:
        notes.append(f"only {coverage:.0%} of the layers have query and key weights of their own")
    mode = mode_name(hardened, alignment, power)
    return AWMResult(mode, (score_q + score_k) / 2, score_q, score_k, scores, found, tried, coverage, tau, notes)


def mode_name(hardened: bool, alignment: str, power: float = 1.0) -> str:
    """The name under which a null distribution is kept: `paper-lap`, `hardened-procrustes`,
    `hardened-procrustes-p0.25` …"""
    return f"{'hardened' if hardened else 'paper'}-{alignment}" + ("" if power == 1 else f"-p{power:g}")


class _Frame:
    """Both models on common residual axes: scores of any pair of their layers."""

    def __init__(self, base: _Side, target: _Side, found: Alignment) -> None:
        self.base, self.target, self.found = base, target, found
        self._turn_a = self._turn_b = None
        if found.mode == "procrustes":
            like = target.model.embedding(slice(0, 1))
            self._turn_b = fixed_frame(target.width, like)
            self._turn_a = self._turn_b if found.rotation is None else found.rotation @ self._turn_b

    def on_base(self, weight: Tensor) -> Tensor:
        """Base reader [n, d_a] → samples [d_b, n]."""
        return (self.found.apply(weight) if self._turn_a is None else weight @ self._turn_a).T

    def on_target(self, weight: Tensor) -> Tensor:
        return (weight if self._turn_b is None else weight @ self._turn_b).T

    def score(self, l: int, m: int, parts: bool = False) -> LayerScore:
        q, k = (
            unbiased_cka(Samples.of(self.on_base(x)), Samples.of(self.on_target(y)))
            for x, y in zip(self.base.query_key(l), self.target.query_key(m))
        )
        return LayerScore(l, m, q, k, self.score_parts(l, m) if parts else {})

    def score_parts(self, l: int, m: int) -> dict[str, float]:
        ours, theirs = dict(self.base.parts(l)), dict(self.target.parts(m))
        return {
            role: unbiased_cka(Samples.of(self.on_base(ours[role])), Samples.of(self.on_target(theirs[role])))
            for role in PARTS
            if role in ours and role in theirs
        }


def _anchor(
    base: _Side, target: _Side, mode: Literal["lap", "procrustes"], wanted: Anchor, notes: list[str]
) -> tuple[Alignment, int, list[str]]:
    """The alignment to use, the number of anchors tried, and what to tell the reader about it."""
    rows = shared_rows(base.model.vocabulary, target.model.vocabulary, base.model.vocab_rows, target.model.vocab_rows)
    same_width = base.width == target.width

    def make(name: str) -> Alignment:
        if name == "identity":
            if not same_width:
                raise NoAnchorError(
                    f"widths {base.width} and {target.width} differ and there is no anchor to match axes by"
                )
            return identity(mode)
        return align(base.anchor(name), target.anchor(name), *rows, mode, name)

    if wanted != "auto":
        return make(wanted), 1, notes
    if not rows[0]:
        if not same_width:
            raise NoAnchorError("no shared tokens and different widths: the models' axes cannot be matched")
        return make("identity"), 1, [*notes, "no shared tokens: residual axes were taken as they are"]
    candidates = ["embedding"]
    if same_width:
        candidates.append("identity")
    if not (base.model.tied and target.model.tied):
        candidates.append("head")
    best, tried = None, 0
    probes = _probe_layers(base.layers, target.layers)
    for name in candidates:
        tried += 1
        found = make(name)
        if name == "identity" and best is not None and not best.moved:
            continue  # the same map again
        frame = _Frame(base, target, found)
        scores = [frame.score(l, m) for l, m in probes]
        score = sum(s.q + s.k for s in scores) / (2 * len(scores))
        # Another anchor replaces the embedding only where it settles the matter: unrelated heads agree more than
        # unrelated embeddings do (0.21 against 0.03 for small trained models), and the null is that of the embedding.
        if best is None or score > _CLEAR:
            best = found
        if score > _CLEAR:
            break
    assert best is not None
    if best.anchor != "embedding":
        notes = [*notes, f"embeddings did not match the axes; they were matched by: {best.anchor}"]
    return best, tried, notes


def _probe_layers(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """First, middle and last pair: enough to tell a right alignment from a wrong one."""
    return [
        (a[round(t * (len(a) - 1))], b[round(t * (len(b) - 1))]) for t in ((0.0, 0.5, 1.0) if len(a) > 1 else (0.0,))
    ]


def _match_depths(frame: _Frame, progress: Progress | None) -> tuple[list[tuple[int, int]], list[LayerScore]]:
    """All pairs of layers from cached centred Grams, then the assignment with the largest total ½(UCKA_q + UCKA_k).

    A unit-norm Gram has entries near 1/d, so it is stored times d in float16 on disk, and its norm after rounding
    is divided
    out again: equal layers score exactly 1.
    """
    width = frame.target.width
    ours, theirs = frame.base.layers, frame.target.layers
    table = {}
    total, done = 2 * (len(ours) + len(theirs)), 0
    with tempfile.TemporaryDirectory(prefix="fathom-grams-") as folder:
        for index, role in enumerate("qk"):
            stacks: list[np.memmap] = []
            for side, layers, turn in ((frame.base, ours, frame.on_base), (frame.target, theirs, frame.on_target)):
                path = f"{folder}/{role}{len(stacks)}"
                stack = np.memmap(path, dtype=np.float16, mode="w+", shape=(len(layers), width * width))
                for i, layer in enumerate(layers):
                    gram = centred_gram(turn(side.query_key(layer)[index])) * width
                    stack[i] = gram.flatten().half().cpu().numpy()
                    done += 1
                    if progress:
                        progress(done, total)
                stacks.append(stack)
            table[role] = _cosines(stacks[0], stacks[1], frame.base.model.device)
            del stacks
    rows, columns = linear_sum_assignment(-(table["q"] + table["k"]))
    matched = [(ours[i], theirs[j]) for i, j in zip(rows, columns)]
    scores = [
        LayerScore(ours[i], theirs[j], float(table["q"][i, j]), float(table["k"][i, j])) for i, j in zip(rows, columns)
    ]
    return matched, scores


def _cosines(a: np.ndarray, b: np.ndarray, device: torch.device, chunk: int = 1 << 20) -> np.ndarray:
    """Cosine of every row of a with every row of b, streamed over columns (float16 in, float32 products, float64
    sums)."""
    cross = torch.zeros(len(a), len(b), dtype=torch.float64)
    norm_a, norm_b = torch.zeros(len(a), dtype=torch.float64), torch.zeros(len(b), dtype=torch.float64)
    for start in range(0, a.shape[1], chunk):
        part_a = torch.from_numpy(a[:, start : start + chunk].astype(np.float32)).to(device)
        part_b = torch.from_numpy(b[:, start : start + chunk].astype(np.float32)).to(device)
        cross += (part_a @ part_b.T).double().cpu()
        norm_a += part_a.square().sum(1, dtype=torch.float64).cpu()
        norm_b += part_b.square().sum(1, dtype=torch.float64).cpu()
    return (cross / (norm_a[:, None] * norm_b).sqrt().clamp_min(1e-30)).numpy()
