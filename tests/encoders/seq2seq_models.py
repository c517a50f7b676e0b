"""Tiny stock BART and LongT5 checkpoints, made once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration, LongT5Config, LongT5ForConditionalGeneration

from tiny import perturb

VOCABULARY = 61


@functools.cache
def stock_bart() -> tuple[Path, BartForConditionalGeneration]:
    """A folder and the model in it, float32, four encoder layers."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=4, decoder_layers=1, encoder_ffn_dim=40, decoder_ffn_dim=40,
        encoder_attention_heads=3, decoder_attention_heads=3, max_position_embeddings=48, dropout=0.0,
    )  # fmt: skip
    return _saved(BartForConditionalGeneration(config))


@functools.cache
def stock_longt5(kind: str = "transient-global") -> tuple[Path, LongT5ForConditionalGeneration]:
    """The same of LongT5, two encoder layers."""
    torch.manual_seed(0)
    config = LongT5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=1, num_heads=3,
        local_radius=7, global_block_size=4, relative_attention_num_buckets=8, relative_attention_max_distance=12,
        encoder_attention_type=kind, dropout_rate=0.0, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return _saved(LongT5ForConditionalGeneration(config))


def _saved(model):
    perturb(model)
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    return folder, model.eval()


def batch(*lengths: int, target: int = 5) -> dict[str, torch.Tensor]:
    """Random sources of these lengths, padded on the right, and targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = torch.randint(3, VOCABULARY, (len(lengths), target), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
