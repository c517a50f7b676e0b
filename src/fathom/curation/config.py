"""The options of `fathom curate`: one frozen value, written as YAML."""

from __future__ import annotations

import dataclasses
from typing import Literal

CLEANING = ("references", "acknowledgements", "affiliations", "running heads", "page numbers", "hyphenation")
# What is read only beside another option.
BESIDE = {
    "language_confidence": "language",
    "known_words": "max_unknown",
    "ngram": "near_duplicates",
    "permutations": "near_duplicates",
    "bands": "near_duplicates",
    "similarity": "near_duplicates",
    "benchmark_ngram": "benchmarks",
    "benchmark_shortest": "benchmarks",
    "min_score": "judge_model",
}
MODELS = ("perplexity_model", "classifier_model", "judge_model")  # options that name a checkpoint, in their order


@dataclasses.dataclass(frozen=True)
class Curation:
    """Bounds that are null (None) are not asked for.

    language: ISO 639-1 code of the documents that are kept, and of the dictionary of `max_unknown`; null: any.
    language_confidence: the least confidence of py3langid.
    text_field: the field of JSONL and Parquet rows that holds the text.
    ref_format: a citation as its title, or as Galactica writes it, with the first author.
    malformed: a file or row that cannot be read is dropped and named, or stops the run.
    min_sections, min_words: a parsed paper needs a title, and at least this many sections or this many words.
    clean: rules that take lines out of a document.
    min_characters, max_characters: length of a document.
    max_symbols: share of the characters that are neither letters, digits nor spaces.
    min_alphabetic: share of the words that have a letter.
    min_word_length, max_word_length: mean of a document's words.
    max_duplicate_lines: share of the lines that an earlier line equals.
    max_top_bigram: share of the characters that the most frequent two words in a row take.
    max_unknown: share of the words of letters that the dictionary lacks: what a scanner misread.
    known_words: a file of words beside the dictionary's, one a line.
    near_duplicates: whether near duplicates are dropped, beside equal texts.
    ngram: words in a row that near duplicates are compared by.
    permutations, bands: of MinHash; pairs that agree in one of the bands are compared.
    similarity: least Jaccard similarity, estimated by all permutations, of near duplicates.
    benchmarks: name -> file or folder of questions (JSONL, Parquet) that the corpus must not hold.
    benchmark_ngram: words in a row that are a copy of a question; a shorter question counts as a whole.
    benchmark_shortest: words of the shortest question that is looked for.
    filters: name of a filter class of datatrove -> its arguments, run after our own rules.
    perplexity_model: checkpoint under which a document's perplexity must lie in a band; null: no such filter.
    min_perplexity, max_perplexity: the band.
    classifier_model: checkpoint that classifies texts; null: no such filter.
    classes: names in its config of the classes that are kept.
    judge_model: checkpoint that scores documents from 1 to 5; null: there is no level three.
    min_score: the least expected score.
    model_characters: number of characters of a document that models read.
    shard_bytes: approximate bytes of input for each task; results do not depend on how many run at a time.
    """

    language: str | None = "en"
    language_confidence: float = 0.5
    text_field: str = "text"
    ref_format: Literal["title", "title_author"] = "title"
    malformed: Literal["drop", "stop"] = "drop"
    min_sections: int = 2
    min_words: int = 500
    clean: tuple[str, ...] = (
        "references", "acknowledgements", "affiliations", "running heads", "page numbers", "hyphenation",
    )  # fmt: skip
    min_characters: int | None = 200
    max_characters: int | None = 100_000
    max_symbols: float | None = 0.3
    min_alphabetic: float | None = 0.6
    min_word_length: float | None = 3.0
    max_word_length: float | None = 12.0
    max_duplicate_lines: float | None = 0.3
    max_top_bigram: float | None = 0.2
    max_unknown: float | None = 0.35
    known_words: str | None = None
    near_duplicates: bool = True
    ngram: int = 5
    permutations: int = 128
    bands: int = 16
    similarity: float = 0.8
    benchmarks: dict[str, str] | None = None
    benchmark_ngram: int = 13
    benchmark_shortest: int = 8
    filters: dict[str, dict] | None = None
    perplexity_model: str | None = None
    min_perplexity: float | None = None
    max_perplexity: float | None = None
    classifier_model: str | None = None
    classes: tuple[str, ...] = ()
    judge_model: str | None = None
    min_score: float = 3.0
    model_characters: int = 4000
    shard_bytes: int = 32_000_000

    name = "geogalactica"
    paper = "2401.00434"
    summary = "Papers and texts to a cleaned corpus, with an account of every document and line that was dropped."
    equation = "in = kept + Σ dropped by reason, of documents and of lines"

    def __post_init__(self) -> None:
        def require(fine: bool, name: str, rule: str) -> None:
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r}: must {rule}")

        shares = ("language_confidence", "max_symbols", "min_alphabetic", "max_duplicate_lines", "max_top_bigram")
        for name in (*shares, "max_unknown"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, name, "be a share, from 0 to 1")
        for name in ("characters", "word_length", "perplexity"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            require(low is None or low >= 0, f"min_{name}", "not be negative")
            require(high is None or high >= (low or 0), f"max_{name}", f"be at least min_{name}={low}")
        for name in ("ngram", "permutations", "bands", "benchmark_shortest", "model_characters", "shard_bytes"):
            require(getattr(self, name) >= 1, name, "be at least 1")
        require(self.permutations % self.bands == 0, "bands", f"divide permutations={self.permutations}")
        require(0 < self.similarity <= 1, "similarity", "be above 0 and at most 1")
        shortest = self.benchmark_shortest
        require(shortest <= self.benchmark_ngram, "benchmark_ngram", f"be at least benchmark_shortest={shortest}")
        unknown = set(self.clean) - set(CLEANING)
        require(not unknown, "clean", f"name rules out of {', '.join(CLEANING)}")
        require(
            bool(self.classes) == bool(self.classifier_model), "classes", "be given with classifier_model, and only so"
        )
        band = self.min_perplexity is not None or self.max_perplexity is not None
        require(
            band == bool(self.perplexity_model),
            "perplexity_model",
            "be given with a bound of the perplexity, and only so",
        )
        require(1 <= self.min_score <= 5, "min_score", "be from 1 to 5")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, other in BESIDE.items():
            given = getattr(self, name) == defaults[name] or getattr(self, other) not in (None, False)
            require(given, name, f"be left out with {other}={getattr(self, other)!r}, without which nothing reads it")
        asks = any(getattr(self, name) for name in MODELS) or self.model_characters == defaults["model_characters"]
        require(asks, "model_characters", f"be left out where no model is asked ({', '.join(MODELS)})")
