"""Supervised fine-tuning: answering prompts, in the form that the tokenizer's chat template gives them.

A row is a prompt with its answer, or a list of messages of which every one by the assistant is an answer. The template
says what stands around them; each part is tokenised by itself, as a prompt is when the model is asked. The loss is on
answers, their end token included, and a row's first token is context only.

Rows are packed into blocks of `data.block_size` tokens, whole, as documents that do not see each other.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import datasets
import jinja2
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from fathom.cost import forward_flops_per_token
from fathom.data import DataConfig, PreparedData, Source, token_byte_lengths
from fathom.data.packing import IGNORED, Example, pack_examples, target_tokens, write_blocks
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.configuration import FathomConfig
from fathom.models.method import check_range
from fathom.tasks.base import Sample, Score, Task, register_task
from fathom.tasks.causal_lm import bits_of_loss, unigram

# For a tokenizer that has no template of its own: the headings of Alpaca, for any number of turns.
HEADINGS = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
ALPACA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '" + HEADINGS["user"] + "' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + HEADINGS["assistant"] + "' + message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% else %}{{ raise_exception('no place for the role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + HEADINGS["assistant"] + "' }}{% endif %}"
)
BATCH = 32  # questions that are answered at once
SAMPLES = 4


@dataclass(frozen=True)
class Question:
    """What a model is asked: token ids up to the last answer of a held-out row, and that answer with its end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Dialogues(PreparedData):
    """Blocks of rows, and the questions that the held-out rows ask.

    Attributes:
        lengths: tokens of the held-out rows, by how many rows have so many.
    """

    questions: tuple[Question, ...] = ()
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)


