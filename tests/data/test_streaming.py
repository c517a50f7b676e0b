"""The stream of blocks: order from the seed, and the same order after a resume."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from fathom.data import DataConfig, Source, StreamingBlocks, collate, train_bpe

TEXTS = [f"Document {n} tells of {'rain ' * (n % 7)}and of the number {n * n}." for n in range(80)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Source(str(path))


@pytest.fixture(scope="module")
def tokenizer(source: Source):
    return train_bpe(source.documents(), 300)


@pytest.fixture
def stream(source: Source, tokenizer):
    def make(**options: object) -> StreamingBlocks:
        defaults: dict = {"block_size": 16, "shuffle_buffer": 20, "keep_remainder": True, "streaming": True}
        return StreamingBlocks(source, tokenizer, DataConfig(**(defaults | options)))

    return make


def digest(blocks) -> str:
    return hashlib.sha256(torch.stack([block["input_ids"] for block in blocks]).numpy().tobytes()).hexdigest()


def test_every_document_once_in_an_order_set_by_seed_and_epoch(stream, tokenizer) -> None:
    blocks = list(stream())
    tokens = torch.cat([block["labels"] for block in blocks])
    text = tokenizer.decode(tokens[tokens != -100])
    documents = text.split("<|endoftext|>")[:-1]
    assert documents != TEXTS and sorted(documents) == sorted(TEXTS)
    assert digest(stream()) == digest(blocks)
    assert digest(stream(seed=1)) != digest(blocks)
    later = stream()
    later.set_epoch(1)
    assert digest(later) != digest(blocks)


@pytest.mark.parametrize("taken", [0, 1, 17])
def test_resume_by_state(stream, taken: int) -> None:
    whole = list(stream())
    first = stream()
    iterator = iter(first)
    for _ in range(taken):
        next(iterator)
    resumed = stream()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = list(resumed)
    assert digest(rest) == digest(whole[taken:])
    assert digest(resumed) == digest(whole)  # only the first iteration after loading skips


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_by_skipping_batches_as_the_trainer_does(stream, workers: int) -> None:
    def batches() -> DataLoader:
        return DataLoader(
            stream(),
            batch_size=4,
            collate_fn=collate,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )

    whole = [batch["input_ids"] for batch in batches()]
    rest = [batch["input_ids"] for batch in skip_first_batches(batches(), 3)]
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], rest, strict=True))


def test_workers_share_the_documents(stream, tokenizer) -> None:
    loader = DataLoader(stream(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    tokens = torch.cat([block["labels"] for block in loader])
    count = int((tokens == tokenizer.eos_token_id).sum())
    assert count == len(TEXTS)


def test_max_tokens_ends_the_epoch(stream) -> None:
    assert len(list(stream(max_tokens=100))) == 6
