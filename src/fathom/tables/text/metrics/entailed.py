"""PARENT (arXiv 1906.01081): n-grams of a description count where the reference or the table has them.

w(g)      share of the tokens of g that occur in a value of the table
P_n       Σ_g count(g) · [p(g) + (1 − p(g)) · w(g)] / Σ_g count(g),   p(g) = min(1, count in reference / count(g))
R_n       Σ_g w(g) · min(count in reference, count in prediction) / Σ_g w(g) · count in reference
table     mean over slots of LCS(value, prediction) / |value|
recall    (Π R_n)^{(1−λ)/4} · table^λ,   λ = ½, or None: 1 − table recall of the reference
F         2 · P · R / (P + R),  P = (Π P_n)^{1/4};  the best over references
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fathom.tables.text.linearize import Table

ORDER = 4
SMALL = 1e-5  # instead of zero, where a text has no n-gram of some length or none of them counts


@dataclass(frozen=True)
class Parent:
    """Entailed precision, entailed recall and their harmonic mean, from 0 to 1."""

    precision: float
    recall: float
    f1: float


def tokens(text: str) -> list[str]:
    """Lower-cased words and marks of punctuation."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return str(Tokenizer13a()(text)).lower().split()


def parent(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    tables: Sequence[Table],
    lambda_weight: float | None = 0.5,
) -> Parent:
    """The mean over descriptions. Raises ValueError for lists of different lengths.

    lambda_weight: λ in [0, 1]; None: of every reference by itself, as AKG's evaluator does.
    """
    if not len(predictions) == len(references) == len(tables):
        raise ValueError(
            f"{len(predictions)} predictions, {len(references)} references, {len(tables)} tables: must agree"
        )
    if lambda_weight is not None and not 0 <= lambda_weight <= 1:
        raise ValueError(f"lambda_weight={lambda_weight!r}: use a number in [0, 1], or None")
    found = [
        max((_one(said, reference, table, lambda_weight) for reference in some), key=lambda one: one.f1)
        for said, some, table in zip(predictions, references, tables, strict=True)
    ]
    count = max(1, len(found))
    return Parent(*(math.fsum(getattr(one, name) for one in found) / count for name in ("precision", "recall", "f1")))


def _one(prediction: str, reference: str, table: Table, lambda_weight: float | None) -> Parent:
    said, right = tokens(prediction), tokens(reference)
    values = [value for value in map(tokens, table.values) if value]
    known = {token for value in values for token in value}
    precisions, recalls = [], []
    for n in range(1, ORDER + 1):
        ours, theirs = _ngrams(said, n), _ngrams(right, n)
        weight = {g: sum(token in known for token in g) / n for g in ours | theirs}
        entailed = 0.0
        for gram, count in ours.items():
            share = min(1.0, theirs[gram] / count)
            entailed += count * (share + (1 - share) * weight[gram])
        precisions.append(_ratio(entailed, sum(ours.values()), n))
        hit = sum(weight[g] * min(count, ours[g]) for g, count in theirs.items())
        recalls.append(_ratio(hit, sum(weight[g] * count for g, count in theirs.items()), n))
    table_recall = _table_recall(values, said)
    λ = 1 - _table_recall(values, right) if lambda_weight is None else lambda_weight
    precision = _mean(precisions)
    reference_recall = _mean(recalls)
    recall = reference_recall ** (1 - λ) * table_recall**λ
    total = precision + recall
    return Parent(precision, recall, 2 * precision * recall / total if total > 0 else 0.0)


def _ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n))))


def _ratio(part: float, whole: float, n: int) -> float:
    """Zeros stay zeros for single words, else they are `SMALL`."""
    value = part / whole if whole > 0 else 0.0
    return value if value > 0 or n == 1 else SMALL


def _mean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def _table_recall(values: list[list[str]], said: list[str]) -> float:
    if not values:
        return 0.0
    return math.fsum(_lcs(value, said) / len(value) for value in values) / len(values)


def _lcs(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
