"""Descriptions of tables, written by an encoder and a decoder, with few labelled pairs (`fathom.tables.text`).

A row has a table, `{"table": [[key, value], …]}` or `{"header": …, "rows": …, "caption": …, "highlights": …,
"background": …}`, and its description, `text` or `references`. Every row is prepared once with all parts that a method
may read beside the table: the reference's plan, a planner's plan, prototypes, background. A method of the section
`table` says which of these parts its model reads; the others are removed from its source.

Stage "knowledge" trains the knowledge adapter alone, on sentences of `corpus` with the table's words masked. Its
checkpoint is what recipes of the last stage start from: methods without an adapter leave it out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from fathom.data import DataConfig, PreparedData, Source, load_tokenizer, token_byte_lengths
from fathom.data.packing import IGNORED
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.device import device_of
from fathom.models.method import check_range
from fathom.tables.text.base import SlotMethod
from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableT5Config
from fathom.tables.text.ctrlscitab import GRID_MARKERS, query, source_parts
from fathom.tables.text.linearize import (
    GOLD_PLAN,
    MARKERS,
    PLAN,
    PROTOTYPES,
    TABLE,
    Grid,
    Table,
    TableLinearizer,
    references_of_row,
    sentences,
    table_of_row,
    words,
)
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.causal_lm import bits_of_loss, unigram
from fathom.tasks.encoders import EncoderTask, counted_flops, padded

BATCH = 16  # tables that are described at once
SAMPLES = 3
SHARED = (  # options that a model's config keeps, so that its sources have the same form later
    "prefix", "table_tokens", "plan_tokens", "prototype_tokens", "source_tokens", "plan_item", "sentences",
    "sentence_tokens", "strip_stopwords", "query_for_train", "candidates", "retriever",
)  # fmt: skip
NO_PART = 255  # of padding
OF_METHODS = ("auto", "none", "oracle", "prototype", "prefix", "free_prefix", 0)  # what a method may say for itself
NEEDED = {"bm25s": "finds prototypes", "sacrebleu": "scores descriptions", "rouge_score": "scores descriptions"}


@dataclass(frozen=True)
class Row:
    """A table with its descriptions. where: its file and line, for messages."""

    table: Table | Grid
    references: tuple[str, ...]
    where: str

    @property
    def slots(self) -> Table:
        return self.table.slots() if isinstance(self.table, Grid) else self.table


@dataclass(frozen=True)
class Descriptions(PreparedData):
    """Examples, the held-out rows behind them, and the folder of every trained part by its role (`kept.py`)."""

    rows: tuple[Row, ...] = ()
    kept: dict[str, Path] = dataclasses.field(default_factory=dict)


@register_task("table_to_text")
@dataclass(frozen=True)
class TableToText(EncoderTask):
    """Options:

    stage: "describe" trains on descriptions; "knowledge" the adapter alone, on the corpus.
    prefix: text before every source, such as "translate Table to Text: " for T5.
    corpus: text or JSONL file, or folder: sentences of the domain, for prototypes and for the stage knowledge.
    table_tokens: the most tokens of a table; a table that is cut loses its last slots, planned or not.
    plan_tokens: the most tokens of a plan, five for each item.
    prototypes, prototype_tokens: number of corpus sentences in a source, and the most tokens of each.
    source_tokens: the most tokens of a source made from a table of rows, and of a masked sentence.
    target_tokens: the most tokens of a description, its end included.
    plan_item: how a planned slot is written: key, value or key_value.
    planner: how plans are made for methods with a planner; "auto": the pointer below 500 pairs, else the CRF.
    planner_model, planner_steps: its encoder, a folder or hub name (none: a small one from scratch), and its steps.
    selector: how prototypes are sorted: bm25, or trained, a reranker that learns from the pairs.
    selector_model, selector_steps: its encoder, like the planner's, and training steps.
    retriever: how background is chosen: tsdae, tfidf, cross_encoder, random, oracle or none.
    retriever_model, retriever_steps: its encoder, like the planner's, and training steps.
    sentences: number of background sentences in a source.
    sentence_tokens: the most tokens of each; none: only the end of the source cuts them.
    strip_stopwords: background sentences without their stop words.
    query_for_train: "oracle" puts references into the queries of training rows, as CTRLSciTab's released code does.
    knowledge: what is masked in the stage "knowledge": table_values, random_span or entity.
    knowledge_with_table: put the table before the masked sentence.
    mask_unit, mask_source: one mask for a run of table words or for each word; of values or of values+keys.
    candidates: number of corpus sentences found for each table.
    answers: number of held-out rows, from the first on, that are described for the scores.
    beams, no_repeat: of the search; no n-gram of `no_repeat` tokens may occur twice (0: no such rule).
    """

    stage: Literal["describe", "knowledge"] = "describe"
    prefix: str = ""
    corpus: str | None = None
    table_tokens: int = 300
    plan_tokens: int = 60
    prototypes: int = 3
    prototype_tokens: int = 50
    source_tokens: int = 512
    target_tokens: int = 90
    plan_item: Literal["key", "value", "key_value"] = "key"
    planner: Literal["auto", "pointer", "crf", "seq2seq", "none"] = "auto"
    planner_model: str | None = None
    planner_steps: int = 1000
    selector: Literal["bm25", "trained"] = "bm25"
    selector_model: str | None = None
    selector_steps: int = 1000
    retriever: Literal["tsdae", "tfidf", "cross_encoder", "random", "oracle", "none"] = "tsdae"
    retriever_model: str | None = None
    retriever_steps: int = 1000
    sentences: int = 3
    sentence_tokens: int | None = None
    strip_stopwords: bool = False
    query_for_train: Literal["plain", "oracle"] = "plain"
    knowledge: Literal["table_values", "random_span", "entity"] = "table_values"
    knowledge_with_table: bool = False
    mask_unit: Literal["run", "word"] = "run"
    mask_source: Literal["values", "values+keys"] = "values"
    candidates: int = 100
    answers: int = 64
    beams: int = 1
    no_repeat: int = 0

    families: ClassVar[dict[str, Any]] = {"t5": FathomTableT5Config, "bart": FathomTableBartConfig}
    auto = AutoModelForSeq2SeqLM
    specials = ("pad",)
    unused = (*EncoderTask.unused, "text_field")
    markers = (*MARKERS, *GRID_MARKERS)
    checkpoint_fields = ("table",)
    summary = "Describe a table, by an encoder and a decoder that may read a plan, prototypes or background beside it."
    scores = (
        Score(
            "target_bits_per_byte",
            "bits per byte of descriptions",
            "lower",
            "The loss of the held-out descriptions in bits, their end tokens included, over the bytes of the "
            "descriptions.",
        ),
        Score("bleu", "BLEU", "higher", "BLEU-4 over all references (sacrebleu, 13a), 0 to 100."),
        Score("rouge4", "ROUGE-4", "higher", "F₁ of 4-grams, the best over references (rouge-score, stemmed)."),
        Score("meteor", "METEOR", "higher", "METEOR with the stages exact and stem, the best over references."),
        Score("parent_f", "PARENT-F", "higher", "F of PARENT, λ = ½, the best over references."),
        Score(
            "coverage",
            "of cells covered",
            "higher",
            "The share of the highlighted cells, or of the slots, that a description mentions.",
        ),
        Score(
            "off_target",
            "of mentioned cells off target",
            "lower",
            "The share of the mentioned cells that are not highlighted; 0 where none is mentioned, or all are wanted.",
        ),
        Score(
            "number_precision",
            "of numbers supported",
            "higher",
            "The share of a description's numbers that the table has or one step makes; a text without numbers has 1.",
        ),
        Score(
            "plan_adherence",
            "of the plan kept",
            "higher",
            "The share of the slots of the first reference that a description tells in its order; no slots count 1.",
        ),
        Score("distinct_2", "distinct bigrams", "higher", "Distinct bigrams over words, the mean over descriptions."),
    )
    held_out = "held-out tables"
    loss_unit = "nats per target token"
    answer = "source and description"
    cost_heading = "FLOPs per description"
    reference_name = "unigram"
    reference_note = "The unigram model knows only how often each token occurs in descriptions."
    samples_note = "Descriptions of the first held-out tables"

    def __post_init__(self) -> None:
        least = {"target_tokens": 2, "no_repeat": 0, "prototypes": 0, "plan_tokens": 0}
        for field in dataclasses.fields(self):
            if field.type == "int":
                check_range("task table_to_text", field.name, getattr(self, field.name), least.get(field.name, 1))
        for name, known in (
            ("stage", ("describe", "knowledge")), ("plan_item", ("key", "value", "key_value")),
            ("planner", ("auto", "pointer", "crf", "seq2seq", "none")), ("selector", ("bm25", "trained")),
            ("retriever", ("tsdae", "tfidf", "cross_encoder", "random", "oracle", "none")),
            ("query_for_train", ("plain", "oracle")), ("knowledge", ("table_values", "random_span", "entity")),
            ("mask_unit", ("run", "word")), ("mask_source", ("values", "values+keys")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"task.{name}={getattr(self, name)!r}: use {', '.join(known)}")

    def check(self, data: DataConfig) -> None:
        super().check(data)
        self.refuse_text(data)
        for package, use in NEEDED.items():
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"task 'table_to_text' {use} with {package}: pip install 'fathom-lm[tables]'")
        if self.stage == "knowledge" and self.corpus is None:
            raise ValueError("task.corpus=null: the stage 'knowledge' learns from its sentences; name a file")

    # -- the model ---------------------------------------------------------------------------------------------------

    def model_config(self, fields, data, tokenizer):
        if "checkpoint" in fields and tokenizer is None and isinstance(data.tokenizer, str):
            tokenizer = self.with_specials(load_tokenizer(data.tokenizer))
        config = super().model_config(fields, data, tokenizer)
        if "checkpoint" in fields and tokenizer is not None:
            config.vocab_size = max(config.vocab_size, len(tokenizer))  # rows for the markers
        if self.stage == "knowledge":
            config.table = {**config.table, "trains": "knowledge"}
        self._check_method(config.method)
        shared = {name: getattr(self, name) for name in config.table if name in SHARED}
        config.table = {**config.table, **shared}  # so that `fathom table describe` makes sources of the same form
        return config

    def _check_method(self, method: Any) -> None:
        """Raise ValueError for a method that reads what this task has not prepared."""
        name = method.name
        for field in dataclasses.fields(method):  # what both have, the task has done to the rows
            value, ours = getattr(method, field.name), getattr(self, field.name, None)
            if hasattr(self, field.name) and value not in (field.default, ours, *OF_METHODS):
                raise ValueError(
                    f"table.{field.name}={value!r} of method {name!r}: its rows have task.{field.name}={ours!r}; make "
                    "them equal"
                )
        if not isinstance(method, SlotMethod):
            if method.background and self.retriever == "none":
                raise ValueError(f"task.retriever='none': method {name!r} reads background; name a retriever")
            return
        if self.stage == "describe" and method.prototypes and self.corpus is None:
            raise ValueError(f"task.corpus=null: method {name!r} reads prototypes; name a file of sentences")
        if method.prototypes > self.prototypes:
            raise ValueError(
                f"table.prototypes={method.prototypes} of method {name!r}: task.prototypes={self.prototypes}"
            )
        if method.plans and method.planner != "oracle" and self.planner == "none":
            raise ValueError(f"task.planner='none': method {name!r} reads plans; name a planner")

    def sections(self, config):
        return {"table": config.table}

    def defaults(self, kind, found, data):
        start = "eos_token_id" if kind is FathomTableBartConfig else "pad_token_id"
        fields = {"decoder_start_token_id": found.get(start, 0)}  # 0: there is no tokenizer yet, as for `fathom cost`
        positions = max(self.room_of_all, self.target_tokens)
        if kind is FathomTableBartConfig:
            fields |= {"max_position_embeddings": positions, "forced_eos_token_id": found.get("eos_token_id")}
        return fields

    # -- how long sources are ----------------------------------------------------------------------------------------

    @property
    def room_of_all(self) -> int:
        prototypes = self.prototypes * self.prototype_tokens if self.corpus is not None else 0
        return max(self.source_tokens, self.table_tokens + self.plan_tokens + prototypes)

    def room(self, config: Any) -> int:
        """The most tokens of a source that a method reads, to which a batch is padded."""
        method = config.method
        if not isinstance(method, SlotMethod):
            return self.source_tokens
        if self.stage == "knowledge":
            return self.source_tokens
        plan = self.plan_tokens if method.plans else 0
        return self.table_tokens + plan + method.prototypes * self.prototype_tokens

    def example_flops(self, config, block_size):
        """FLOPs of an example with the longest source that the method can read; `block_size` does not matter."""
        return counted_flops(self.auto, config, self.room(config), self.target_tokens)

    # -- examples ----------------------------------------------------------------------------------------------------

    def prepare(self, data: DataConfig, cache_dir: Path) -> Descriptions:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self.sources(data)
        rows = list(self._rows(train))
        others = () if held_out is None else tuple(self._rows(held_out))
        corpus, dropped = self._corpus(others)
        hashes = [source.content_hash() for source in (train, held_out, self._corpus_source()) if source is not None]
        tokenizer = make_tokenizer(
            data, lambda: self._texts(rows, corpus), lambda: cache_key(*hashes, "table_to_text"), cache
        )
        tokenizer = self.with_specials(tokenizer)
        prompts = Prompts(self, tokenizer, rows, others, corpus, cache, hashes)

        def kept(source: Source, some: Sequence[Row], training: bool) -> datasets.Dataset:
            options = [*map(str, self.section.values()), tokenizer.pad_token_id, *hashes, training]
            return self.kept(
                source, tokenizer, cache, options, data, lambda: self._examples(some, prompts, data, training)
            )

        training = kept(train, rows, True)
        validation = None if held_out is None else kept(held_out, others, False)
        targets = size = 0
        if validation is not None:
            labels = validation["labels"][:]
            labels = labels[labels != IGNORED]
            targets, size = len(labels), int(token_byte_lengths(tokenizer)[labels].sum())
        notes = (
            [] if not dropped else [f"{dropped} sentences of the corpus are held-out descriptions and were left out."]
        )
        cut = sum(
            len(prompts.linearizer.plain(prompts.linearizer.text(row.slots))) > self.table_tokens
            for row in rows
            if isinstance(row.table, Table)
        )
        if cut:
            notes.append(
                f"{cut} of {len(rows)} training tables are longer than table_tokens={self.table_tokens} and cut."
            )
        return Descriptions(
            training, validation, tokenizer, targets, size, notes=tuple(notes), rows=others, kept=prompts.kept
        )

    def _rows(self, source: Source) -> Iterator[Row]:
        for row, where in source.rows():
            yield Row(table_of_row(row, where), references_of_row(row, where), where)

    def _corpus_source(self) -> Source | None:
        return None if self.corpus is None else Source(self.corpus, argument="task.corpus")

    def _corpus(self, held_out: Sequence[Row]) -> tuple[list[str], int]:
        """The sentences of the corpus, and how many were left out because they are held-out descriptions."""
        source = self._corpus_source()
        if source is None:
            return [], 0
        found = [s for text in source.documents() for line in text.splitlines() for s in sentences(line)]
        barred = {tuple(words(text)) for row in held_out for text in row.references}
        kept = [text for text in found if tuple(words(text)) not in barred]
        return kept, len(found) - len(kept)

    def _texts(self, rows: Sequence[Row], corpus: Sequence[str]) -> Iterator[str]:
        for row in rows:
            yield "\n".join([*(f"{key} is {value} ;" for key, value in row.slots.slots), *row.references])
        yield from corpus

    def _examples(
        self, rows: Sequence[Row], prompts: Prompts, data: DataConfig, training: bool
    ) -> Iterator[dict[str, list[int]]]:
        """Sources of all parts and targets as ids, padded. Training rows come once for each reference."""
        tokenizer, size = prompts.tokenizer, data.block_size
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        pairs = prompts.knowledge(rows) if self.stage == "knowledge" else prompts.described(rows, training)
        for parts, text, where in pairs:
            ids = [token for _, some in parts for token in some]
            if len(ids) > size:
                raise ValueError(
                    f"{where}: its source and all that may be read beside it have {len(ids)} tokens, data.block_size="
                    f"{size}; give at least {len(ids)}, or fewer table_tokens, prototype_tokens or source_tokens"
                )
            numbers = [part for part, some in parts for _ in some]
            target = prompts.linearizer.plain(text)[: self.target_tokens - 1]
            yield {
                "input_ids": padded(ids, size, pad),
                "parts": padded(numbers, size, NO_PART),
                "labels": padded([*target, end], self.target_tokens, IGNORED),
            }

    def selected(self, batch: dict[str, Tensor], config: Any, training: bool) -> dict[str, Tensor]:
        """The parts of a batch's sources that a method's model reads, closed up and padded on the right."""
        method, parts = config.method, batch["parts"]
        known = TABLE if self.stage == "knowledge" else None
        reads = (known,) if known is not None else method.parts(training)
        keep = torch.zeros_like(parts, dtype=torch.bool)
        for part in reads:
            keep |= parts == part
        if training and getattr(method, "plan_noise", 0) > 0 and GOLD_PLAN in reads:
            noisy = torch.rand(len(parts), 1, device=parts.device) < method.plan_noise
            keep = torch.where(noisy, (keep & (parts != GOLD_PLAN)) | (parts == PLAN), keep)
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)[:, : self.room(config)]
        keep = keep.gather(1, order)
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        return {
            "input_ids": batch["input_ids"].gather(1, order).where(keep, pad),
            "attention_mask": keep.long(),
            "parts": parts.gather(1, order).where(keep, NO_PART),
        }

    # -- training and scores -----------------------------------------------------------------------------------------

    def forward(self, model: Any, **batch: Any) -> Any:
        config = getattr(model, "module", model).config
        labels, items = batch["labels"], batch.get("num_items_in_batch")
        given = self.selected(batch, config, model.training)
        out = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], labels=labels)
        losses = F.cross_entropy(
            out.logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        weight = getattr(config.method, "content_aware", 0.0)
        if model.training and weight > 0:
            losses = losses + weight * unlikelihood(out.logits, labels, given)
        out["loss"] = losses / (self.targets({"labels": labels}).clamp(min=1) if items is None else items)
        return out

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        values: dict[str, float | None] = dict.fromkeys((score.name for score in self.scores), None)
        if loss is None:
            return values
        assert isinstance(data, Descriptions) and data.validation is not None
        model = self.auto.from_pretrained(checkpoint)
        for role, folder in data.kept.items():  # what it describes with later
            if reads(model.config.method, role):
                shutil.copytree(folder, checkpoint / role, dirs_exist_ok=True)
        model.eval().to(device_of())
        count = min(self.answers, len(data.validation))
        said = [sample.text for sample in self._answers(model, data, count)]
        values |= {"target_bits_per_byte": bits_of_loss(data, loss)}
        return values | (description_scores(said, data.rows[:count]) if self.stage == "describe" else {})

    @torch.no_grad()
    def _answers(self, model: Any, data: PreparedData, count: int) -> Iterator[Sample]:
        assert data.validation is not None
        for start in range(0, count, BATCH):
            some = range(start, min(start + BATCH, count))
            batch = self.collate([data.validation[i] for i in some])
            labels = batch["labels"]
            given = self.selected(batch, model.config, training=False)
            given = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
            out = model.generate(
                **given, max_new_tokens=self.target_tokens, num_beams=self.beams, do_sample=False,
                no_repeat_ngram_size=self.no_repeat,
            )  # fmt: skip
            for ids, mask, found, right in zip(given["input_ids"], given["attention_mask"], out, labels, strict=True):
                texts = [ids[mask.bool()], found, right[right != IGNORED]]
                prompt, text, expected = (
                    str(data.tokenizer.decode(x, skip_special_tokens=i > 0)) for i, x in enumerate(texts)
                )
                yield Sample(prompt, text, expected)

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        seen, targets = data.train["labels"][:sequences], data.validation["labels"][:]  # type: ignore[index]
        return unigram(data, seen[seen >= 0], targets[targets >= 0])

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        assert data.validation is not None
        return list(self._answers(model, data, min(SAMPLES, len(data.validation))))


class Prompts:
    """The parts of sources beside tables. Trained ones learn from the training rows on first use."""

    def __init__(
        self, task: TableToText, tokenizer: Any, rows: Sequence[Row], held_out: Sequence[Row], corpus: Sequence[str],
        cache: Path, hashes: Sequence[str],
    ):  # fmt: skip
        self.task, self.tokenizer, self.corpus = task, tokenizer, corpus
        self.held_out = [text for row in held_out for text in (*row.references, *_background(row))]
        self.pairs = [(row.table, text) for row in rows for text in row.references if isinstance(row.table, Table)]
        key = cache_key(*map(str, task.section.values()), tokenizer_hash(tokenizer), *hashes)
        describes = task.stage == "describe"
        learned: dict[str, Any] = {
            "planner": describes and self.pairs and task.planner != "none",
            "selector": describes and self.pairs and corpus and task.prototypes and task.selector == "trained",
        }
        self.grids = [(row.table, row.references[0]) for row in rows if isinstance(row.table, Grid)]
        learned["retriever"] = describes and self.grids and task.retriever in ("tsdae", "cross_encoder")
        self.kept = {role: cache / f"{role}-{key}" for role, wanted in learned.items() if wanted}
        self.linearizer = TableLinearizer(
            tokenizer, task.prefix, task.table_tokens, prototype_tokens=task.prototype_tokens, plan_item=task.plan_item
        )

    def described(self, rows: Sequence[Row], training: bool) -> Iterator[tuple[list[tuple[int, list[int]]], str, str]]:
        """(parts, description, place) of every row; a training row gives one for each reference."""
        for row in rows:
            for text in row.references if training else row.references[:1]:
                parts = self._grid(row.table, text, training) if isinstance(row.table, Grid) else self._slots(row, text)
                yield parts, text, row.where

    def knowledge(self, rows: Sequence[Row]) -> Iterator[tuple[list[tuple[int, list[int]]], str, str]]:
        """(the masked sentence, the sentence, place) of the sentences found for the rows' tables."""
        from fathom.tables.text.knowledge import knowledge_pairs

        task, where = self.task, "task.corpus"
        found = ((row.slots, self.candidates.find(row.slots, task.candidates, row.references)) for row in rows)
        for table, masked, text in knowledge_pairs(found, task.knowledge, task.mask_unit, task.mask_source):
            before = self.linearizer.table(table) if task.knowledge_with_table else []
            yield [(TABLE, [*before, *self.linearizer.ids(masked)][: task.source_tokens])], text, where

    @functools.cached_property
    def candidates(self) -> Any:
        from fathom.tables.text.prototypes import Candidates

        return Candidates(self.corpus)

    def _learned(self, role: str, make: Callable[[], Any]) -> Any:
        """The trained part of a role, made once for these rows and options and then loaded."""
        from fathom.tables.text.kept import keep, load_kept

        build_once(self.kept[role], lambda work: keep(make(), work))
        return load_kept(self.kept[role])

    @functools.cached_property
    def selector(self) -> Any:
        from fathom.tables.text.prototypes import PrototypeSelector
        from fathom.tables.text.stages import Stage

        task = self.task

        def make() -> PrototypeSelector:
            selector = PrototypeSelector(task.selector_model, self.tokenizer)
            examples = [(t, text, self.candidates.find(t, task.candidates, [text])) for t, text in self.pairs]
            rate = 2e-5 if task.selector_model else 1e-3
            selector.fit(examples, Stage(steps=task.selector_steps, batch_size=4, lr=rate, warmup=100))
            return selector

        return self._learned("selector", make)

    @functools.cached_property
    def planner(self) -> Any:
        from fathom.tables.text.generator import make_planner

        task = self.task
        return self._learned(
            "planner",
            lambda: make_planner(task.planner, self.pairs, self.tokenizer, task.planner_model, task.planner_steps),
        )

    @functools.cached_property
    def retriever(self) -> Any:
        from fathom.tables.text.retrieval import make_retriever

        task = self.task

        def make() -> Any:
            return make_retriever(
                task.retriever, [grid for grid, _ in self.grids], [text for _, text in self.grids],
                self.tokenizer, task.retriever_model, task.retriever_steps, task.query_for_train, self.held_out,
            )  # fmt: skip

        return self._learned("retriever", make) if "retriever" in self.kept else make()

    def _slots(self, row: Row, text: str) -> list[tuple[int, list[int]]]:
        from fathom.tables.text.plan import gold_plan

        table, lines, task = row.slots, self.linearizer, self.task
        parts = [
            (TABLE, lines.table(table)),
            (GOLD_PLAN, lines.plan(table, gold_plan(table, text))),
        ]
        if task.planner != "none":
            (plan,) = self.planner.predict([table])
            parts.append((PLAN, lines.plan(table, plan)))
        if task.prototypes and self.corpus:
            found = self.candidates.find(table, task.candidates, row.references)
            if task.selector == "trained":
                found = self.selector.rank(table, found)
            parts.append((PROTOTYPES, lines.prototypes(found[: task.prototypes])))
        return parts

    def _grid(self, grid: Grid, text: str, training: bool) -> list[tuple[int, list[int]]]:
        task = self.task
        chosen: list[str] = []
        if task.retriever != "none" and grid.background:
            oracle = task.retriever == "oracle" or (training and task.query_for_train == "oracle")
            asked = query(grid, text if oracle else None)
            found = self.retriever.top(asked, grid.background, task.sentences)
            chosen = self.linearizer.sentences(found, task.strip_stopwords, task.sentence_tokens)
        return source_parts(grid, chosen, self.linearizer, task.source_tokens)


