r"""HuRef, "human-readable fingerprint for large language models" (Zeng et al., arXiv 2312.04828): invariant terms
and ICS.

With X = E[tok] ∈ R^{K×d} the embeddings of K rare tokens, for each of the last two layers that write anything:

    M_a = X · Σ_j W_q,jᵀ W_k,g(j) · Xᵀ      attention scores        (j: query heads, g(j): the KV head that serves j)
    M_b = X · Σ_j W_v,g(j)ᵀ W_o,jᵀ · Xᵀ     values and outputs
    M_c = X · W_upᵀ W_downᵀ · Xᵀ            feed-forward

    ICS(A, B) = 100 · mean over the six terms of the Pearson correlation of M_A and M_B

No K×K matrix is formed: M = L·Rᵀ with L, R [K, r], so ⟨M_A, M_B⟩ = ⟨L_AᵀL_B, R_AᵀR_B⟩ and row sums are L·(Rᵀ1).
The defaults repair what breaks the published code's invariance; `PAPER` restores it (its defects are tested as such).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.align import LOUD, quiet
from fathom.lineage.errors import NoAnchorError, NoEvidenceError
from fathom.lineage.reader import Checkpoint
from fathom.lineage.rows import matched_rows
from fathom.lineage.short_products import length, near_one
from fathom.lineage.token_rows import shared_rows

VECTOR = 512
_STEP = 256  # six terms of K rows fall into 512 equal bins when 6K/512 is whole
TERMS = ("M_a", "M_b", "M_c")


@dataclass(frozen=True)
class HuRefOptions:
    """Options of how terms are built.

    glu_term:    which matrix of a gated feed-forward is W_up: "up", or "hadamard" (gate ∘ up; breaks under sign flips).
    gqa:         "per_head": a query head meets the KV head that serves it; "tile": the KV block repeated end to end.
    fold_norms:  use canonical weights; False reads them as stored.
    selection:   which shared tokens: "rarest" (highest id, i.e. last merges), "random", "all".
    tokens:      K.
    standardise: pooled vectors from terms of mean 0 and variance 1; False lets large terms (and the residual scale)
                 rule.
    """

    glu_term: Literal["up", "hadamard"] = "up"
    gqa: Literal["per_head", "tile"] = "per_head"
    fold_norms: bool = True
    selection: Literal["rarest", "random", "all"] = "rarest"
    tokens: int = 4096
    standardise: bool = True


DEFAULT = HuRefOptions()
PAPER = HuRefOptions(glu_term="hadamard", gqa="tile", fold_norms=False, standardise=False)


@dataclass(frozen=True)
class Term:
    """M = left · rightᵀ, [K, r] each: its mean, its standard deviation, and what comparisons need."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, left: Tensor, right: Tensor, options: HuRefOptions) -> "Term":
        """Factors brought near 1 by powers of two, or products of very small or large weights would leave float32. No
        correlation sees it; without `standardise` the sizes of the terms count, so they stay."""
        scales = [near_one(t) if options.standardise else 1.0 for t in (left, right)]
        return cls(*(t if s == 1 else t * s for t, s in zip((left, right), scales)))

    @property
    def total(self) -> float:
        return self.left.sum(0, dtype=torch.float64).dot(self.right.sum(0, dtype=torch.float64)).item()

    def dot(self, other: "Term") -> float:
        """⟨M, M'⟩ = ⟨LᵀL', RᵀR'⟩."""
        lefts, rights = self.left.T @ other.left, self.right.T @ other.right
        return (lefts * rights).sum(dtype=torch.float64).item()

    def covariance(self, other: "Term") -> float:
        return self.dot(other) - self.total * other.total / len(self.left) ** 2

    def row_sums(self) -> Tensor:
        return (self.left @ self.right.sum(0)).double()

    def dense(self) -> Tensor:
        """The K×K matrix itself, standardised: what pooling takes the means of."""
        full = self.left @ self.right.T
        return (full - full.mean()) / full.std().clamp_min(torch.finfo(full.dtype).tiny)


@dataclass(frozen=True)
class ICSResult:
    """score: ICS in [−100, 100]; agreement: the median of the terms, which is judged; terms: correlation of each term
    by layer from the end, e.g. {"M_a[-1]": 0.98}; coverage: part of live layers that have q, k, v and o, from which the
    two compared layers are taken; doubts: why a low score may be a disguise."""

    score: float
    agreement: float
    terms: dict[str, float]
    tokens: int
    coverage: float
    doubts: list[str]
    notes: list[str]


