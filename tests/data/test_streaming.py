"""The stream of blocks: order from the seed, and the same order after a resume."""

from __future__ import annotations

import hashlib
import itertools
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


def digest(blocks: list) -> str:
    return hashlib.sha256(torch.stack([block["input_ids"] for block in blocks]).numpy().tobytes()).hexdigest()


def one_pass(blocks: StreamingBlocks) -> list:
    return list(itertools.takewhile(lambda _: blocks.state_dict()["pass"] == 0, blocks))


def documents_of(blocks: list, tokenizer) -> list[str]:
    tokens = torch.cat([block["labels"] for block in blocks])
    return tokenizer.decode(tokens[tokens != -100]).split("<|endoftext|>")[:-1]


def test_every_document_once_a_pass_in_an_order_set_by_the_seed(stream, tokenizer) -> None:
    first = one_pass(stream())
    documents = documents_of(first, tokenizer)
    assert documents != TEXTS and sorted(documents) == sorted(TEXTS)
    assert digest(one_pass(stream())) == digest(first)
    assert digest(one_pass(stream(seed=1))) != digest(first)
    second = list(itertools.islice(stream(), len(first), 2 * len(first)))
    assert sorted(documents_of(second, tokenizer)) == sorted(TEXTS) and digest(second) != digest(first)


@pytest.mark.parametrize("taken", [0, 1, 17, 150])
def test_resume_by_state(stream, taken: int) -> None:
    whole = list(itertools.islice(stream(), 250))
    first = stream()
    assert len(list(itertools.islice(first, taken))) == taken
    state = json.loads(json.dumps(first.state_dict()))
    assert state["pass"] == int(taken > len(one_pass(stream())))
    resumed = stream()
    resumed.load_state_dict(state)
    assert digest(list(itertools.islice(resumed, 250 - taken))) == digest(whole[taken:])


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_by_skipping_batches_as_the_trainer_does(stream, workers: int) -> None:
    def batches() -> DataLoader:
        context = "fork" if workers else None
        return DataLoader(
            stream(), batch_size=4, collate_fn=collate, num_workers=workers, multiprocessing_context=context
        )

    whole = [batch["input_ids"] for batch in itertools.islice(batches(), 50)]  # more than one pass
    rest = [batch["input_ids"] for batch in itertools.islice(skip_first_batches(batches(), 40), 10)]
    assert all(torch.equal(a, b) for a, b in zip(whole[40:], rest, strict=True))


def test_workers_share_the_documents(stream, tokenizer) -> None:
    loader = DataLoader(stream(keep_remainder=False), batch_size=None, num_workers=2, multiprocessing_context="fork")
    blocks = list(itertools.islice(loader, 60))  # the loader takes turns; less than one pass of each worker
    shares = [tokenizer.decode(torch.cat([block["input_ids"] for block in blocks[worker::2]])) for worker in (0, 1)]
    for share, own in zip(shares, (TEXTS[0::2], TEXTS[1::2]), strict=True):
        whole = share.split("<|endoftext|>")[:-1]
        assert len(whole) > 10 and set(whole) <= set(own)


def test_max_tokens_ends_the_pass(stream) -> None:
    assert len(one_pass(stream(max_tokens=100))) == 6


def test_more_workers_than_documents(source, tokenizer) -> None:
    few = Source(source.name, max_documents=1)
    blocks = StreamingBlocks(few, tokenizer, DataConfig(block_size=8, streaming=True))
    loader = DataLoader(blocks, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert len(list(itertools.islice(loader, 20))) == 20
