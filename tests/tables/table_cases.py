"""Small tables, a tokenizer for them, and tiny hosts, for the tests of tables/text."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fathom.data.tokenizer import train_bpe
from fathom.tables.text import Grid, Table
from fathom.tables.text.ctrlscitab import GRID_MARKERS
from fathom.tables.text.linearize import MARKERS, with_markers

FOODS = ("Thai", "Greek", "Welsh", "Fijian")
PLACES = ("river", "castle", "market", "harbour")
NAMES = tuple(first + last for first in ("Al", "Bo", "Cy", "Di") for last in ("an", "is"))
CORPUS = [
    f"{name} has {food} food by the {place}." for name in ("Fay", "Gus", "Hal") for food in FOODS for place in PLACES
]
GRID = Grid(
    ("model", "F1", "time"),
    (("our net", "27.5", "3"), ("base", "21.0", "2"), ("old", "9.25", "1")),
    "Scores of models .",
    ("our net", "27.5"),
    ("We train the net on news.", "The base is a tree.", "Time is in hours.", "Scores of our net are means."),
)


def pairs(count: int = 24) -> list[tuple[Table, str]]:
    found = []
    for number in range(count):
        name, food, place = NAMES[number % 8], FOODS[number * 3 % 4], PLACES[number // 2 % 4]
        table = Table((("name", name), ("food", food), ("near", place), ("stars", str(number % 5 + 1))))
        found.append((table, f"{name} serves {food} food near the {place}."))
    return found


@functools.cache
def tokenizer() -> Any:
    texts = [*CORPUS, *(" ".join((*table.keys, "is ;", *table.values, text)) for table, text in pairs())]
    found = train_bpe([*texts, " ".join((*GRID.header, *GRID.cells, *GRID.background, GRID.caption))], 330)
    found.add_special_tokens({"pad_token": "<pad>", "mask_token": "<mask>"})
    return with_markers(found, (*MARKERS, *GRID_MARKERS))


def host(family: str = "t5", seed: int = 0, **fields: Any) -> Any:
    """A stock model with random weights, moved off their symmetric places."""
    torch.manual_seed(seed)
    known = tokenizer()
    ids = {"pad_token_id": known.pad_token_id, "eos_token_id": known.eos_token_id, "vocab_size": len(known)}
    model: Any
    if family == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        model = T5ForConditionalGeneration(
            T5Config(**{**ids, **sizes, "decoder_start_token_id": known.pad_token_id, **fields})
        )
    elif family == "llama":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        model = LlamaForCausalLM(LlamaConfig(**{**ids, **sizes, "tie_word_embeddings": True, **fields}))
    else:
        sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
        start = {"decoder_start_token_id": known.eos_token_id, "forced_eos_token_id": known.eos_token_id}
        model = BartForConditionalGeneration(
            BartConfig(
                **{
                    **ids,
                    **sizes,
                    **start,
                    "bos_token_id": known.eos_token_id,
                    "max_position_embeddings": 256,
                    **fields,
                }
            )
        )
    return model.eval()
