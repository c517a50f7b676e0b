"""Predicting the next token of a text: what a language model is pretrained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from fathom.cost import forward_flops_per_token
from fathom.data import DataConfig, PreparedData, collate, prepare
from fathom.data.packing import IGNORED
from fathom.evaluate.held_out import Pieces, bits_of_pieces
from fathom.evaluate.text import bits_per_byte
from fathom.evaluate.unigram import unigram_loss
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.models.device import device_of
from fathom.tasks.base import Sample, Score, Task, register_task

SCORED_BLOCKS = 16  # a forward
OF = "bits_per_byte of "
SAMPLE_TOKENS = 60
SAMPLE_TEMPERATURE = 0.7
SAMPLE_TOP_K = 40


@register_task("causal_lm")
@dataclass(frozen=True)
class CausalLM(Task):
    """Blocks of `data.block_size` tokens of a text; every token but the first of a block is a target."""

    asked_by_lm_eval = True
    summary = "Predict the next token of a text, in packed blocks."
    scores = (
        Score(
            "bits_per_byte",
            "bits per byte",
            "lower",
            "The loss in bits over the bytes of the held-out text, in separate blocks (window and stride {block_size} "
            "tokens), whatever the tokenizer; the verb evaluate overlaps its windows, which gives tokens more context.",
        ),
    )
    held_out = "held-out text"
    loss_unit = "nats per token"
    answer = "generated token"
    cost_heading = "FLOPs per token"
    reference_name = "unigram"
    mixes = True
    pads = False
    reference_note = "The unigram model knows only how often each token occurs."
    samples_note = (
        f"Sampled at temperature {SAMPLE_TEMPERATURE} from the {SAMPLE_TOP_K} likeliest tokens, with one random seed"
    )

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        return prepare(data, cache_dir)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        """Bits per byte, and of each named held-out text by itself, as "bits_per_byte of NAME"."""
        scores = {"bits_per_byte": bits_of_loss(data, loss)}
        if data.validation_parts:
            model: Any = FathomForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
            parts = bits_of_parts(model.to(device_of()).eval(), data)
            scores.update({f"{OF}{name}": bits for name, bits in parts.items()})
        return scores

    def remarks(self, scores: Mapping[str, float | None]) -> list[str]:
        named = [f"{name.removeprefix(OF)} {bits:.4f}" for name, bits in scores.items() if name.startswith(OF) and bits]
        return [f"bits per byte: {', '.join(named)}"] if named else []

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


@torch.no_grad()
def loss_of_blocks(model: Any, blocks: datasets.Dataset, autocast: bool = False) -> float:
    """Mean loss over the targets of blocks, in nats."""
    total, count = 0.0, 0
    for first in range(0, len(blocks), SCORED_BLOCKS):
        rows = range(first, min(first + SCORED_BLOCKS, len(blocks)))
        batch = {name: tensor.to(model.device) for name, tensor in collate([blocks[i] for i in rows]).items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())
        total, count = total + float(loss) * targets, count + targets
    return total / count


def bits_of_parts(model: Any, data: PreparedData) -> dict[str, float]:
    """Bits per byte of each named held-out text."""
    assert data.validation is not None
    bits, first = {}, 0
    for part in data.validation_parts:
        loss = loss_of_blocks(model, data.validation.select(range(first, first + part.blocks)))
        bits[part.name] = bits_per_byte(loss * part.targets, part.bytes)
        first += part.blocks
    return bits


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
    """Two prompts: some words from one quarter and from three quarters into the held-out text."""
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
