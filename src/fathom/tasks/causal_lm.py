"""Predicting the next token of a text: what a language model is pretrained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fathom.cost import forward_flops_per_token
from fathom.data import DataConfig, PreparedData, prepare
from fathom.evaluate.held_out import Pieces, bits_of_pieces
from fathom.evaluate.text import bits_per_byte
from fathom.evaluate.unigram import unigram_loss
from fathom.models.configuration import FathomConfig
from fathom.tasks.base import Sample, Score, Task, register_task

SAMPLE_TOKENS = 60
SAMPLE_TEMPERATURE = 0.7
SAMPLE_TOP_K = 40


@register_task("causal_lm")
@dataclass(frozen=True)
class CausalLM(Task):
    """Blocks of `data.block_size` tokens of a text; every token but the first of a block is a target."""

    summary = "Predict the next token of a text, in packed blocks."
    scores = (
        Score(
            "bits_per_byte",
            "bits per byte",
            "lower",
            "The loss in bits over the bytes of the held-out text, in separate blocks (window and stride {block_size} "
            "tokens), whatever the tokenizer; `fathom evaluate` overlaps its windows, which gives tokens more context.",
        ),
    )
    held_out = "held-out text"
    loss_unit = "nats per token"
    answer = "generated token"
    cost_heading = "FLOPs per token"
    reference_name = "unigram"
    mixes = True
    reference_note = "The unigram model knows only how often each token occurs."
    samples_note = (
        f"Sampled at temperature {SAMPLE_TEMPERATURE} from the {SAMPLE_TOP_K} likeliest tokens, with one random seed"
    )

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        return prepare(data, cache_dir)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        return {"bits_per_byte": bits_of_loss(data, loss)}

    def pieces(self, model: Any, data: PreparedData) -> Pieces | None:
        return bits_of_pieces(model, data, self.collate)

    def reference(self, data: PreparedData, sequences: int) -> float:
        return unigram_of_blocks(data, sequences)

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        return [Sample(prompt, continuation(model, data.tokenizer, prompt, room)) for prompt in beginnings(data)]

    def answer_flops(
        self, config: FathomConfig, data: PreparedData, block_size: int, ran: Sequence[float] | None = None
    ) -> float:
        """FLOPs of one generated token, the mean over a context of `block_size`."""
        return forward_flops_per_token(config, block_size, ran=ran).matmul


def bits_of_loss(data: PreparedData, loss: float | None) -> float | None:
    """Bits per byte of the held-out examples, from their loss in nats per target."""
    return None if loss is None else loss * data.validation_targets / (math.log(2) * data.validation_bytes)


def unigram_of_blocks(data: PreparedData, sequences: int) -> float:
    """Bits per byte of the held-out blocks under the frequencies of the first `sequences` training blocks."""
    assert data.validation is not None
    seen = torch.cat([block["input_ids"] for block in itertools.islice(data.train, sequences)])
    targets = torch.cat([block.get("labels", block["input_ids"])[1:] for block in data.validation])
    return unigram(data, seen, targets[targets >= 0])


def unigram(data: PreparedData, seen: torch.Tensor, targets: torch.Tensor) -> float:
    """Bits per byte of the unigram model of the tokens `seen`, on the targets of the runs."""
    vocabulary = max(data.tokenizer.get_vocab().values()) + 1
    return bits_per_byte(unigram_loss(seen, targets, vocabulary), data.validation_bytes)


def beginnings(data: PreparedData) -> list[str]:
    """Some words from a quarter and from three quarters into the held-out text."""
    blocks = data.validation
    assert blocks is not None  # compare() has refused recipes without held-out text
    found = []
    for index in dict.fromkeys((len(blocks) // 4, 3 * len(blocks) // 4)):
        ids = blocks[index]["input_ids"]
        text = str(data.tokenizer.decode(ids[: min(24, len(ids) // 2)], skip_special_tokens=True))
        found.append(" ".join(text.split()[1:-1]))  # a block may begin, and the cut end, inside a word
    return [prompt for prompt in found if prompt]


def continuation(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, room: int) -> str:
    """A sampled continuation, of at most `room` tokens with the prompt."""
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    torch.manual_seed(0)
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        max_new_tokens=max(1, min(SAMPLE_TOKENS, room - length)),
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(ids[0, length:], skip_special_tokens=True))
