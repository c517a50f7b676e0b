"""Sequence-to-sequence learning by an encoder and a decoder: summaries, answers, or a text from its noised form.

Rows have two fields. With `denoise` they are made from any text as in BART's pretraining (arXiv 1910.13461): sentences
are permuted, spans of Poisson(λ) tokens become one mask each until a share of the tokens is masked, and some masks are
random tokens. With `spans` they are made as in T5's pretraining (arXiv 1910.10683): every span becomes a sentinel, and
the target is the sentinels, each followed by its span. A row is noised once, by its number.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, LEDConfig, T5Config

from fathom.cost.encoders import memory_bytes, seq2seq_flops
from fathom.data import DataConfig, PreparedData, Source, token_byte_lengths
from fathom.data.packing import IGNORED
from fathom.data.prepared import cache_key, make_tokenizer
from fathom.models.device import device_of
from fathom.models.encoder_configs import FathomBartConfig, FathomLongT5Config
from fathom.models.method import check_number, check_range
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.causal_lm import bits_of_loss, unigram
from fathom.tasks.encoders import EncoderTask, counted_flops, encode_row, is_own, padded

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # T5's, by their names there
BATCH = 16  # sources that are answered at once
SAMPLES = 3
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@register_task("seq2seq")
@dataclass(frozen=True)
class Seq2Seq(EncoderTask):
    """Options:

    source_field, target_field: fields of a row.
    target_tokens: the most tokens of a target, its end included.
    label_smoothing: of the training loss; scores are computed without it.
    answers: number of held-out rows, from the first on, that are answered for ROUGE.
    beams: of the search for an answer.
    denoise: make rows from text: the source is noised text, the target the text itself.
    mask_share: share of the tokens that is masked.
    poisson: λ, the mean length of a masked span.
    random_share: share of the masks that are random tokens.
    permute_sentences: sentences of a source change places.
    spans: T5's noise: `mask_share` of the tokens, in spans of `poisson` tokens on average, are the target.
    """

    source_field: str = "source"
    target_field: str = "target"
    target_tokens: int = 64
    label_smoothing: float = 0.0
    answers: int = 64
    beams: int = 1
    denoise: bool = False
    mask_share: float = 0.3
    poisson: float = 3.5
    random_share: float = 0.1
    permute_sentences: bool = True
    spans: bool = False

    families: ClassVar[dict[str, Any]] = {
        "bart": FathomBartConfig, "longt5": FathomLongT5Config, "led": LEDConfig, "t5": T5Config,
    }  # fmt: skip
    auto = AutoModelForSeq2SeqLM
    specials = ("pad", "mask")
    summary = "Write a target for a source, by an encoder and a decoder."
    scores = (
        Score(
            "target_bits_per_byte",
            "bits per byte of targets",
            "lower",
            "The loss of the held-out targets in bits, their end tokens included, over the bytes of the targets.",
        ),
        *(
            Score(f"rouge{kind}", f"ROUGE-{kind}", "higher", f"ROUGE-{kind} (F₁, stemmed, rouge-score) of answers.")
            for kind in ("1", "2", "L")
        ),
    )
    held_out = "held-out rows"
    loss_unit = "nats per target token"
    answer = "source and target"
    cost_heading = "FLOPs per example"
    reference_name = "unigram"
    reference_note = "The unigram model knows only how often each token occurs in targets."
    samples_note = "Answers to the first held-out sources"

    def __post_init__(self) -> None:
        check_range("task seq2seq", "target_tokens", self.target_tokens, 2)
        check_range("task seq2seq", "answers", self.answers, 1)
        check_range("task seq2seq", "beams", self.beams, 1)
        check_number("task seq2seq", "label_smoothing", self.label_smoothing, 0, 1)
        check_number("task seq2seq", "mask_share", self.mask_share, 0, 1)
        check_number("task seq2seq", "random_share", self.random_share, 0, 1)
        check_number("task seq2seq", "poisson", self.poisson, 0)
        if self.spans and not self.denoise:
            raise ValueError("task.spans=true: it is noise of texts; use it with denoise: true")
        if self.spans and not (0 < self.mask_share < 1 and self.poisson >= 1):
            raise ValueError(
                f"task.mask_share={self.mask_share!r}, poisson={self.poisson!r}: spans need a share between 0 and 1, "
                "and at least one token on average"
            )

    @property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return SENTINELS if self.spans else ()

    def check(self, data: DataConfig) -> None:
        super().check(data)
        if importlib.util.find_spec("rouge_score") is None:
            raise ImportError("task 'seq2seq' scores answers with rouge-score: pip install 'fathom-lm[rouge]'")
        if not self.denoise:
            self.refuse_text(data)

    def defaults(self, kind, found, data):
        ends = {"decoder_start_token_id": found.get("eos_token_id")} if found.get("eos_token_id") is not None else {}
        positions = max(data.block_size, self.target_tokens)
        if kind is T5Config:
            return {"decoder_start_token_id": found.get("pad_token_id", 0)}
        if kind is LEDConfig:
            sizes = {"max_encoder_position_embeddings": positions, "max_decoder_position_embeddings": positions}
            return {**ends, **sizes}
        if kind is FathomLongT5Config:
            return ends
        return {**ends, "max_position_embeddings": positions, "forced_eos_token_id": found.get("eos_token_id")}

    def example_flops(self, config, block_size):
        if is_own(config):
            return seq2seq_flops(config, block_size, self.target_tokens)
        return counted_flops(self.auto, config, block_size, self.target_tokens)

    def cache_bytes(self, config, block_size, dtype):
        return memory_bytes(config, block_size, dtype) if is_own(config) else 0.0

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        field = data.text_field
        train, held_out = self.sources(data, field)
        names = [self.source_field, self.target_field, self.denoise]
        tokenizer = make_tokenizer(
            data, lambda: self._texts(train), lambda: cache_key(train.content_hash(), *map(str, names)), cache
        )
        tokenizer = self.with_specials(tokenizer)
        pad, mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        options = [*self.section.values(), pad, mask]

        def rows(text: Source) -> datasets.Dataset:
            return self.kept(
                text, tokenizer, cache, options, data, lambda: self._rows(text, tokenizer, data, pad, mask)
            )

        training, validation = rows(train), None if held_out is None else rows(held_out)
        targets = size = 0
        if validation is not None:
            kept = validation["labels"][:]
            kept = kept[kept != IGNORED]
            targets, size = len(kept), int(token_byte_lengths(tokenizer)[kept].sum())
        return PreparedData(training, validation, tokenizer, targets, size)

    def _texts(self, source: Source) -> Iterator[str]:
        if self.denoise:
            yield from source.documents()
            return
        for row, where in source.rows():
            yield "\n".join(self._pair(row, where))

    def _pair(self, row: dict[str, Any], where: str) -> tuple[str, str]:
        for option in ("source_field", "target_field"):
            name = getattr(self, option)
            if not isinstance(row.get(name), str):
                raise ValueError(
                    f"{where}: no text in field {name!r} (found: {', '.join(row) or 'none'}); set task.{option}"
                )
        return row[self.source_field], row[self.target_field]

    def _rows(
        self, source: Source, tokenizer: Any, data: DataConfig, pad: int, mask: int
    ) -> Iterator[dict[str, list[int]]]:
        """Sources and targets as ids, padded, targets with their end."""
        end, size = tokenizer.eos_token_id, data.block_size
        pairs: Iterator[tuple[list[int], list[int]]]
        if self.denoise:
            pairs = self._noised(source, tokenizer, size, mask)
        else:
            pairs = (
                (encode_row([a], tokenizer, size)[0], encode_row([b], tokenizer, self.target_tokens - 1)[0])
                for a, b in (self._pair(row, where) for row, where in source.rows())
            )
        for ids, target in pairs:
            if ids and target:
                yield {
                    "input_ids": padded(ids, size, pad),
                    "attention_mask": padded([1] * len(ids), size, 0),
                    "labels": padded([*target[: self.target_tokens - 1], end], self.target_tokens, IGNORED),
                }

    def _noised(self, source: Source, tokenizer: Any, size: int, mask: int) -> Iterator[tuple[list[int], list[int]]]:
        """Whole sentences of a document up to a source's and a target's tokens, noised, and what restores them."""
        room, number = (size if self.spans else min(size, self.target_tokens - 1)), 0
        sentinels = tokenizer.convert_tokens_to_ids(list(self.markers))
        special = set(tokenizer.all_special_ids)
        ordinary = np.array([token for token in range(len(tokenizer)) if token not in special])
        for document in source.documents():
            held: list[list[int]] = []
            for ids in [*encode_row([s + " " for s in _SENTENCE.split(document)], tokenizer, room), None]:
                if held and (ids is None or sum(map(len, held)) + len(ids) > room):
                    random = np.random.default_rng([0, number])
                    number += 1
                    text = list(itertools.chain(*held))
                    if self.spans:
                        yield self.span_noise(text, random, sentinels)
                    else:
                        yield self.noise(held, random, mask, ordinary), text
                    held = []
                held += [ids] if ids else []

    def noise(
        self, sentences: list[list[int]], random: np.random.Generator, mask: int, ordinary: np.ndarray
    ) -> list[int]:
        """The sentences in another order, with each masked span as one mask. A span of no tokens inserts a mask."""
        order = random.permutation(len(sentences)) if self.permute_sentences else range(len(sentences))
        ids = [token for index in order for token in sentences[index]]
        left = round(self.mask_share * len(ids))
        hidden, before = np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
        while left > 0:
            length = min(int(random.poisson(self.poisson)), left)
            start = int(random.integers(len(ids)))
            before[start] = True  # where a mask stands
            hidden[start : start + length] = True
            left -= max(length, 1)
        found = []
        for place, token in enumerate(ids):
            if before[place]:
                found.append(int(random.choice(ordinary)) if random.random() < self.random_share else mask)
            if not hidden[place]:
                found.append(token)
        return found

    def span_noise(
        self, text: list[int], random: np.random.Generator, sentinels: list[int]
    ) -> tuple[list[int], list[int]]:
        """The text with a sentinel for every span, and the sentinels each followed by its span.

        The numbers of masked tokens and of spans are fixed; beginnings and lengths are drawn, all divisions being
        equally likely. A text begins with an unmasked token, so that spans and the text between them alternate. A text
        of one token has no span.
        """
        masked = min(max(1, round(self.mask_share * len(text))), len(text) - 1)
        count = min(max(1, round(masked / self.poisson)), len(sentinels), masked, len(text) - masked)
        if count < 1:
            return text, []

        def parts(total: int) -> list[int]:
            """`count` lengths of at least 1 that make the total."""
            cuts = sorted(random.choice(total - 1, size=count - 1, replace=False) + 1)
            return np.diff([0, *cuts, total]).tolist()

        source, target, at = [], [], 0
        for sentinel, kept, hidden in zip(sentinels, parts(len(text) - masked), parts(masked), strict=False):
            source += [*text[at : at + kept], sentinel]
            target += [sentinel, *text[at + kept : at + kept + hidden]]
            at += kept + hidden
        return source, target

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        from rouge_score.rouge_scorer import RougeScorer

        values: dict[str, float | None] = dict.fromkeys((score.name for score in self.scores), None)
        if loss is None:
            return values
        assert data.validation is not None
        model = self.auto.from_pretrained(checkpoint)
        model.eval().to(device_of())
        names = [score.name for score in self.scores[1:]]
        scorer = RougeScorer(names, use_stemmer=True)
        rows = range(min(self.answers, len(data.validation)))
        found = [scorer.score(sample.expected, sample.text) for sample in self._answers(model, data, rows)]
        rouge = {name: sum(one[name].fmeasure for one in found) / len(found) for name in names}
        return {**values, "target_bits_per_byte": bits_of_loss(data, loss), **rouge}

    @torch.no_grad()
    def _answers(self, model: Any, data: PreparedData, rows: Any) -> Iterator[Sample]:
        for some in _batched(rows, BATCH):
            batch = self.collate([data.validation[i] for i in some])  # type: ignore[index]
            given = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            out = model.generate(**given, max_new_tokens=self.target_tokens, num_beams=self.beams, do_sample=False)
            for ids, mask, said, labels in zip(*(batch[n] for n in given), out, batch["labels"], strict=True):
                texts = [ids[mask.bool()], said, labels[labels != IGNORED]]
                yield Sample(*(str(data.tokenizer.decode(x, skip_special_tokens=True)) for x in texts))

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        seen, targets = data.train["labels"][:sequences], data.validation["labels"][:]  # type: ignore[index]
        return unigram(data, seen[seen >= 0], targets[targets >= 0])

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        assert data.validation is not None
        return list(self._answers(model, data, range(min(SAMPLES, len(data.validation)))))


def _batched(rows: Any, size: int) -> Iterator[list[int]]:
    rows = list(rows)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
