"""From a DataConfig to blocks: what the blocks hold, the cache, and the messages for text that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers.masking_utils import find_packed_sequence_indices

from fathom.data import DataConfig, PreparedData, Source, collate, prepare, prepared

TRAIN = [f"Day {n}: the sun rose “late”, naïve and red 🙂.\n\n" * (n % 4 + 1) for n in range(40)]
VALIDATION = ["Snow fell on the hill. 雪", "Ships sailed — <|endoftext|> — home."] * 9


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    return {"train": rows(tmp_path / "train.jsonl", TRAIN), "validation": rows(tmp_path / "held.jsonl", VALIDATION)}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def rows(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def config(texts: dict[str, str], **options: object) -> DataConfig:
    return DataConfig(**(texts | {"tokenizer": {"bpe": 320}, "block_size": 16, "num_proc": 1} | options))  # type: ignore


def stream_of(blocks: object) -> list[int]:
    return [token for block in blocks for token in block["input_ids"].tolist()]  # type: ignore[attr-defined]


def documents_of(stream: list[int], data: PreparedData) -> list[str]:
    """The text that a token stream decodes to, cut at EOS: an oracle that knows nothing of packing."""
    documents: list[list[int]] = [[]]
    for token in stream:
        if token == data.tokenizer.eos_token_id:
            documents.append([])
        else:
            documents[-1].append(token)
    return [data.tokenizer.decode(tokens) for tokens in documents]


def test_blocks_decode_to_the_text_and_the_remainder_is_dropped(texts: dict[str, str], cache: Path) -> None:
    data = prepare(config(texts), cache)
    documents = documents_of(stream_of(data.train), data)
    assert documents[:-1] == TRAIN[: len(documents) - 1]
    rest = "".join(TRAIN[len(documents) - 1 :])
    assert rest.startswith(documents[-1])
    lost = data.tokenizer(rest[len(documents[-1]) :], add_special_tokens=False)["input_ids"]
    assert len(lost) < 16
    assert data.train.column_names == ["input_ids"]


def test_kept_remainder_is_padded_and_not_a_target(texts: dict[str, str], cache: Path) -> None:
    data = prepare(config(texts, keep_remainder=True), cache)
    batch = collate(list(data.train))
    tokens = batch["input_ids"][batch["labels"] != -100].tolist()
    assert documents_of(tokens, data) == [*TRAIN, ""]
    assert set(batch["input_ids"][batch["labels"] == -100].tolist()) <= {data.tokenizer.eos_token_id}
    assert (batch["labels"] == -100).sum() < 16


@pytest.mark.parametrize("keep_remainder", [False, True])
def test_validation_bytes_are_those_of_the_targets(
    texts: dict[str, str], tmp_path: Path, cache: Path, keep_remainder: bool
) -> None:
    held = [f"Plain letters, so that every token of text {n} decodes alone." for n in range(9)]
    options = {"validation": rows(tmp_path / "ascii.jsonl", held), "keep_remainder": keep_remainder}
    data = prepare(config(texts, **options), cache)
    labels = collate(list(data.validation))["labels"]
    sizes = {
        token: len(data.tokenizer.decode([token], skip_special_tokens=True))
        for token in labels.unique().tolist()
        if token != -100
    }
    targets = [token for token in labels[:, 1:].flatten().tolist() if token != -100]
    assert data.validation_targets == len(targets)
    assert data.validation_bytes == sum(sizes[token] for token in targets)
    if keep_remainder:  # every token is in a block, so the size of the text is known without looking at targets
        assert data.validation_bytes == sum(map(len, held)) - sum(sizes[token] for token in labels[:, 0].tolist())


def test_document_mask_restarts_positions(texts: dict[str, str], cache: Path) -> None:
    data = prepare(config(texts, document_mask=True), cache)
    batch = collate(list(data.train))
    eos = data.tokenizer.eos_token_id
    for tokens, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        expected, position = [], 0
        for token in tokens:
            expected.append(position)
            position = 0 if token == eos else position + 1
        assert positions == expected
    # transformers' own reading of these positions: an EOS anywhere but at the end of a block begins a document
    documents = find_packed_sequence_indices(batch["position_ids"])
    assert torch.equal(documents[:, -1], (batch["input_ids"][:, :-1] == eos).sum(-1))


def test_result_does_not_depend_on_processes_or_pieces(
    texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(config(texts, document_mask=True), tmp_path / "one").train
    monkeypatch.setattr("fathom.data.packing._PIECE_CHARACTERS", 20)
    monkeypatch.setattr("fathom.data.packing._WRITE_CHARACTERS", 100)
    pieces = prepare(config(texts, document_mask=True, num_proc=2), tmp_path / "two").train
    assert whole[:].keys() == pieces[:].keys()
    assert all(torch.equal(whole[:][name], pieces[:][name]) for name in ("input_ids", "position_ids"))


def test_limits(texts: dict[str, str], cache: Path) -> None:
    data = prepare(config(texts, max_tokens=50, max_validation_tokens=33, max_documents=9), cache)
    assert len(data.train) == 3 and len(data.validation) == 2
    few = prepare(config(texts, max_documents=2, tokenizer=str(next(cache.glob("tokenizer-*[!k]")))), cache)
    assert documents_of(stream_of(few.train), few)[0] == TRAIN[0]
    assert len(stream_of(few.train)) <= len("".join(TRAIN[:2]))


def test_cache_is_found_again_and_follows_content(texts: dict[str, str], cache: Path) -> None:
    def entries() -> set[str]:
        return {path.name for path in cache.iterdir() if not path.name.endswith(".lock")}

    prepare(config(texts), cache)
    before = entries()
    assert len(before) == 3  # tokenizer, train, validation; no scratch
    prepare(config(texts, num_proc=2, seed=3), cache)
    assert entries() == before
    prepare(config(texts, block_size=17), cache)
    assert len(entries()) == 5
    rows(Path(texts["train"]), [text.replace("sun", "moon") for text in TRAIN])
    prepare(config(texts), cache)
    assert len(entries()) == 8  # another tokenizer, so all three again


def test_killed_run_leaves_nothing_that_counts(texts: dict[str, str], cache: Path) -> None:
    prepare(config(texts, block_size=20), cache)  # the tokenizer is there; blocks of 16 are not
    finished = {path.name for path in cache.iterdir()}
    child = os.fork()
    if child == 0:
        write = prepared.write_blocks

        def write_and_hang(*arguments: object) -> int:
            write(*arguments)  # type: ignore[arg-type]
            time.sleep(600)
            return 0

        prepared.write_blocks = write_and_hang  # type: ignore[assignment]
        prepare(config(texts), cache)
        os._exit(0)
    deadline = time.monotonic() + 60
    while not list(cache.glob("blocks-*.partial/blocks.arrow")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = {path.name for path in cache.iterdir()} - finished
    assert any(name.endswith(".partial") for name in left)
    assert all(name.endswith((".partial", ".lock")) for name in left)
    again = prepare(config(texts), cache)
    fresh = prepare(config(texts), cache.with_name("fresh"))
    assert stream_of(again.train) == stream_of(fresh.train)
    assert not list(cache.glob("*.partial"))


def test_processes_that_start_together_build_once(cache: Path) -> None:
    cache.mkdir()
    built = []

    def build(work: Path) -> None:
        built.append(work)
        time.sleep(0.1)

    threads = [threading.Thread(target=prepared.build_once, args=(cache / "entry", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and (cache / "entry").is_dir()


def test_failed_build_leaves_no_entry(texts: dict[str, str], cache: Path) -> None:
    cache.mkdir()

    def build(work: Path) -> None:
        (work / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        prepared.build_once(cache / "entry", build)
    assert [path.name for path in cache.iterdir()] in ([], ["entry.lock"])


@pytest.mark.parametrize("streaming", [False, True])
def test_text_shorter_than_one_block(texts: dict[str, str], cache: Path, streaming: bool) -> None:
    short = config(texts, block_size=5000, streaming=streaming, validation=None)
    with pytest.raises(
        ValueError, match=r"data\.train='.*train\.jsonl': shorter than one block of 5000 tokens: use more"
    ):
        list(prepare(short, cache).train)


def test_empty_text(texts: dict[str, str], tmp_path: Path, cache: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(ValueError, match=r"data\.validation='.*empty\.txt': holds no text"):
        prepare(config(texts, validation=str(empty)), cache)
    with pytest.raises(ValueError, match=r"data\.train='.*empty\.txt': holds no text"):
        prepare(config(texts, train=str(empty)), cache)


def test_held_out_text_in_the_training_text_is_refused(texts: dict[str, str], tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.validation='.*held\.jsonl': .* is also in data\.train"):
        prepare(config(texts, train=str(tmp_path)), cache)


def test_embedded_corpus_end_to_end(cache: Path) -> None:
    data = prepare(DataConfig(tokenizer={"bpe": 400}, block_size=128, max_documents=2), cache)
    batch = collate([data.train[0], data.train[1]])
    assert batch["input_ids"].shape == (2, 128) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    first = next(Source("embedded").documents())
    assert first.startswith(data.tokenizer.decode(batch["input_ids"].flatten()))
