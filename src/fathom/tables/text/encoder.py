"""The text encoder of selectors, planners and retrievers: a given one, or a small one of our own.

The papers start from BERT-base. Where no such weights are at hand, a small BERT from scratch takes its place; its
numbers are not the papers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedConfig

from fathom.models.local_paths import refuse_absent
from fathom.tables.text.linearize import END, SEPARATOR, with_markers

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def load_encoder(
    model: str | PreTrainedConfig | None, tokenizer: Any, positions: int, seed: int = 0, **small: int
) -> tuple[Any, Any]:
    """Encoder and tokenizer: of the folder or hub name `model`, or for `tokenizer` a new one, of the config `model` or
    small.

    A table's markers become tokens. An encoder without segments (RoBERTa) gets two new ones.
    """
    encoder: Any
    if model is None:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {**SMALL, **small, "max_position_embeddings": positions}
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        encoder = BertModel(BertConfig(vocab_size=len(tokenizer), pad_token_id=pad, **sizes), add_pooling_layer=False)
    elif isinstance(model, PreTrainedConfig):
        encoder = AutoModel.from_config(model)
    else:
        refuse_absent(model, f"encoder {model!r}")
        tokenizer = with_markers(AutoTokenizer.from_pretrained(model), (SEPARATOR, END))
        encoder = AutoModel.from_pretrained(model)
        if encoder.config.vocab_size < len(tokenizer):
            encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # nobody reads what it makes, and TSDAE's decoder has none to share
    segments = getattr(encoder.embeddings, "token_type_embeddings", None)
    if segments is not None and segments.num_embeddings < 2:
        new = nn.Embedding(2, segments.embedding_dim)
        nn.init.normal_(new.weight, std=encoder.config.initializer_range)
        encoder.embeddings.token_type_embeddings, encoder.config.type_vocab_size = new, 2
    return encoder, tokenizer


def special(tokenizer: Any, *kinds: str) -> int:
    """The first special token that the tokenizer has of `kinds`, such as "cls", "bos"."""
    for kind in (*kinds, "eos", "pad"):
        found = getattr(tokenizer, f"{kind}_token_id", None)
        if found is not None:
            return int(found)
    raise ValueError(f"tokenizer: it has none of the special tokens {', '.join(kinds)}, eos, pad; add one")


def batch(
    rows: Sequence[Sequence[int]], pad: int, segments: Sequence[Sequence[int]] | None = None, left: bool = False
) -> dict[str, Tensor]:
    """Rows padded on the right, or on the left, with their mask."""
    size = max(map(len, rows))

    def filled(some: Sequence[Sequence[int]], fill: int) -> Tensor:
        fills = [[fill] * (size - len(row)) for row in some]
        return torch.tensor([[*more, *row] if left else [*row, *more] for row, more in zip(some, fills, strict=True)])

    found = {"input_ids": filled(rows, pad), "attention_mask": filled([[1] * len(row) for row in rows], 0)}
    return found if segments is None else {**found, "token_type_ids": filled(segments, 0)}
