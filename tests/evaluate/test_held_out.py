"""The held-out loss in pieces, against a count of every token by itself; and the interval drawn from them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fathom import FathomForCausalLM
from fathom.data import DataConfig, prepare
from fathom.evaluate.held_out import PIECES, bits_of_pieces, bootstrap
from fathom.tasks import lookup
from tiny import tiny_model

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "sat", "by", "it", "in", "silence", "naïve"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("pieces"), np.random.default_rng(0)
    for name, count in (("train", 20), ("held-out", 14)):
        texts = [" ".join(generator.choice(WORDS, generator.integers(3, 40))) for _ in range(count)]
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    config = DataConfig(str(folder / "train.jsonl"), str(folder / "held-out.jsonl"), tokenizer={"bpe": 280},
                        block_size=16, num_proc=1)  # fmt: skip
    return prepare(config, folder / ".data")


@pytest.fixture(scope="module")
def model() -> FathomForCausalLM:
    return tiny_model(vocab_size=280)


@torch.no_grad()
def test_pieces_are_documents_and_sum_to_the_score(data, model) -> None:
    task = lookup("causal_lm")()
    found = task.pieces(model, data)
    end, bits, sizes, document = data.tokenizer.eos_token_id, {}, {}, 0
    for block in data.validation:  # token by token: whose it is, what it costs, how many bytes it is
        ids = block["input_ids"].tolist()
        log = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for place, token in enumerate(ids):
            if place:
                bits[document] = bits.get(document, 0.0) - log[place - 1, token].item() / math.log(2)
                text = data.tokenizer.convert_ids_to_tokens(token)
                sizes[document] = sizes.get(document, 0) + (0 if token == end else len(text))  # a byte a letter
            document += token == end
    scored = [key for key in bits if sizes[key] > 0]
    assert found.unit == "documents" and found.weights == [sizes[key] for key in scored] and len(scored) > 8
    assert found.values == pytest.approx([bits[key] for key in scored], abs=2e-3)
    targets = sum(len(block["input_ids"]) - 1 for block in data.validation)
    loss = sum(bits.values()) * math.log(2) / targets
    assert sum(bits.values()) / sum(found.weights) == pytest.approx(task.score(data, loss, None)["bits_per_byte"])


def test_few_documents_give_blocks_and_many_are_put_together(data, model, monkeypatch) -> None:
    collate = lookup("causal_lm")().collate
    monkeypatch.setattr("fathom.evaluate.held_out.FEWEST", 1000)
    blocks = bits_of_pieces(model, data, collate)
    assert blocks.unit == "blocks" and len(blocks.values) == len(data.validation)
    monkeypatch.setattr("fathom.evaluate.held_out.FEWEST", 8)
    monkeypatch.setattr("fathom.evaluate.held_out.PIECES", 5)
    some = bits_of_pieces(model, data, collate)
    assert len(some.values) == 5 < PIECES
    assert sum(some.values) == pytest.approx(sum(blocks.values), abs=0.01) and sum(some.weights) == sum(blocks.weights)
    assert bits_of_pieces(model, dataclasses.replace(data, validation=None), collate) is None


def test_the_interval_is_that_of_the_mean() -> None:
    """With many equal weights the interval is the mean ± 1.96 standard errors."""
    differences = np.random.default_rng(1).normal(0.3, 2.0, 400)
    low, high = bootstrap(differences.tolist(), [1.0] * 400)
    error = differences.std() / math.sqrt(400)
    assert (low, high) == pytest.approx(
        (differences.mean() - 1.96 * error, differences.mean() + 1.96 * error), abs=0.02
    )
    assert bootstrap([2.0, 4.0], [1.0, 2.0]) == (2.0, 2.0)  # a constant ratio has no spread