def select_tokens(
    a: Checkpoint,
    b: Checkpoint | None,
    options: HuRefOptions,
    seed: int = 0,
    rows: tuple[list[int], list[int]] | None = None,
) -> tuple[list[int], list[int], list[bytes]]:
    """Rows of the K tokens in a, the same tokens in b, and their bytes (empty without tokenizers).

    rows: what corresponds, where it is known otherwise; default: rows of the same token.

    Raises NoAnchorError when fewer than 256 tokens are shared (or K, if that is less): the correlation of two unrelated
    terms varies by about 1/K, for a handful of tokens far beyond the null.
    """
    other = a if b is None else b
    rows_a, rows_b = rows or shared_rows(a.vocabulary, other.vocabulary, a.vocab_rows, other.vocab_rows)
    spelled = {i: t for t, i in a.vocabulary.items()} if a.vocabulary is not None else {}
    special = {i for i, t in spelled.items() if t[:1] in b"<[" and t[-1:] in b">]" and len(t) > 2}
    pairs = sorted((i, j) for i, j in zip(rows_a, rows_b) if i not in special)
    if options.selection == "rarest":
        pairs = pairs[-options.tokens :]
    elif options.selection == "random":
        generator = torch.Generator().manual_seed(seed)
        picked = torch.randperm(len(pairs), generator=generator)[: options.tokens]
        pairs = [pairs[i] for i in picked.sort().values.tolist()]
    if len(pairs) < (least := min(_STEP, options.tokens)):
        raise NoAnchorError(
            f"{len(pairs)} {'tokens' if b is None else 'shared tokens'}; HuRef needs the embeddings of at least {least}"
        )
    return [i for i, _ in pairs], [j for _, j in pairs], [spelled[i] for i, _ in pairs if i in spelled]


def last_layers(model: Checkpoint, count: int = 2) -> list[int]:
    """The last layers whose attention writes anything; growth appends dead ones, a disguise filled ones."""
    found: list[int] = []
    for layer in reversed(layers := _attention_layers(model)[0]):
        if len(found) < count and canonical.attends(model, layer):
            found.insert(0, layer)
    return found or layers[-count:]


def _attention_layers(model: Checkpoint) -> tuple[list[int], float]:
    """Live layers with q, k, v and o, and their part of all live layers."""
    live = canonical.live_layers(model)
    found = [l for l in live if all(model.has(l, r) for r in "qkvo")]
    if not found:
        raise NoEvidenceError(f"{model.source}: no live layer with q, k, v and o weights; HuRef needs them")
    return found, len(found) / len(live)


def invariant_terms(model: Checkpoint, rows: Sequence[int], options: HuRefOptions = DEFAULT) -> list[Term]:
    """[M_a, M_b, M_c] of the last two live layers, in the order of the layers."""
    index = torch.tensor(rows, device=model.device)
    table = canonical.embedding(model, None) if options.fold_norms else model.embedding()
    x = table[index]
    del table
    x = x * near_one(x)  # scales all six terms alike
    if options.fold_norms:  # tokens that no text has may carry any row
        x = quiet(x, LOUD * length(x, 1).median().item())
    terms = []
    for layer in last_layers(model):
        terms += [_attention(model, layer, x, options), _values(model, layer, x, options)]
        terms.append(_feed_forward(model, layer, x, options))
    return terms


