"""SQL from questions about databases, by a T5 that may know relations between words and the schema (RASAT).

Rows are questions or whole dialogues. A source has the question, earlier turns and the database (fathom.tables.source);
the answer is the database's name and the query. Every prediction is compared with the right query, and both are run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from transformers import AddedToken, AutoModelForSeq2SeqLM

from fathom.data import DataConfig, PreparedData, token_byte_lengths
from fathom.data import Source as Rows
from fathom.data.packing import IGNORED
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.device import device_of
from fathom.models.encoder_configs import FathomT5Config
from fathom.models.method import check_range
from fathom.models.registry import ENCODER_PLAIN, RELATIONS, build_options, lookup
from fathom.tables.base import require
from fathom.tables.picard import Picard
from fathom.tables.questions import Databases, Question, questions_of, summary, verdict
from fathom.tables.source import Source, answer_text, of_tokens, query_of, write
from fathom.tables.spoken import read_conllu, read_coreference
from fathom.tables.suites import suites_of
from fathom.tasks.base import Sample, Score, register_task
from fathom.tasks.causal_lm import bits_of_loss
from fathom.tasks.encoders import EncoderTask, padded

BATCH = 16  # questions that are answered at once
SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class Questions(PreparedData):
    """asked: the held-out questions, in the order of `validation`; commonest: the training query that occurs most."""

    asked: tuple[Question, ...] = ()
    commonest: str = ""


@register_task("text_to_sql")
@dataclasses.dataclass(frozen=True)
class TextToSQL(EncoderTask):
    """Options:

    databases: folder of SQLite files, NAME.sqlite or NAME/NAME.sqlite.
    schemas: a file like Spider's tables.json, for names in words and for databases without a file.
    question_field, query_field, database_field: fields of a row; one with "interaction" is a dialogue.
    coreference, parses: of the training rows; files of `fathom.tables.spoken`.
    held_out_coreference, held_out_parses: of the held-out rows.
    values: write cells that nearly match words of the question beside their column.
    links: cells of the database link words to columns.
    target_tokens: the most tokens of an answer, its end included.
    answers: number of held-out questions, from the first on, that are answered.
    beams: of the search for an answer.
    suites: the most generated databases of a test suite for each database, on which queries are run as well; for a
        database without a file they are the only ones.
    picard: options of `picard` (`fathom methods picard`), as a mapping; none: without it.
    """

    databases: str | None = None
    schemas: str | None = None
    question_field: str = "question"
    query_field: str = "query"
    database_field: str = "db_id"
    coreference: str | None = None
    parses: str | None = None
    held_out_coreference: str | None = None
    held_out_parses: str | None = None
    values: bool = True
    links: bool = True
    target_tokens: int = 128
    answers: int = 256
    beams: int = 1
    suites: int = 0
    picard: Any = None

    families: ClassVar[dict[str, Any]] = {"t5": FathomT5Config}
    auto = AutoModelForSeq2SeqLM
    specials = ("pad",)
    checkpoint_fields = ("relations",)
    unused: ClassVar[tuple[str, ...]] = (
        "text_field",
        "document_mask",
        "keep_remainder",
        "max_tokens",
        "max_validation_tokens",
        "streaming",
    )
    summary = "Write the SQL query that answers a question over a database."
    scores = (
        Score(
            "exact_match", "of queries match", "higher", "Spider's exact set match: clause by clause, without values."
        ),
        Score(
            "execution", "of queries return the right rows", "higher", "Run beside the right query, without DISTINCT."
        ),
        Score("interaction_exact", "of dialogues match", "higher", "Dialogues whose every query matches."),
        Score("interaction_execution", "of dialogues return the right rows", "higher", "Dialogues, every query run."),
        Score("runs", "of queries run", "higher", "Queries that run at all within the limits."),
        Score("answer_bits_per_byte", "bits per byte of answers", "lower", "The loss of held-out answers in bits."),
    )
    held_out = "held-out questions"
    loss_unit = "nats per token of an answer"
    answer = "question answered"
    cost_heading = "FLOPs per question"
    reference_name = "commonest query"
    reference_note = "The commonest query answers every question with the query that training has most often."
    samples_note = "Answers to the first held-out questions"

    def __post_init__(self) -> None:
        check_range("task text_to_sql", "target_tokens", self.target_tokens, 2)
        check_range("task text_to_sql", "answers", self.answers, 1)
        check_range("task text_to_sql", "beams", self.beams, 1)
        check_range("task text_to_sql", "suites", self.suites, 0)
        if self.picard is not None:
            known = [field.name for field in dataclasses.fields(Picard)]
            if not isinstance(self.picard, dict) or not set(self.picard) <= set(known):
                raise ValueError(
                    f"task text_to_sql option picard={self.picard!r}: must be a mapping of {', '.join(known)}"
                )
            Picard(**self.picard)

    def check(self, data: DataConfig) -> None:
        super().check(data)
        require("task 'text_to_sql'", "sqlglot", "rapidfuzz", "simplemma")
        self.refuse_text(data)
        if self.databases is None and self.schemas is None:
            raise ValueError(
                "task.databases=None and task.schemas=None: name a folder of SQLite files, a file like Spider's "
                "tables.json, or both"
            )

    def defaults(self, kind, found, data):
        start = found.get("pad_token_id")
        return {
            "decoder_start_token_id": start,
            "source": dataclasses.asdict(self._source(data.block_size)),
            "dropout_rate": 0.0,
        }

    def model_config(self, fields, data, tokenizer):
        config = super().model_config(fields, data, tokenizer)
        if fields.get("source") is None:  # a checkpoint's own may be of other rows than it learns from now
            config.source = dataclasses.asdict(self._source(data.block_size))
        return config

    def sections(self, config):
        return {RELATIONS: config.relations}

    def example_flops(self, config, block_size):
        target = self.target_tokens
        return config.encoder_flops(block_size) + config.decoder_flops(target, block_size, (target + 1) / 2)

    def cache_bytes(self, config, block_size, dtype):
        layers = config.num_decoder_layers or config.num_layers
        return 2.0 * layers * block_size * config.num_heads * config.d_kv * dtype.itemsize

    def _source(self, tokens: int) -> Source:
        return Source(tokens, self.values, self.links)

    def with_specials(self, tokenizer):
        tokenizer = super().with_specials(tokenizer)
        tokenizer.padding_side = "right"
        return with_signs(tokenizer)

    def _databases(self) -> Databases:
        return Databases(self.databases, self.schemas)

    def prepare(self, data: DataConfig, cache_dir: Path) -> Questions:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self.sources(data)
        with self._databases() as databases:
            learned = list(self._questions(train, self.coreference, self.parses, goals=True))
            tokenizer = self.with_specials(
                make_tokenizer(
                    data,
                    lambda: _texts(learned, databases),
                    lambda: cache_key(train.content_hash(), *self._fields, str(self.databases), str(self.schemas)),
                    cache,
                )
            )
            notes: list[str] = []
            blocks = self._blocks(train, learned, databases, tokenizer, data, cache, notes)
            found: dict[str, Any] = {"validation": None, "validation_targets": 0, "validation_bytes": 0}
            if held_out is not None:
                asked = list(self._questions(held_out, self.held_out_coreference, self.held_out_parses))
                validation = self._blocks(held_out, asked, databases, tokenizer, data, cache, notes)
                kept = torch.stack(list(validation["labels"][:]))
                kept = kept[kept != IGNORED]
                size = int(token_byte_lengths(tokenizer)[kept].sum())
                found = {
                    "validation": validation, "validation_targets": len(kept), "validation_bytes": size,
                    "asked": tuple(asked),
                }  # fmt: skip
                absent = {q.database for q in asked if databases.file(q.database) is None}
                if len(absent) == len({q.database for q in asked}) and not self.suites:
                    raise ValueError(
                        f"task.databases={self.databases!r}: has none of the {len(absent)} held-out databases, so no "
                        "query can run; set task.suites, which fills some by their schemas"
                    )
                if absent:
                    notes.append(
                        f"{len(absent)} of {len({q.database for q in asked})} held-out databases have no file: "
                        + ("their queries ran on filled ones." if self.suites else "execution is of the others.")
                    )
        counted = collections.Counter(answer_text(q.query, "").removeprefix(" | ") for q in learned)
        return Questions(
            blocks, tokenizer=tokenizer, notes=tuple(notes), commonest=counted.most_common(1)[0][0], **found
        )

    @property
    def _fields(self) -> tuple[str, str, str]:
        return self.question_field, self.query_field, self.database_field

    def _questions(
        self, source: Rows, coreference: str | None, parses: str | None, goals: bool = False
    ) -> Iterator[Question]:
        entries = None if coreference is None else read_coreference(coreference)
        heads = None if parses is None else read_conllu(parses)
        for number, (row, where) in enumerate(source.rows()):
            if entries is not None and number >= len(entries):
                raise ValueError(f"{coreference}: has {len(entries)} entries, and {where} is row {number + 1}")
            entry = None if entries is None else entries[number]
            yield from questions_of(row, where, number, self._fields, goals, entry, heads)

    def _blocks(
        self, source: Rows, questions: Sequence[Question], databases: Databases, tokenizer: Any, data: DataConfig,
        cache: Path, notes: list[str],
    ) -> datasets.Dataset:  # fmt: skip
        """The questions as a data set on disk, made once. Relations are stored as one matrix between the words, names
        and cells of a source, and for each token its row in it.
        """
        size = data.block_size
        files = [source.content_hash(), tokenizer_hash(tokenizer), *map(_digest, self._outside())]
        names = sorted({question.database for question in questions})
        files += [_digest(databases.file(name)) for name in names]
        folder = cache / f"text_to_sql-{cache_key(*files, [*self.section.values()], size)}"

        def build(work: Path) -> None:
            counts: collections.Counter = collections.Counter()
            made = list(self._rows(questions, databases, tokenizer, size, counts, self.parses is not None))
            if not made:
                raise ValueError(f"{source.argument}={source.name!r}: has no questions")
            rows = datasets.Dataset.from_list(made)
            rows.save_to_disk(str(work / "rows"))
            (work / "counts.json").write_text(json.dumps(counts), encoding="utf-8")

        build_once(folder, build)
        counts = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
        for what, said in (
            ("schema", "cut at the end of their schema"), ("turns", "without their oldest turns"),
            ("answer", "with an answer cut at its end"),
        ):  # fmt: skip
            if counts.get(what):
                notes.append(f"{source.argument}: {counts[what]:,} of {len(questions):,} questions are {said}.")
        found = datasets.load_from_disk(str(folder / "rows"))
        return found.with_transform(functools.partial(expand, size=size, pad=tokenizer.pad_token_id))

    def _outside(self) -> list[str | None]:
        return [self.schemas, self.coreference, self.parses, self.held_out_coreference, self.held_out_parses]

    def _rows(
        self, questions: Sequence[Question], databases: Databases, tokenizer: Any, size: int, counts: Any, parsed: bool
    ) -> Iterator[dict[str, Any]]:
        source = self._source(size)
        for question in questions:
            schema, database = databases.schema(question.database), databases.open(question.database)
            made = source.encode(tokenizer, question.turns, schema, database, question.spoken, parsed, whole=False)
            counts["schema"] += "schema" in made.cut
            counts["turns"] += "turns" in made.cut
            answer = answer_text(question.query, schema.name)
            ids = tokenizer(answer, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            counts["answer"] += len(ids) >= self.target_tokens
            labels = [*ids[: self.target_tokens - 1], tokenizer.eos_token_id]
            yield {
                "input_ids": made.input_ids, "labels": padded(labels, self.target_tokens, IGNORED),
                "table": made.table.tobytes(), "rows": made.rows.tolist(),
            }  # fmt: skip

    def forward(self, model: Any, **batch: Any) -> Any:
        config = getattr(model, "module", model).config
        return super().forward(model, **with_relations(batch, config, self.parses is not None))

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        values: dict[str, float | None] = dict.fromkeys((score.name for score in self.scores), None)
        if loss is None:
            return values
        assert isinstance(data, Questions)
        model = self.auto.from_pretrained(checkpoint)
        model.eval().to(device_of())
        asked = data.asked[: self.answers]
        with self._databases() as databases:
            answers = zip(self._answers(model, data, len(asked), databases), asked, strict=True)
            said = [query_of(sample.text, databases.schema(question.database).name) for sample, question in answers]
            more = suites_of(asked, databases, self.suites) if self.suites else None
            found = summary([verdict(*pair, databases, more) for pair in zip(said, asked, strict=True)], asked)
        kept = {
            "exact_match": found["exact"], "execution": found["execution"], "runs": found["runs"],
            "interaction_exact": found["interaction_exact"], "interaction_execution": found["interaction_execution"],
        }  # fmt: skip
        return {**values, **kept, "answer_bits_per_byte": bits_of_loss(data, loss)}

    @torch.no_grad()
    def _answers(self, model: Any, data: Questions, count: int, databases: Databases) -> Iterator[Sample]:
        """Answers to the first held-out questions, with the questions and the right answers."""
        rows: Any = data.validation
        names = ("input_ids", "attention_mask", "relation_ids")
        for start in range(0, count, BATCH):
            processors = []
            if self.picard is not None:
                named = [question.database for question in data.asked[start : min(start + BATCH, count)]]
                schemas = {databases.schema(name).name: databases.schema(name) for name in named}
                rows_of = [databases.schema(name).name for name in named]
                processors = [Picard(**self.picard).processor(data.tokenizer, schemas, rows_of)]
            batch = self.collate([rows[i] for i in range(start, min(start + BATCH, count))])
            given = with_relations({name: batch[name] for name in names}, model.config, self.parses is not None)
            out = model.generate(
                **{name: value.to(model.device) for name, value in given.items()},
                max_new_tokens=self.target_tokens, num_beams=self.beams, do_sample=False,
                logits_processor=processors,
            )  # fmt: skip
            for ids, mask, said, labels in zip(batch["input_ids"], batch["attention_mask"], out, batch["labels"]):
                texts = [ids[mask.bool()], said, labels[labels != IGNORED]]
                yield Sample(*(str(data.tokenizer.decode(x, skip_special_tokens=True)) for x in texts))

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert isinstance(data, Questions)
        asked = data.asked[: self.answers]
        with self._databases() as databases:
            found = summary([verdict(data.commonest, question, databases) for question in asked], asked)
        return found["exact"] or 0.0

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        assert isinstance(data, Questions)
        with self._databases() as databases:
            return list(self._answers(model, data, min(SAMPLES, len(data.asked)), databases))


def with_relations(batch: dict[str, Any], config: Any, parsed: bool) -> dict[str, Any]:
    """The batch with relation ids of this model's tables, or without relations for a model that reads none.

    Raises ValueError for a model that reads parses where there are none, and one that reads distances where the rows
    have parses instead.
    """
    section = getattr(config, RELATIONS, None) or {"name": ENCODER_PLAIN[RELATIONS]}
    method: Any = lookup(RELATIONS, section["name"])
    options = build_options(RELATIONS, section)
    numbers = method.numbering(options)
    if numbers is None:
        return {name: value for name, value in batch.items() if name != "relation_ids"}
    if options.dependency != parsed:
        raise ValueError(
            f"relations.dependency={options.dependency!r}: the rows relate words by "
            f"{'parses' if parsed else 'distances'}; set it to {parsed!r}, or {'leave out' if parsed else 'give'} "
            "task.parses"
        )
    known = batch["relation_ids"]
    return {**batch, "relation_ids": torch.tensor(numbers, device=known.device)[known]}


def expand(batch: dict[str, list[Any]], size: int, pad: int) -> dict[str, Any]:
    """Rows from the disk as the Trainer reads them: padded on the right, relations between all tokens."""
    found: dict[str, Any] = {}
    if "labels" in batch:
        found["labels"] = [torch.tensor(labels) for labels in batch["labels"]]
    if "input_ids" in batch:
        found["input_ids"] = [torch.tensor(padded(ids, size, pad)) for ids in batch["input_ids"]]
        found["attention_mask"] = [torch.arange(size).lt(len(ids)).long() for ids in batch["input_ids"]]
    if "table" in batch:
        found["relation_ids"] = []
        for table, rows in zip(batch["table"], batch["rows"], strict=True):
            side = math.isqrt(len(table))
            known = np.frombuffer(table, dtype=np.uint8).reshape(side, side)
            found["relation_ids"].append(torch.from_numpy(of_tokens(known, np.array(padded(rows, size, -1)))))
    return found


def _texts(questions: Sequence[Question], databases: Databases) -> Iterator[str]:
    """The texts from which a new tokenizer is trained: every question and answer, and every schema once."""
    for question in questions:
        yield question.turns[-1]
        yield answer_text(question.query, databases.schema(question.database).name)
    for name in dict.fromkeys(question.database for question in questions):
        yield write([""], databases.schema(name), {}).text


def _digest(path: Any) -> str:
    """A hash of a file's content; "" without a file."""
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def with_signs(tokenizer: Any) -> Any:
    """The tokenizer with tokens for "<" and "<=" if it reads "<" as unknown, as T5's does."""
    if (
        tokenizer.unk_token_id is not None
        and tokenizer.unk_token_id in tokenizer("<", add_special_tokens=False)["input_ids"]
    ):
        tokenizer.add_tokens([AddedToken(" <="), AddedToken(" <")])
    return tokenizer