@register_task("sft")
@dataclass(frozen=True)
class SFT(Task):
    """Options:

    prompt_field, answer_field: fields of a row that has no `messages_field`.
    messages_field: a list of {"role", "content"}; a row that has it is read so.
    train_on_inputs: the training loss is on prompts too; scores are of answers all the same.
    packing: rows share blocks as documents of their own; false: one row a block, padded.
    questions: held-out rows, from the first on, whose last answer is asked for exact match.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    messages_field: str = "messages"
    train_on_inputs: bool = False
    packing: bool = True
    questions: int = 256

    summary = "Answer prompts: rows of prompt and answer, or of messages, with the loss on answers."
    scores = (
        Score(
            "answer_bits_per_byte",
            "bits per byte of answers",
            "lower",
            "The loss of the held-out answers in bits, their end tokens included, over the bytes of the answers.",
        ),
        Score(
            "exact_match",
            "of answers exactly right",
            "higher",
            "The share of held-out questions whose greedy answer, in at most as many tokens as the right one has, is "
            "the right one, and ends there.",
        ),
    )
    held_out = "held-out rows"
    loss_unit = "nats per answer token"
    answer = "prompt and answer"
    cost_heading = "FLOPs per answer"
    reference_name = "unigram"
    reference_note = "The unigram model knows only how often each token occurs in answers."
    unused = ("text_field", "document_mask", "keep_remainder", "max_tokens", "max_validation_tokens", "streaming")
    samples_note = "Greedy answers to the first held-out rows"
    invariants = ("padding", "packing")

    def __post_init__(self) -> None:
        check_range("task sft", "questions", self.questions, 1)

    def check(self, data: DataConfig) -> None:
        super().check(data)
        self.refuse_text(data)

    def prepare(self, data: DataConfig, cache_dir: Path) -> Dialogues:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self.sources(data)
        fields = [self.prompt_field, self.answer_field, self.messages_field]
        tokenizer = make_tokenizer(
            data, lambda: self._texts(train), lambda: cache_key(train.content_hash(), *fields), cache
        )
        notes = ["Chat template: the tokenizer's own."]
        if tokenizer.chat_template is None:
            tokenizer.chat_template = ALPACA
            notes = [
                "Chat template: Alpaca's headings, built in, as the tokenizer has none; it is saved with the model."
            ]
        blocks, counts = self._blocks(train, tokenizer, data.block_size, cache, self.train_on_inputs)
        notes += _cut(train, counts, data.block_size)
        found: dict[str, Any] = {"validation": None, "validation_targets": 0, "validation_bytes": 0}
        if held_out is not None:
            validation, held = self._blocks(held_out, tokenizer, data.block_size, cache, False)
            notes += _cut(held_out, held, data.block_size, "; their exact match is not asked for")
            targets, size = target_tokens(validation, token_byte_lengths(tokenizer))
            rows = list(self._examples(held_out, tokenizer, data.block_size, False, collections.Counter()))
            questions = [_question(row) for row in rows if row.last and not row.cut][: self.questions]
            if not questions:
                raise ValueError(
                    f"data.validation={data.validation!r}: none of its rows can be asked whole within data.block_size="
                    f"{data.block_size} tokens; use longer blocks"
                )
            found = {
                "validation": validation,
                "validation_targets": targets,
                "validation_bytes": size,
                "questions": tuple(questions),
                "lengths": dict(collections.Counter(len(row.tokens) for row in rows)),
            }
        return Dialogues(
            blocks, tokenizer=tokenizer, notes=tuple(notes), examples_per_sequence=counts["kept"] / len(blocks), **found
        )

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        assert isinstance(data, Dialogues)
        right = None
        if loss is not None:
            model: Any = self.model_class.from_pretrained(checkpoint)
            model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
            found = zip(data.questions, answers(model, data.questions, data.tokenizer), strict=True)
            right = sum(_is_right(question, ids, data.tokenizer) for question, ids in found) / len(data.questions)
        return {"answer_bits_per_byte": bits_of_loss(data, loss), "exact_match": right}

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        seen = torch.cat([block["labels"][1:] for block in islice(data.train, sequences)])
        targets = torch.cat([block["labels"][1:] for block in data.validation])
        return unigram(data, seen[seen >= 0], targets[targets >= 0])

    def held_out_size(self, data: PreparedData) -> str:
        assert isinstance(data, Dialogues)
        return f"{sum(data.lengths.values()):,} rows, {data.validation_bytes:,} bytes of answers"

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        assert isinstance(data, Dialogues)
        asked = data.questions[:SAMPLES]

        def text(ids: Iterable[int]) -> str:
            return str(data.tokenizer.decode(list(ids), skip_special_tokens=True))

        found = zip(asked, answers(model, asked, data.tokenizer), strict=True)
        return [Sample(text(question.prompt), text(ids), text(question.answer)) for question, ids in found]

    def answer_flops(
        self, config: FathomConfig, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        """FLOPs of reading a held-out row and generating its answer, whose last token is not read; the mean over
        rows."""
        assert isinstance(data, Dialogues)
        read = {max(1, length - 1): rows for length, rows in data.lengths.items()}
        flops = {n: n * forward_flops_per_token(config, n, ran=ran).matmul for n in read}
        return sum(rows * flops[n] for n, rows in read.items()) / sum(read.values())

    def _messages(self, row: dict[str, Any], where: str) -> list[dict[str, str]]:
        """The row as messages. Raises ValueError that names the row and the field."""
        if row.get(self.messages_field) is not None:
            messages = row[self.messages_field]
            if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
                raise ValueError(f'{where}: field {self.messages_field!r} must be a list of {{"role", "content"}}')
        else:
            for option in ("prompt_field", "answer_field"):
                if row.get(getattr(self, option)) is None:
                    raise ValueError(
                        f"{where}: no field {getattr(self, option)!r} (found: {', '.join(row) or 'none'}); set "
                        f"task.{option}"
                    )
            messages = [
                {"role": "user", "content": row[self.prompt_field]},
                {"role": "assistant", "content": row[self.answer_field]},
            ]
        for message in messages:
            if not isinstance(message.get("content"), str):
                kind = type(message.get("content")).__name__
                raise ValueError(f"{where}: the content of a message by {message['role']!r} must be text, got {kind}")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{where}: no message by 'assistant', so there is no answer to learn")
        return [{"role": message["role"], "content": message["content"]} for message in messages]

    def _texts(self, source: Source) -> Iterator[str]:
        """What a tokenizer made for the rows learns from: messages under the headings that they will have."""
        for row, where in source.rows():
            yield "\n\n".join(HEADINGS.get(m["role"], "") + m["content"] for m in self._messages(row, where))

    def _examples(
        self, source: Source, tokenizer: PreTrainedTokenizerFast, room: int, inputs: bool, counts: collections.Counter
    ) -> Iterator[Row]:
        """Every row that has an answer within `room` tokens; `counts` gets the rows, the cut ones and those kept."""
        left = source.rows()
        while some := list(islice(left, 1000)):
            rows = [parts(self._messages(row, where), tokenizer, where) for row, where in some]
            texts = [text for row in rows for text, _ in row]  # the template's end tokens in them are tokens
            encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
            for row in rows:
                pieces = [(next(encoded), is_answer) for _, is_answer in row]
                tokens = np.array([token for ids, _ in pieces for token in ids], dtype=np.int32)
                answer = np.repeat([is_answer for _, is_answer in pieces], [len(ids) for ids, _ in pieces])
                labels = np.where(answer | inputs, tokens, IGNORED)
                labels[:1] = IGNORED
                counts["rows"] += 1
                counts["cut"] += len(tokens) > room
                if answer[1:room].any():
                    counts["kept"] += 1
                    last = len(tokens) - len(pieces[-1][0])
                    yield Row(tokens[:room], labels[:room], last, len(tokens) > room)

    def _blocks(
        self, source: Source, tokenizer: PreTrainedTokenizerFast, size: int, cache: Path, inputs: bool
    ) -> tuple[datasets.Dataset, dict[str, int]]:
        fields = [self.prompt_field, self.answer_field, self.messages_field]
        options = [tokenizer.chat_template, size, inputs, self.packing, *fields]
        folder = cache / f"sft-{cache_key(source.content_hash(), tokenizer_hash(tokenizer), options)}"

        def build(work: Path) -> None:
            counts: collections.Counter = collections.Counter()
            rows = self._examples(source, tokenizer, size, inputs, counts)
            examples = (Example(row.tokens, row.labels) for row in rows)
            columns = pack_examples(examples, size, tokenizer.eos_token_id, self.packing)
            if not write_blocks(columns, work / "blocks.arrow"):
                raise ValueError(
                    f"{source.argument}={source.name!r}: none of its {counts['rows']} rows has an answer within "
                    f"data.block_size={size} tokens; use longer blocks"
                )
            (work / "counts.json").write_text(json.dumps(counts), encoding="utf-8")

        build_once(folder, build)
        blocks = datasets.Dataset.from_file(str(folder / "blocks.arrow")).with_format("torch")
        return blocks, json.loads((folder / "counts.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """A tokenised row: ids and labels [n], where its last answer begins, and whether it was cut to fit."""

    tokens: np.ndarray
    labels: np.ndarray
    last: int
    cut: bool


def parts(messages: list[dict[str, str]], tokenizer: Any, where: str) -> list[tuple[str, bool]]:
    """The text that the chat template makes of the messages up to the last answer, and which parts of it are answers.

    An answer is what the template adds to the prompt it writes before one: the message and what ends it. Raises
    ValueError for a template that refuses the messages or changes earlier ones, and for a message that holds a special
    token, which would be read as one.
    """
    for message in messages:
        inside = [token for token in tokenizer.all_special_tokens if token in message["content"]]
        if inside:
            raise ValueError(
                f"{where}: a message by {message['role']!r} holds the special token {inside[0]!r}, which would be read "
                "as one; remove it"
            )
    found: list[tuple[str, bool]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        except (jinja2.TemplateError, ValueError, IndexError) as error:
            raise ValueError(f"{where}: the chat template refuses these messages ({error})") from None
        if not (before.startswith(text) and after.startswith(before)):
            raise ValueError(
                f"{where}: the chat template changes earlier messages when an answer follows; give one answer a row"
            )
        found += [(before[len(text) :], False), (after[len(before) :], True)]
        text = after
    return found


@torch.no_grad()
def answers(model: Any, questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Greedy answers, token ids of at most the right one's length each, in the order of the questions."""
    special = set(tokenizer.all_special_ids)
    ends = {tokenizer.eos_token_id, *(token for question in questions for token in question.answer if token in special)}
    found: dict[int, list[int]] = {}
    for batch in _batches(questions, model.config.max_position_embeddings):
        asked = [questions[index] for index in batch]
        width = max(len(question.prompt) for question in asked)
        prompts = torch.full((len(asked), width), tokenizer.eos_token_id)
        mask = torch.zeros_like(prompts)
        for row, question in enumerate(asked):  # on the right, where generation goes on
            prompts[row, width - len(question.prompt) :] = torch.tensor(question.prompt)
            mask[row, width - len(question.prompt) :] = 1
        out = model.generate(
            input_ids=prompts.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=max(len(question.answer) for question in asked),
            eos_token_id=sorted(ends),
            pad_token_id=tokenizer.eos_token_id,
        )
        for index, ids in zip(batch, out[:, width:].tolist(), strict=True):
            found[index] = ids[: len(questions[index].answer)]
    return [found[index] for index in range(len(questions))]