def _grouped(heads: Tensor, group: int, gqa: str) -> Tensor:
    """Per-query-head factors [K, H, h] summed over the query heads that meet the same KV head: [K, Hkv·h]."""
    k, count, size = heads.shape
    # per_head: query head j meets KV head j // group; tile: j mod Hkv
    shaped = heads.reshape(k, count // group, group, size) if gqa == "per_head" else heads.reshape(k, group, -1, size)
    return shaped.sum(2 if gqa == "per_head" else 1).flatten(1)


def _attention(model: Checkpoint, layer: int, x: Tensor, options: HuRefOptions) -> Term:
    g = model.geometry
    if options.fold_norms and options.gqa == "per_head":
        q, k = canonical.query_key(model, layer)
        return Term.of(x @ q.T, x @ k.T, options)
    q, k = model.read(layer, "q"), model.read(layer, "k")
    if options.fold_norms:
        q, k = (canonical.fold(model, layer, t, "attn_norm", None) for t in (q, k))
    queries = (x @ q.T).reshape(len(x), g.heads, -1)
    return Term.of(_grouped(queries, g.heads // g.kv_heads, options.gqa), x @ k.T, options)


def _values(model: Checkpoint, layer: int, x: Tensor, options: HuRefOptions) -> Term:
    g = model.geometry
    v, o = model.read(layer, "v"), model.read(layer, "o")
    if options.fold_norms:
        v = canonical.fold(model, layer, v, "attn_norm", None)
        o = canonical.written(model, layer, o, "post_attn_norm", None)
    outputs = (x @ o).reshape(len(x), g.heads, -1)
    return Term.of(x @ v.T, _grouped(outputs, g.heads // g.kv_heads, options.gqa), options)


def _feed_forward(model: Checkpoint, layer: int, x: Tensor, options: HuRefOptions) -> Term:
    """Experts add up: their order does not matter, and copies of one expert only scale the term."""
    total, scales = torch.zeros_like(x), None
    for prefix in model.feed_forwards(layer):
        if options.fold_norms and options.glu_term == "up":
            _, up, down = canonical.feed_forward(model, layer, prefix)
        else:
            up, down = model.read(layer, prefix + "up"), model.read(layer, prefix + "down")
            if options.glu_term == "hadamard" and model.has(layer, prefix + "gate"):
                up = up * model.read(layer, prefix + "gate")
            if options.fold_norms:
                up = canonical.fold(model, layer, up, "ffn_norm", None)
                down = canonical.written(model, layer, down, "post_ffn_norm", None)
        if options.standardise:
            scales = scales or (near_one(up), near_one(down))  # one scale for all experts, or their sum would change
            up, down = up * scales[0], down * scales[1]
        # W_upᵀW_downᵀ first or last, whichever is the smaller product
        total += (x @ up.T) @ down.T if len(up) < len(x) or len(up) > 2 * x.shape[1] else x @ (up.T @ down.T)
    return Term.of(total, x, options)


def ics(a: Checkpoint, b: Checkpoint, options: HuRefOptions = DEFAULT) -> ICSResult:
    """Invariant-term cosine similarity of two models, 100 for one function however it is written down.

    Widths and depths may differ: terms are K×K and come from the last two live layers of each.
    Raises NoAnchorError without shared tokens.
    """
    matched = matched_rows(a, b) if options.fold_norms else None
    rows_a, rows_b, spelled = select_tokens(a, b, options, rows=None if matched is None else (matched.a, matched.b))
    ours, theirs = invariant_terms(a, rows_a, options), invariant_terms(b, rows_b, options)
    count = min(len(ours), len(theirs))
    ours, theirs = ours[-count:], theirs[-count:]
    coverage = min(_attention_layers(m)[1] for m in (a, b))
    scores, notes = {}, [] if spelled else ["no tokenizer: tokens were matched by their number"]
    doubts = [matched.doubt] if matched is not None and matched.doubt else []
    if coverage < 1:
        notes.append(f"only {coverage:.0%} of the layers have query and key weights of their own")
    for i, (m, n) in enumerate(zip(ours, theirs)):
        name = f"{TERMS[i % 3]}[{(i - count) // 3}]"
        energy = m.covariance(m) * n.covariance(n)
        scores[name] = m.covariance(n) / math.sqrt(energy) if energy > 0 else 0.0
        if energy <= 0:
            doubts.append(f"{name} is constant in one model, as no training leaves it, and counts as 0")
    middle = float(np.median(list(scores.values())))
    return ICSResult(100 * sum(scores.values()) / count, middle, scores, len(rows_a), coverage, doubts, notes)


def pooled_vector(terms: Sequence[Term], options: HuRefOptions = DEFAULT) -> Tensor:
    """Mean pooling to a 512-vector (mean 0, standard deviation 1): bin b averages 6K/512 consecutive rows of the terms.

    Two mat-vecs a term: the row sums of M = L·Rᵀ are L·(Rᵀ1).
    Raises ValueError unless six terms with K a multiple of 256 are given.
    """
    k = len(terms[0].left)
    if len(terms) != 6 or k % _STEP:
        raise ValueError(
            f"terms: {len(terms)} terms of {k} rows; pooling needs 6 terms and a multiple of {_STEP} tokens"
        )
    sums = []
    for term in terms:
        rows = term.row_sums() / k
        if options.standardise:
            mean = term.total / k**2
            rows = (rows - mean) / max(math.sqrt(max(term.covariance(term), 0) / (k**2 - 1)), 1e-300)
        sums.append(rows)
    vector = torch.cat(sums).reshape(VECTOR, -1).mean(1)
    return ((vector - vector.mean()) / vector.std()).cpu()


@dataclass(frozen=True)
class Fingerprint:
    """A stand-alone fingerprint: the 512-vector, the tokens it was made with (bytes) and their embedding rows."""

    vector: Tensor
    tokens: list[bytes]
    rows: list[int]
    layers: list[int]

    @property
    def token_digest(self) -> str:
        return hashlib.sha256(b"".join(len(t).to_bytes(4, "big") + t for t in self.tokens)).hexdigest()


def fingerprint(
    model: Checkpoint, options: HuRefOptions = DEFAULT, tokens: Sequence[bytes] | None = None
) -> Fingerprint:
    """The 512-vector of one model by mean pooling.

    tokens: the frozen list of another fingerprint, so that both use the same rows; default: this model's own rarest.
    Raises NoAnchorError when the model lacks a token of the list or has fewer than 256.
    """
    if tokens is not None:
        vocabulary = model.vocabulary or {}
        if missing := [t for t in tokens if t not in vocabulary]:
            raise NoAnchorError(
                f"{model.source}: {len(missing)} tokens of the list are unknown here, e.g. {missing[0]!r}"
            )
        rows, spelled = [vocabulary[t] for t in tokens], list(tokens)
    else:
        rows, _, spelled = select_tokens(model, None, options)
        keep = len(rows) // _STEP * _STEP
        if keep == 0:
            raise NoAnchorError(f"{model.source}: {len(rows)} tokens; a pooled fingerprint needs at least {_STEP}")
        rows, spelled = rows[-keep:], spelled[-keep:]
    terms = invariant_terms(model, rows, options)
    terms = terms if len(terms) == 6 else terms * 2  # a one-layer model counts its layer twice
    return Fingerprint(pooled_vector(terms, options), spelled, rows, last_layers(model))
