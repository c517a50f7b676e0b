"""Supervised fine-tuning: answering prompts, in the form that the tokenizer's chat template gives them.

A row is a prompt with its answer, a list of messages in which every message by the assistant is an answer, or a trace
of ReAct (fathom.tools.trace). The template adds the text around prompts and messages. Each part is tokenised by itself,
as a prompt is when the model is asked. The loss is on answers, their end token included, and never on what a tool
returned. A row's first token is only context.

Whole rows are packed into blocks of `data.block_size` tokens, as documents that do not see each other.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import datasets
import jinja2
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from fathom.cost import forward_flops_per_token
from fathom.data import EMBEDDED, DataConfig, PreparedData, Source, token_byte_lengths, train_bpe
from fathom.data.instructions import balanced
from fathom.data.mixing import MixedBlocks
from fathom.data.packing import IGNORED, Example, pack_examples, target_tokens, write_blocks
from fathom.data.prepared import build_once, cache_key, make_tokenizer, named_texts, require_disjoint, text_blocks
from fathom.data.templates import HEADINGS, INPUT, TEMPLATES, takes_tools
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.configuration import FathomConfig
from fathom.models.device import device_of
from fathom.models.method import check_choice, check_number, check_range
from fathom.tasks.base import Sample, Score, Task, register_task
from fathom.tasks.causal_lm import bits_of_loss, unigram
from fathom.tools.trace import spans

BATCH = 32  # questions that are answered at once
SAMPLES = 4


@dataclass(frozen=True)
class Question:
    """A question to a model: token ids up to the last answer of a held-out row, and that answer with its end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Dialogues(PreparedData):
    """Blocks of rows, and the questions that the held-out rows ask.

    Attributes:
        lengths: number of tokens → number of held-out rows with so many.
    """

    questions: tuple[Question, ...] = ()
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)


