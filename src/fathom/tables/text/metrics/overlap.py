"""Scores of descriptions against references: BLEU, ROUGE-4, METEOR and BERTScore."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]], tokenize: str = "13a") -> float:
    """Corpus BLEU-4 in 0 … 100 over all references of each text, by sacrebleu; a text may have fewer than others.

    tokenize: "13a" splits marks from words; "none" takes tokenised text as it is, like multi-bleu.perl.
    """
    import sacrebleu

    streams = [list(stream) for stream in zip_longest(*references)]
    return float(sacrebleu.corpus_bleu(list(predictions), streams, tokenize=tokenize, force=True).score)  # type: ignore[arg-type]


def rouge4(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """F₁ of 4-grams in 0 … 1, the best over references, the mean over texts (rouge-score, stemmed)."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge4"], use_stemmer=True)
    found = [
        max(scorer.score(right, said)["rouge4"].fmeasure for right in some)
        for said, some in zip(predictions, references, strict=True)
    ]
    return sum(found) / max(1, len(found))


def meteor(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """METEOR in 0 … 1 with its stages "exact" and "stem", the best over references, the mean over texts.

        F = 10PR / (R + 9P),   score = F · (1 − ½ (chunks / matches)³)

    The stages "synonym" and "paraphrase" read WordNet and tables that would have to be downloaded: a score here is no
    higher than with them.
    """
    found = [max(_meteor(said, right) for right in some) for said, some in zip(predictions, references, strict=True)]
    return sum(found) / max(1, len(found))


def _meteor(prediction: str, reference: str) -> float:
    from nltk.stem.porter import PorterStemmer

    from fathom.tables.text.metrics.entailed import tokens

    said, right = tokens(prediction), tokens(reference)
    stem = PorterStemmer().stem
    pairs: dict[int, int] = {}
    for form in (lambda word: word, stem):  # a stage aligns what the one before has left
        free: dict[str, list[int]] = {}
        for j, word in enumerate(right):
            if j not in pairs.values():
                free.setdefault(form(word), []).append(j)
        for i, word in enumerate(said):
            places = free.get(form(word))
            if i not in pairs and places:
                after = pairs.get(i - 1, -2) + 1  # the place that makes no new chunk, if it is free
                pairs[i] = after if after in places else places[0]
                places.remove(pairs[i])
    if not pairs:
        return 0.0
    matches = len(pairs)
    precision, recall = matches / len(said), matches / len(right)
    chunks = sum(pairs.get(i - 1, -2) + 1 != j for i, j in pairs.items())
    return 10 * precision * recall / (recall + 9 * precision) * (1 - 0.5 * (chunks / matches) ** 3)


def bert_score(
    predictions: Sequence[str], references: Sequence[Sequence[str]], model: str, layer: int, batch_size: int = 32
) -> float:
    """Mean F₁ of BERTScore (arXiv 1904.09675), the best over references, without baseline rescaling.

    model: folder of an encoder. layer: the layer whose states are compared, from 1.
    """
    from bert_score import BERTScorer

    from fathom.models.local_paths import refuse_absent

    refuse_absent(model, f"bert_score model={model!r}")
    scorer = BERTScorer(model_type=model, num_layers=layer, batch_size=batch_size, lang="en")
    known: Any = scorer._tokenizer
    known.model_max_length = min(known.model_max_length, scorer._model.config.max_position_embeddings)  # type: ignore[union-attr]
    _, _, f1 = scorer.score(list(predictions), [list(some) for some in references])
    return float(f1.mean())
