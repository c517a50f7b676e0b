"""A DataConfig out of range names the field, the value and what would be right."""

from __future__ import annotations

import pytest

from fathom.data import DataConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ""}, r"data\.train is empty: name a file"),
        ({"tokenizer": {"wordpiece": 100}}, r"data\.tokenizer=\{'wordpiece': 100\}: give a folder"),
        ({"tokenizer": {"bpe": 256}}, r"data\.tokenizer\.bpe=256: needs a whole number of at least 257"),
        ({"tokenizer": ""}, r"data\.tokenizer is empty"),
        ({"block_size": 1}, r"data\.block_size=1: needs a whole number of at least 2"),
        ({"block_size": "512"}, r"data\.block_size='512'"),
        ({"max_tokens": 100}, r"data\.max_tokens=100: needs a whole number of at least 512"),
        ({"max_validation_tokens": 100}, r"data\.max_validation_tokens=100"),
        ({"max_documents": 0}, r"data\.max_documents=0"),
        ({"shuffle_buffer": 0}, r"data\.shuffle_buffer=0"),
        ({"num_proc": 0}, r"data\.num_proc=0"),
    ],
)
def test_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)
