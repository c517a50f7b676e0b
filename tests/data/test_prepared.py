"""From a DataConfig to blocks: what the blocks hold, the cache, and the messages for text that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fathom.data import DataConfig, Source, collate, prepare


def rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    train = [
        f"The {word} of day {n} came with naïve “quotes” and 雪 🙂.\n\n" * (n % 5 + 1)
        for n in range(60)
        for word in ("sun",)
    ]
    return {
        "train": rows(tmp_path / "train.jsonl", train),
        "validation": rows(
            tmp_path / "validation.jsonl", ["Snow fell on the hill.", "Ships sailed — <|endoftext|> — home."] * 9
        ),
    }


def config(texts: dict[str, str], **options: object) -> DataConfig:
    defaults: dict = {"tokenizer": {"bpe": 320}, "block_size": 16, "num_proc": 1}
    return DataConfig(**texts, **(defaults | options))


def documents_of(prepared, split: str) -> list[str]:
    """The text that the blocks decode to, cut at EOS: an oracle that knows nothing of packing."""
    stream = [token for block in getattr(prepared, split) for token in block["input_ids"].tolist()]
    eos = prepared.tokenizer.eos_token_id
    documents: list[list[int]] = [[]]
    for token in stream:
        documents[-1].append(token) if token != eos else documents.append([])
    return [prepared.tokenizer.decode(document, skip_special_tokens=False) for document in documents]


def test_embedded_corpus_end_to_end(tmp_path: Path) -> None:
    prepared = prepare(DataConfig(tokenizer={"bpe": 400}, block_size=128, max_documents=2), tmp_path)
    batch = collate([prepared.train[0], prepared.train[1]])
    assert batch["input_ids"].shape == (2, 128) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    first = next(Source("embedded").documents())
    assert first.startswith(prepared.tokenizer.decode(batch["input_ids"].flatten()))