def reads(method: Any, role: str) -> bool:
    """Whether a method's sources contain what the part of this role makes."""
    if role == "retriever":
        return bool(getattr(method, "background", False))
    return bool(getattr(method, {"planner": "plans", "selector": "prototypes"}[role], False))


def _background(row: Row) -> Sequence[str]:
    return row.table.background if isinstance(row.table, Grid) else ()


def unlikelihood(logits: Tensor, labels: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Unlikelihood: Σ −ln(1 − p(w)) over prototype words w that the target lacks, averaged over its positions."""
    total = logits.new_zeros((), dtype=torch.float32)
    for row, target, ids, parts in zip(logits, labels, given["input_ids"], given["parts"], strict=True):
        wrong = ids[parts == PROTOTYPES].unique()
        wrong = wrong[~torch.isin(wrong, target)]
        if len(wrong):
            likely = row[target != IGNORED].float().softmax(-1)[:, wrong]
            total = total - torch.log1p(-likely.clamp(max=1 - 1e-6)).mean(-1).sum()
    return total


def description_scores(said: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
    """All scores of descriptions except the one from the loss."""
    from fathom.tables.text import metrics
    from fathom.tables.text.plan import gold_plan

    references, tables = [row.references for row in rows], [row.slots for row in rows]

    def mean(values: Iterator[float | None], empty: float) -> float:
        found = [empty if value is None else value for value in values]
        return math.fsum(found) / len(found)

    def cells(row: Row) -> Sequence[str]:
        return row.table.highlights or row.table.cells if isinstance(row.table, Grid) else row.table.values

    def off(text: str, row: Row) -> float | None:
        wanted = isinstance(row.table, Grid) and row.table.highlights
        return metrics.off_target(text, row.table) if wanted else None

    def held(row: Row) -> Sequence[str]:
        return (*row.table.header, *row.table.cells) if isinstance(row.table, Grid) else row.table.values

    both = list(zip(said, rows, strict=True))
    plans = [gold_plan(table, row.references[0]) for table, row in zip(tables, rows, strict=True)]
    return {
        "bleu": metrics.bleu(said, references),
        "rouge4": metrics.rouge4(said, references),
        "meteor": metrics.meteor(said, references),
        "parent_f": metrics.parent(said, references, tables).f1,
        "coverage": mean((metrics.coverage(text, cells(row)) for text, row in both), 1.0),
        "off_target": mean((off(text, row) for text, row in both), 0.0),
        "number_precision": mean((metrics.number_precision(text, held(row)) for text, row in both), 1.0),
        "plan_adherence": mean((metrics.plan_adherence(*one) for one in zip(said, tables, plans, strict=True)), 1.0),
        "distinct_2": metrics.distinct(said, 2),
    }