@register_task("sft")
@dataclass(frozen=True)
class SFT(Task):
    """Options:

    prompt_field, answer_field: fields of a row that has no `messages_field`.
    input_field: a field with an input that the prompt refers to, or null; it may be absent or "" in a row.
    messages_field: a list of {"role", "content"}; a row with this field is read as messages.
    tools_field: schemas of the tools that the messages may call, as a list or as JSON.
    trace_field: a trace of ReAct as one text, with its prompt; a row with this field is read as a trace.
    template: "auto" is the tokenizer's own chat template, or "headings" if it has none; "headings", "alpaca" and
        "react" are built in.
    train_on_inputs: the training loss is on prompts too; scores are still of answers.
    packing: rows share blocks as documents of their own; false: one row a block, padded.
    tight: rows are sorted by length, some thousand at a time, to pack them with less padding.
    balance: a temperature: a type with n rows is drawn in proportion to n^balance, with the total kept; null: every row
        once.
    type_field: field with the type of a row, for `balance`.
    questions: number of held-out rows, from the first on, whose last answer is asked for exact match.
    text: names of sources of `data.train` that are running text, learnt whole, so that it is not forgotten. The
        sources' weights are shares of blocks; a block of text has more targets than one of answers.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    input_field: str | None = None
    messages_field: str = "messages"
    tools_field: str = "tools"
    trace_field: str = "trace"
    template: str = "auto"
    train_on_inputs: bool = False
    packing: bool = True
    tight: bool = False
    balance: float | None = None
    type_field: str = "type"
    questions: int = 256
    text: tuple[str, ...] = ()

    mixes = True
    asked_by_lm_eval = True
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
        check_choice("task sft", "template", self.template, ("auto", *TEMPLATES))
        if self.balance is not None:
            check_number("task sft", "balance", self.balance, 0, 1)
        if not isinstance(self.text, list | tuple):
            raise ValueError(f"task sft: text={self.text!r}: must be a list of names of data.train")
        object.__setattr__(self, "text", tuple(self.text))

    def check(self, data: DataConfig) -> None:
        super().check(data)
        self.refuse_text(data)
        if isinstance(data.validation, dict):
            raise ValueError(
                f"data.validation={sorted(data.validation)!r}: task 'sft' is scored on one data set of rows; name it"
            )
        sources = data.train if isinstance(data.train, dict) else {}
        named = set(sources)
        if set(self.text) - named:
            raise ValueError(
                f"task.text={list(self.text)!r}: {min(set(self.text) - named)!r} is no source of data.train; name "
                "sources there, {rows: {text: rows.jsonl}, prose: {text: prose.txt}}"
            )
        if named and named == set(self.text):
            raise ValueError(f"task.text={list(self.text)!r}: every source is running text; use task 'causal_lm'")
        for name in named - set(self.text):
            if sources[name].text == EMBEDDED:
                raise ValueError(f"data.train.{name}.text={EMBEDDED!r} is running text; add {name!r} to task.text")

    def prepare(self, data: DataConfig, cache_dir: Path) -> Dialogues:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        sources, held_out = self._sources(data)

        def texts() -> Iterator[str]:
            for name, source in sources.items():
                yield from source.documents() if name in self.text else self._texts(source)

        def key() -> str:
            return cache_key(*(source.content_hash() for source in sources.values()), *self._fields())

        tokenizer = make_tokenizer(data, texts, key, cache)
        notes = [self._set_template(tokenizer)]
        blocks: dict[str, datasets.Dataset] = {}
        rows_a_block: dict[str, float] = {}
        for name, source in sources.items():
            if name in self.text:
                as_rows = dataclasses.replace(data, document_mask=self.packing, keep_remainder=True)  # the same columns
                blocks[name] = text_blocks(source, tokenizer, as_rows, None, cache)
                continue
            inputs = self.train_on_inputs
            blocks[name], counts = self._blocks(source, tokenizer, data.block_size, cache, inputs, data.seed)
            notes += _cut(source, counts, data.block_size)
            rows_a_block[name] = counts["kept"] / len(blocks[name])
        train: Any = next(iter(blocks.values()))
        shares = dict.fromkeys(blocks, 1.0)
        if isinstance(data.train, dict):
            weights = {name: source.weight or 1.0 for name, source in data.train.items()}
            shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
            train = MixedBlocks(blocks, weights, data.seed, sum(map(len, blocks.values())))
            train.caps = {name: source.max_epochs for name, source in data.train.items()}
        found: dict[str, Any] = {"validation": None, "validation_targets": 0, "validation_bytes": 0}
        if held_out is not None:
            validation, held = self._blocks(held_out, tokenizer, data.block_size, cache, False)
            notes += _cut(held_out, held, data.block_size, "; their exact match is not asked for")
            targets, size = target_tokens(validation, token_byte_lengths(tokenizer))
            rows = list(self._examples(held_out.rows(), tokenizer, data.block_size, False, collections.Counter()))
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
        rows_a_sequence = sum(shares[name] * rows for name, rows in rows_a_block.items())
        return Dialogues(train, tokenizer=tokenizer, notes=tuple(notes), examples_per_sequence=rows_a_sequence, **found)

    def _sources(self, data: DataConfig) -> tuple[dict[str, Source], Source | None]:
        """Training sources by name, and the held-out rows."""
        if isinstance(data.train, str):
            train, held_out = self.sources(data)
            return {"train": train}, held_out
        sources = {
            name: Source(text, data.train_split, "text", where, data.max_documents)
            for name, text, where in named_texts(data)
        }
        if data.validation is None:
            return sources, None
        assert isinstance(data.validation, str)
        held_out = Source(data.validation, data.validation_split, "text", "data.validation")
        for source in sources.values():
            require_disjoint(source, held_out)
        return sources, held_out

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        assert isinstance(data, Dialogues)
        right = None
        if loss is not None:
            model: Any = self.model_class.from_pretrained(checkpoint)
            model.eval().to(device_of())
            found = zip(data.questions, answers(model, data.questions, data.tokenizer), strict=True)
            right = sum(_is_right(question, ids, data.tokenizer) for question, ids in found) / len(data.questions)
        return {"answer_bits_per_byte": bits_of_loss(data, loss), "exact_match": right}

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        known = list(data.train.sources) if isinstance(data.train, MixedBlocks) else []
        rows = (block for block in data.train if not known or known[block["domains"]] not in self.text)
        seen = torch.cat([block["labels"][1:] for block in islice(rows, sequences)])
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
        """Mean FLOPs over held-out rows of reading a prompt and generating its answer (its last token is not read)."""
        assert isinstance(data, Dialogues)
        read = {max(1, length - 1): rows for length, rows in data.lengths.items()}
        flops = {n: n * forward_flops_per_token(config, n, ran=ran).matmul for n in read}
        return sum(rows * flops[n] for n, rows in read.items()) / sum(read.values())

    def _fields(self) -> list[Any]:
        """The options that decide how a row is read, for the name of its cache entry; newer options only if set."""
        fields: list[Any] = [self.prompt_field, self.answer_field, self.messages_field]
        more = [self.input_field, self.tools_field, self.trace_field, self.template]
        return fields if more == [None, "tools", "trace", "auto"] else [*fields, *more]

    def _set_template(self, tokenizer: PreTrainedTokenizerFast) -> str:
        """Give the tokenizer the template that rows are written in. Returns a sentence that names it."""
        if self.template == "auto" and tokenizer.chat_template is not None:
            return "Chat template: the tokenizer's own."
        if self.template == "auto":
            tokenizer.chat_template = TEMPLATES["headings"]
            return "Chat template: Alpaca's headings, built in, as the tokenizer has none; it is saved with the model."
        tokenizer.chat_template = TEMPLATES[self.template]
        return f"Chat template: {self.template!r}, built in; it is saved with the model."

    def _row(self, row: dict[str, Any], where: str) -> RowText:
        """The content of a row. Raises ValueError that names the row and the field."""
        trace = row.get(self.trace_field)
        if trace is not None:
            if not isinstance(trace, str):
                kind = type(trace).__name__
                raise ValueError(f"{where}: field {self.trace_field!r} must be text, got {kind}")
            return RowText(trace=trace)
        if row.get(self.messages_field) is not None:
            messages = row[self.messages_field]
            if not isinstance(messages, list) or not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
            ):
                raise ValueError(f'{where}: field {self.messages_field!r} must be a list of {{"role", "content"}}')
        else:
            messages = self._pair(row, where)
        for message in messages:
            content = message.get("content")
            if content is None and message.get("tool_calls"):
                content = ""
            if not isinstance(content, str):
                kind = type(content).__name__
                raise ValueError(f"{where}: the content of a message by {message['role']!r} must be text, got {kind}")
            if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
                raise ValueError(f"{where}: the answer is empty, so there is nothing to learn; leave the row out")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{where}: no message by 'assistant', so there is no answer to learn")
        kept = ("role", "content", "tool_calls", "name", "tool_call_id")
        tools = row.get(self.tools_field)
        if isinstance(tools, str):  # as tables of one schema hold them
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: field {self.tools_field!r} is not JSON ({error})") from None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"{where}: field {self.tools_field!r} must be a list of schemas, or that as JSON")
        return RowText([{"content": "", **{k: m[k] for k in kept if m.get(k)}} for m in messages], tools)

    def _pair(self, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """A row of prompt, input and answer as messages."""
        for option in ("prompt_field", "answer_field"):
            if row.get(getattr(self, option)) is None:
                raise ValueError(
                    f"{where}: no field {getattr(self, option)!r} (found: {', '.join(row) or 'none'}); set "
                    f"task.{option}"
                )
        prompt = row[self.prompt_field]
        given = row.get(self.input_field) if self.input_field else None
        if given and isinstance(given, str) and isinstance(prompt, str):
            prompt += (INPUT if self.template == "alpaca" else "\n\n") + given
        elif given:
            raise ValueError(f"{where}: field {self.input_field!r} must be text, got {type(given).__name__}")
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": row[self.answer_field]}]

    def _texts(self, source: Source) -> Iterator[str]:
        """The texts from which a new tokenizer is trained: rows as a built-in template writes them, without end tokens;
        messages under their headings; or traces."""
        blank = train_bpe([], 257)
        blank.chat_template = TEMPLATES.get(self.template)
        for row, where in source.rows():
            found = self._row(row, where)
            if found.trace is None and self.template in ("auto", "headings"):
                yield "\n\n".join(HEADINGS.get(m["role"], "") + m["content"] for m in found.messages)
            else:
                yield "".join(text for text, _ in parts(found, blank, where)).replace(blank.eos_token, "")

    def _examples(
        self,
        left: Iterator[tuple[dict[str, Any], str]],
        tokenizer: PreTrainedTokenizerFast,
        room: int,
        inputs: bool,
        counts: collections.Counter,
    ) -> Iterator[Row]:
        """All rows with an answer within `room` tokens. `counts` gets the numbers of rows, cut rows and kept rows."""
        while some := list(islice(left, 1000)):
            rows = [parts(self._row(row, where), tokenizer, where) for row, where in some]
            texts = [text for row in rows for text, _ in row]  # the template's end tokens in them are tokens
            encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
            for row in rows:
                pieces = [(next(encoded), kind) for _, kind in row]
                tokens = np.array([token for ids, _ in pieces for token in ids], dtype=np.int32)
                kinds = np.repeat([kind for _, kind in pieces], [len(ids) for ids, _ in pieces])
                answer = kinds == "answer"
                labels = np.where(answer | (inputs & (kinds == "prompt")), tokens, IGNORED)
                labels[:1] = IGNORED
                counts["rows"] += 1
                counts["cut"] += len(tokens) > room
                if answer[1:room].any():
                    counts["kept"] += 1
                    last = len(tokens) - len(pieces[-1][0])
                    yield Row(tokens[:room], labels[:room], last, len(tokens) > room)

    def _balanced(self, source: Source, seed: int) -> Iterator[tuple[dict[str, Any], str]]:
        """The rows of a source, balanced by type."""
        rows = list(source.rows())
        for row, where in rows:
            if not isinstance(row.get(self.type_field), str):
                raise ValueError(
                    f"{where}: no text in field {self.type_field!r} (found: {', '.join(row) or 'none'}); set "
                    "task.type_field, or leave out task.balance"
                )
        assert self.balance is not None
        return (rows[index] for index in balanced([row[self.type_field] for row, _ in rows], self.balance, seed))

    def _blocks(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerFast,
        size: int,
        cache: Path,
        inputs: bool,
        seed: int | None = None,
    ) -> tuple[datasets.Dataset, dict[str, int]]:
        """Blocks of rows, and counts of rows kept and cut. seed: for balancing types, if the task asks for it."""
        options = [tokenizer.chat_template, size, inputs, self.packing, *self._fields()]
        balance = self.balance is not None and seed is not None
        options += [self.balance, self.type_field, seed] if balance else []
        options += ["tight"] if self.tight else []
        folder = cache / f"sft-{cache_key(source.content_hash(), tokenizer_hash(tokenizer), options)}"

        def build(work: Path) -> None:
            counts: collections.Counter = collections.Counter()
            drawn = self._balanced(source, seed or 0) if balance else source.rows()
            rows = self._examples(drawn, tokenizer, size, inputs, counts)
            examples = (Example(row.tokens, row.labels) for row in rows)
            columns = pack_examples(examples, size, tokenizer.eos_token_id, self.packing, self.tight)
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


@dataclass(frozen=True)
class RowText:
    """The content of a row: messages in transformers' convention with schemas of their tools, or a trace of ReAct,
    whose text is what a model reads and writes.
    """

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    trace: str | None = None


Kind = Literal["prompt", "answer", "result"]


def parts(row: RowText, tokenizer: Any, where: str) -> list[tuple[str, Kind]]:
    """The parts of a row's text, up to the last answer, each with its kind: prompt, answer, or result of a tool.

    The chat template makes the text of messages. An answer is what the template adds to the prompt that it writes
    before
    it: the message and its end. Raises ValueError for a template that refuses the messages, changes earlier ones or
    does not support tools, and for a message that contains a special token, which would be read as one.
    """
    held = [(f"a message by {m['role']!r}", m["content"]) for m in row.messages]
    held += [("a call", json.dumps(m["tool_calls"], ensure_ascii=False)) for m in row.messages if m.get("tool_calls")]
    held += [("a tool", json.dumps(row.tools, ensure_ascii=False))] if row.tools else []
    held += [("the trace", row.trace)] if row.trace is not None else []
    for what, text in held:
        inside = [token for token in tokenizer.all_special_tokens if token in text]
        if inside:
            raise ValueError(
                f"{where}: {what} holds the special token {inside[0]!r}, which would be read as one; remove it"
            )
    if row.trace is not None:
        found = spans(row.trace.rstrip(), where)
        inner: list[tuple[str, Kind]] = [(text, "answer" if written else "result") for text, written in found[1:]]
        inner[-1] = (inner[-1][0] + tokenizer.eos_token, "answer")
        return [(f"{tokenizer.bos_token or ''}{found[0][0]}", "prompt"), *inner]
    called = [message for message in row.messages if message.get("tool_calls")]
    if (called or row.tools) and not takes_tools(tokenizer):
        raise ValueError(
            f"{where}: it has tools, and the chat template has no place for them; set task.template: react"
        )
    if called and row.messages[-1]["role"] != "assistant":
        raise ValueError(f"{where}: an unclosed Observation: no answer by 'assistant' follows what the tool returned")
    return _rendered(row, tokenizer, where)


def _rendered(row: RowText, tokenizer: Any, where: str) -> list[tuple[str, Kind]]:
    """The parts of messages. Text between two answers is a result if it contains a tool's result."""
    messages, tools = row.messages, {"tools": row.tools} if row.tools else {}
    found: list[tuple[str, Kind]] = []
    text, read = "", 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        kind: Kind = "result" if any(m["role"] == "tool" for m in messages[read:index]) else "prompt"
        try:
            before = tokenizer.apply_chat_template(
                messages[:index], tokenize=False, add_generation_prompt=True, **tools
            )
            after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False, **tools)
        except (jinja2.TemplateError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"{where}: the chat template refuses these messages ({error})") from None
        if not (before.startswith(text) and after.startswith(before)):
            raise ValueError(
                f"{where}: the chat template changes earlier messages when an answer follows; give one answer a row"
            )
        found += [(before[len(text) :], kind), (after[len(before) :], "answer")]
        text, read = after, index + 1
    return found


@torch.no_grad()
def answers(model: Any, questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    """Greedy answers as token ids, each at most as long as the right answer, in the order of the questions."""
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
    """Batches of question indices that fit into the model's positions, grouped by the length of their answers."""
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
    """Whether an answer has the right answer's text, and an end token if that has one."""
    special = set(tokenizer.all_special_ids)
    said, right = ([*takewhile(lambda token: token not in special, ids)] for ids in (found, question.answer))
    ended = len(said) < len(found) or len(right) == len(question.answer)
    return ended and tokenizer.decode(said) == tokenizer.decode(right)


def _question(row: Row) -> Question:
    return Question(tuple(row.tokens[: row.last].tolist()), tuple(row.tokens[row.last :].tolist()))


def _cut(source: Source, counts: dict[str, int], size: int, more: str = "") -> list[str]:
    """Sentences that say how many rows were too long, and were cut or left out."""
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