def _batches(questions: Sequence[Question], positions: int) -> Iterator[list[int]]:
    """Indices of questions that fit into the model's positions together, those of like answers beside each other."""
    batch: list[int] = []
    for index in sorted(range(len(questions)), key=lambda i: (len(questions[i].answer), len(questions[i].prompt))):
        together = [questions[i] for i in (*batch, index)]
        length = max(len(q.prompt) for q in together) + max(len(q.answer) for q in together)
        if batch and (len(batch) == BATCH or length > positions):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _is_right(question: Question, found: list[int], tokenizer: Any) -> bool:
    """Whether an answer has the right one's text, and an end where that has one."""
    special = set(tokenizer.all_special_ids)
    said, right = ([*takewhile(lambda token: token not in special, ids)] for ids in (found, question.answer))
    ended = len(said) < len(found) or len(right) == len(question.answer)
    return ended and tokenizer.decode(said) == tokenizer.decode(right)


def _question(row: Row) -> Question:
    return Question(tuple(row.tokens[: row.last].tolist()), tuple(row.tokens[row.last :].tolist()))


def _cut(source: Source, counts: dict[str, int], size: int, more: str = "") -> list[str]:
    """What became of rows that are too long, in sentences."""
    said = []
    if counts["cut"]:
        said.append(
            f"{source.argument}: {counts['cut']:,} of {counts['rows']:,} rows are longer than data.block_size={size} "
            f"tokens and cut at their end{more}."
        )
    if counts["rows"] > counts["kept"]:
        left_out = counts["rows"] - counts["kept"]
        said.append(
            f"{source.argument}: {left_out:,} of {counts['rows']:,} rows are left out: no answer is left in them."
        )
    return said
