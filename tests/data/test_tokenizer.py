"""Tokenizers: the BPE trained on the spot, bytes behind each token, and vocabularies that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.data import check_vocabulary, load_tokenizer, token_byte_lengths, train_bpe
from fathom.data.packing import encode
from fathom.data.tokenizer import tokenizer_hash

DOCUMENTS = ["The sun rose over the hill, naïve and red.\n\n  It's 雪 time 🙂!", "The rain — “fell” — on the hill."] * 5
HARD = "\x00\x7f\u00a0\u200b e\u0301\t\r\n   x <|endoftext|> 🙂\U0001f9d1\u200d\U0001f680 雪ﷺ"


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return train_bpe(DOCUMENTS, 300)


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """A BPE with byte fallback whose tokens write a space as ▁, as in Gemma's tokenizer.json."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "▁▁"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "▁")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_bpe_is_deterministic_and_survives_saving(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert tokenizer_hash(bpe) == tokenizer_hash(train_bpe(DOCUMENTS, 300))
    assert len(bpe) == 300 and bpe.eos_token_id == 0
    bpe.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert encode([HARD], loaded) == encode([HARD], bpe)
    assert loaded.eos_token_id == 0 and tokenizer_hash(loaded) == tokenizer_hash(bpe)


def test_bpe_pads_a_batch_on_the_left(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    bpe.save_pretrained(tmp_path)
    batch = load_tokenizer(str(tmp_path))(["The sun", "x"], padding=True)
    assert batch["attention_mask"][1][-1] == 1 and batch["attention_mask"][1][0] == 0


@pytest.mark.parametrize("text", [*DOCUMENTS[:2], HARD])
def test_byte_lengths_add_up_to_the_text(bpe: PreTrainedTokenizerFast, text: str) -> None:
    for tokenizer in (bpe, sentencepiece_style()):
        ids = encode([text], tokenizer)[0]
        assert int(token_byte_lengths(tokenizer)[torch.tensor(ids)].sum()) == len(text.encode())


def test_byte_lengths_of_special_and_added_tokens(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    bpe.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["naïve   "])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    lengths = token_byte_lengths(tokenizer)
    assert lengths.shape == (302,)
    assert lengths[tokenizer.convert_tokens_to_ids("naïve   ")] == len("naïve   ".encode())
    assert lengths[tokenizer.pad_token_id] == lengths[tokenizer.eos_token_id] == 0


def test_byte_lengths_refuse_a_tokenizer_that_loses_text() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"neither byte-level nor has it byte fallback \(model WordPiece\)"):
        token_byte_lengths(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_vocabulary_must_fit_the_checkpoint(bpe: PreTrainedTokenizerFast) -> None:
    check_vocabulary(bpe, 300)
    check_vocabulary(bpe, 304)  # padded tables are common
    with pytest.raises(ValueError, match=r"its 300 token ids do not fit runs/a, whose vocab_size is 299"):
        check_vocabulary(bpe, 299, "runs/a")


def test_no_tokenizer_or_no_eos(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*empty': no tokenizer could be loaded"):
        (tmp_path / "empty").mkdir()
        load_tokenizer(str(tmp_path / "empty"))
    PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"has no EOS token; set eos_token"):
        load_tokenizer(str(tmp_path / "plain"))
