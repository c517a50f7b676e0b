"""Documents to token ids to fixed-length blocks: in an Arrow file on disk, or as a stream.

Every document ends with the EOS token. The documents of a text are concatenated and cut every `block_size` tokens, so a
document may span blocks. Tokens left over at the end are dropped, or padded to a block (`keep_remainder`). A block has

    input_ids     [T]  token ids
    position_ids  [T]  with document_mask: 0, 1, 2, … from the start of the block and again from the start of every
                       document in it. transformers' mask builder reads these as documents that do not see each other.
    labels        [T]  with keep_remainder: the token ids, and -100 where the block is padding

The model shifts labels by one inside, so a block has T - 1 targets and its first token is context only.
"""

from __future__ import annotations

import bisect
import functools
import os
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fathom.data.config import DataConfig
from fathom.data.sources import Source
from fathom.data.tokenizer import is_byte_level

IGNORED = -100  # the label that transformers' losses skip
_PIECE_CHARACTERS = 1_000_000
_OPEN_BLOCKS = 32  # that further examples may fit in
_TIGHT_EXAMPLES = 4096  # packed at once
_WRITE_BLOCKS = 256  # held in memory at once
_WRITE_CHARACTERS = 16_000_000  # text held in memory at once while it is written to disk
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


class Span(NamedTuple):
    """A stretch of the token stream: ids [n], and True [n] where a document begins."""

    tokens: np.ndarray
    starts: np.ndarray


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids of each text, nothing added. "<|endoftext|>" and the like in a text are ordinary characters."""
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def tokenise(source: Source, tokenizer: PreTrainedTokenizerFast, work: Path, num_proc: int | None) -> Iterator[Span]:
    """The token stream of `source` by `num_proc` processes (None: one a usable core), through Arrow files in `work`."""
    _write_pieces(source, work / "documents.arrow", is_byte_level(tokenizer))
    documents = datasets.Dataset.from_file(str(work / "documents.arrow"))
    processes = min(num_proc or _usable_cores(), len(documents))
    # a process gets rows that lie together, and so would one get all the books: deal them out like cards
    order = np.argsort(np.arange(len(documents)) % processes, kind="stable")
    with _no_threads_in_forks(processes):
        tokens = documents.select(order).map(
            functools.partial(_encode_pieces, tokenizer=tokenizer),
            batched=True,
            batch_size=32,
            num_proc=processes if processes > 1 else None,
            remove_columns=["text", "end"],
            features=datasets.Features(
                {"input_ids": datasets.List(datasets.Value("int32")), "start": datasets.Value("bool")}
            ),
            cache_file_name=str(work / "tokens.arrow"),
            desc=f"Tokenising {source.argument}",
        )
    for table in tokens.select(np.argsort(order)).with_format("arrow").iter(batch_size=1000):
        pieces = table["input_ids"].combine_chunks()
        offsets = pieces.offsets.to_numpy()
        starts = np.zeros(offsets[-1] - offsets[0], dtype=bool)
        starts[offsets[:-1] - offsets[0]] = table["start"].to_numpy()
        yield Span(pieces.flatten().to_numpy(), starts)


def pack(spans: Iterable[Span], config: DataConfig, eos_token_id: int) -> Iterator[dict[str, np.ndarray]]:
    """Columns [n, T] of the blocks of a token stream; each span yields the blocks that it completes."""
    size = config.block_size
    tokens, starts = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool)
    for span in spans:
        tokens, starts = np.concatenate([tokens, span.tokens]), np.concatenate([starts, span.starts])
        whole = len(tokens) // size * size
        if whole:
            yield _columns(tokens[:whole], starts[:whole], config)
        tokens, starts = tokens[whole:], starts[whole:]
    if config.keep_remainder and len(tokens):
        padding = size - len(tokens)
        columns = _columns(
            np.pad(tokens, (0, padding), constant_values=eos_token_id), np.pad(starts, (0, padding)), config
        )
        columns["labels"][:, len(tokens) :] = IGNORED
        yield columns


class Example(NamedTuple):
    """A row of training data by itself: ids [n], and labels [n], which are the ids or `IGNORED`."""

    tokens: np.ndarray
    labels: np.ndarray


def pack_examples(
    examples: Iterable[Example], block_size: int, eos_token_id: int, together: bool, tight: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Columns [n, T] of blocks that hold whole examples, each of at most `block_size` tokens.

    together: a block holds several examples, each (and the padding at its end) a document of its own by position ids;
        an example goes to the first open block with room. Otherwise a block holds one example, padded at its end, where
        tokens of a causal model do not see the padding.
    tight: some thousand examples are sorted, longest first, and each goes to the fullest block with room.
    """
    if together and tight:
        left = iter(examples)
        while some := list(islice(left, _TIGHT_EXAMPLES)):
            blocks = [[some[i] for i in block] for block in best_fit([len(e.tokens) for e in some], block_size)]
            yield _example_columns(blocks, block_size, eos_token_id, together)
        return
    closed: list[list[Example]] = []
    opened: list[list[Example]] = []
    for example in examples:
        fits = (block for block in opened if sum(len(e.tokens) for e in block) + len(example.tokens) <= block_size)
        block = next(fits, None) if together else None
        if block is None:
            opened.append([example])
        else:
            block.append(example)
        if len(opened) > _OPEN_BLOCKS:
            closed.append(opened.pop(0))
        if len(closed) == _WRITE_BLOCKS:
            yield _example_columns(closed, block_size, eos_token_id, together)
            closed = []
    if closed or opened:
        yield _example_columns(closed + opened, block_size, eos_token_id, together)


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Indices of lengths, grouped into blocks of at most `size` in sum: longest first, each into the
    fullest with room.
    """
    blocks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (left, block), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(room, (lengths[index], 0))
        left, block = room.pop(place) if place < len(room) else (size, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(index)
        bisect.insort(room, (left - lengths[index], block))
    return blocks


def write_blocks(columns: Iterable[dict[str, np.ndarray]], path: Path, max_blocks: int | None = None) -> int:
    """Write blocks to an Arrow file that `datasets.Dataset.from_file` maps into memory. Returns their number."""
    written, writer = 0, None
    try:
        for arrays in columns:
            room = None if max_blocks is None else max_blocks - written
            batch = pa.record_batch({name: _fixed_size_lists(array[:room]) for name, array in arrays.items()})
            writer = writer or pa.ipc.new_stream(str(path), batch.schema)
            writer.write_batch(batch)
            written += len(batch)
            if written == max_blocks:
                break
    finally:
        if writer:
            writer.close()
    return written


def target_tokens(blocks: datasets.Dataset, byte_lengths: Int[Tensor, " vocab"]) -> tuple[int, int]:
    """Number of target tokens of the blocks, and the bytes of text that these stand for (EOS: a target of no bytes)."""
    lengths = byte_lengths.numpy()
    targets = total = 0
    column = "labels" if "labels" in blocks.column_names else "input_ids"
    for table in blocks.with_format("arrow").iter(batch_size=1000):
        for chunk in table[column].chunks:
            labels = chunk.flatten().to_numpy().reshape(len(chunk), -1)[:, 1:]
            labels = labels[labels != IGNORED]
            targets += labels.size
            total += int(lengths[labels].sum())
    return targets, total


def collate(blocks: list[dict[str, Any]]) -> dict[str, Int[Tensor, "batch block"]]:
    """A batch for the model, int64: the columns of the blocks, and `labels` = `input_ids` where they have none."""
    batch = {
        name: torch.stack([torch.as_tensor(block[name], dtype=torch.int64) for block in blocks]) for name in blocks[0]
    }
    batch.setdefault("labels", batch["input_ids"].clone())
    return batch


class StreamingBlocks(torch.utils.data.IterableDataset):
    """Blocks tokenised while they are read, without end; nothing is kept on disk.

    The text is passed over again and again (the Trainer needs `max_steps`). In each pass its documents are shuffled
    within a buffer of `config.shuffle_buffer` by (seed, pass). The order is a function of these alone: a resumed run
    restores it by skipping, whether the Trainer skips batches or `load_state_dict` skips blocks. The stream is one
    endless epoch, because the Trainer, when it skips, counts all steps of a stream as one epoch. With W data-loader
    workers each takes every W-th document and they fill batches in turn, so the order also depends on W and, with two
    or more workers, on the number of processes that share a batch.
    """

    def __init__(self, source: Source, tokenizer: PreTrainedTokenizerFast, config: DataConfig) -> None:
        self.source, self.tokenizer, self.config = source, tokenizer, config
        self._start = self._state = {"pass": 0, "blocks": 0}

    def state_dict(self) -> dict[str, int]:
        """The position of the newest iteration, in the process that iterates: the pass, and its blocks
        yielded so far.
        """
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let every later iteration begin after the block in `state`."""
        self._start = self._state = state

    def __iter__(self) -> Iterator[dict[str, Int[Tensor, " block"]]]:
        worker = torch.utils.data.get_worker_info()
        share = (worker.id, worker.num_workers) if worker else (0, 1)
        self._state = self._start
        for number in count(self._start["pass"]):
            skipped = self._start["blocks"] if number == self._start["pass"] else 0
            blocks = 0
            for block in self._blocks(number, *share):
                blocks += 1
                if blocks > skipped:
                    self._state = {"pass": number, "blocks": blocks}
                    yield block
            if not blocks and worker:
                return  # fewer documents than workers: the others have some
            if not blocks:
                raise too_short(self.source, self.config.block_size)

    def _blocks(self, number: int, worker: int, workers: int) -> Iterator[dict[str, Int[Tensor, " block"]]]:
        """One pass over this worker's share of the documents."""
        share = islice(self.source.documents(), worker, None, workers)
        documents = _shuffled(share, self.config.shuffle_buffer, random.Random(f"{self.config.seed} {number}"))
        columns = pack(_encode_documents(documents, self.tokenizer), self.config, self.tokenizer.eos_token_id)
        blocks = (
            {name: torch.from_numpy(array[row].astype(np.int64)) for name, array in arrays.items()}
            for arrays in columns
            for row in range(len(arrays["input_ids"]))
        )
        return islice(blocks, self.config.max_tokens and self.config.max_tokens // self.config.block_size)


def too_short(source: Source, block_size: int) -> ValueError:
    """The error of a text that fills no block."""
    return ValueError(
        f"{source.argument}={source.name!r}: shorter than one block of {block_size} tokens: use more text, "
        "a smaller data.block_size, or data.keep_remainder to pad"
    )


def _columns(tokens: np.ndarray, starts: np.ndarray, config: DataConfig) -> dict[str, np.ndarray]:
    columns = {"input_ids": tokens.reshape(-1, config.block_size)}
    if config.document_mask:
        starts = starts.reshape(-1, config.block_size).copy()
        starts[:, 0] = True
        index = np.arange(config.block_size, dtype=np.int32)
        columns["position_ids"] = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    if config.keep_remainder:
        columns["labels"] = columns["input_ids"].copy()
    return columns


def _example_columns(
    blocks: list[list[Example]], block_size: int, eos_token_id: int, together: bool
) -> dict[str, np.ndarray]:
    shape = (len(blocks), block_size)
    columns = {"input_ids": np.full(shape, eos_token_id, np.int32), "labels": np.full(shape, IGNORED, np.int32)}
    if together:
        columns["position_ids"] = np.zeros(shape, np.int32)
    for row, block in enumerate(blocks):
        lengths = [len(example.tokens) for example in block]
        used = sum(lengths)
        columns["input_ids"][row, :used] = np.concatenate([example.tokens for example in block])
        columns["labels"][row, :used] = np.concatenate([example.labels for example in block])
        if together:
            columns["position_ids"][row] = np.concatenate([np.arange(n) for n in (*lengths, block_size - used)])
    return columns


def _fixed_size_lists(array: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(array.astype(np.int32).ravel(), array.shape[1])


def _pieces(document: str) -> Iterator[str]:
    """Cut a document about every `_PIECE_CHARACTERS` before a space between two letters.

    Every byte-level tokenizer splits there, too, so the pieces have the same tokens as the document. Without pieces, a
    file of a gigabyte would be tokenised in one call on one core, with memory of a hundred times its size.
    """
    begin = 0
    while cut := _BETWEEN_WORDS.search(document, begin + _PIECE_CHARACTERS):
        yield document[begin : cut.start()]
        begin = cut.start()
    yield document[begin:]


def _write_pieces(source: Source, path: Path, cut: bool) -> None:
    """The documents, cut into pieces or whole, as an Arrow file that processes can share.

    Columns: `text`, and whether the piece is the `start` and the `end` of its document. Raises ValueError if there is
    no document.
    """
    schema = pa.schema({"text": pa.large_string(), "start": pa.bool_(), "end": pa.bool_()})
    with pa.ipc.new_stream(str(path), schema) as writer:
        rows: list[dict[str, Any]] = []
        characters = documents = 0
        for document in source.documents():
            texts = list(_pieces(document)) if cut else [document]
            rows += ({"text": text, "start": i == 0, "end": i == len(texts) - 1} for i, text in enumerate(texts))
            characters += len(document)
            documents += 1
            if characters >= _WRITE_CHARACTERS:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
                rows, characters = [], 0
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    if not documents:
        raise ValueError(f"{source.argument}={source.name!r}: holds no text")


def _encode_pieces(rows: dict[str, list[Any]], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Any]]:
    tokens = encode(rows["text"], tokenizer)
    return {
        "input_ids": [
            [*ids, tokenizer.eos_token_id] if end else ids for ids, end in zip(tokens, rows["end"], strict=True)
        ],
        "start": rows["start"],
    }


def _encode_documents(documents: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[Span]:
    while some := list(islice(documents, 16)):
        for ids in encode(some, tokenizer):
            tokens = np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)
            yield Span(tokens, np.arange(len(tokens)) == 0)


def _shuffled(documents: Iterator[str], size: int, generator: random.Random) -> Iterator[str]:
    """The documents in shuffled order: each new one replaces a random one of a full buffer, which is emptied at the
    end.
    """
    buffer = list(islice(documents, size))
    for document in documents:
        index = generator.randrange(size)
        yield buffer[index]
        buffer[index] = document
    generator.shuffle(buffer)
    yield from buffer


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _no_threads_in_forks(processes: int) -> Iterator[None]:
    """A context that turns off tokenizers' threads before a fork, which they do not survive, and so avoids warnings."""
    name = "TOKENIZERS_PARALLELISM"
    if processes == 1 or name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
