"""A new T5 or LongT5 of ours starts as transformers' own does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, LongT5Config, T5Config

from fathom.models.encoder_configs import FathomLongT5Config, FathomT5Config

SHAPE = {
    "vocab_size": 64, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(("own", "stock"), [(FathomT5Config, T5Config), (FathomLongT5Config, LongT5Config)])
def test_every_tensor_has_the_standard_deviation_of_stock(own, stock):
    torch.manual_seed(0)
    ours, theirs = (AutoModelForSeq2SeqLM.from_config(kind(**SHAPE)) for kind in (own, stock))
    found, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            assert (found[name].std() / tensor.std()).item() == pytest.approx(1, abs=0.35), name
        else:
            torch.testing.assert_close(found[name], tensor)


def test_embedding_std_is_that_of_new_embeddings_alone():
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(FathomT5Config(**SHAPE, embedding_std=0.1))
    assert model.shared.weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert model.encoder.embed_tokens.weight is model.lm_head.weight is model.shared.weight
    assert model.encoder.block[0].layer[0].SelfAttention.k.weight.std().item() == pytest.approx(48**-0.5, rel=0.1)
