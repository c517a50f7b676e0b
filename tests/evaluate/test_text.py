"""Sliding-window loss against one forward a token; unigram baseline against counting."""

import math
from collections import Counter

import pytest
import torch

from fathom.evaluate import bits_per_byte, evaluate_text, load_checkpoint, read_text, text_loss, unigram_loss
from fathom.evaluate.text import scored_spans
from tiny import VOCABULARY, tiny_model, tokens
from tiny_checkpoint import TEXT, save_fathom, save_stock, tiny_tokenizer


def loss_token_by_token(model, ids: list[int], window: int, stride: int) -> float:
    """By the definition: windows start at 0, S, 2S, …; one that would run over the end starts earlier instead; a token
    belongs to the first window that reaches it. One forward a token, of the context alone."""
    total, length = 0.0, len(ids) - 1
    window = min(window, length)
    for position in range(length):
        start = 0
        while start + window <= position:
            start += stride
        start = min(start, length - window)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : position + 1]])).logits[0, -1].double()
        total -= (logits[ids[position + 1]] - torch.logsumexp(logits, 0)).item()
    return total


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        "fathom": tiny_model("llama"),
        "pondering": tiny_model("gpt_neox", depth={"name": "pondering", "steps": 1}),
        "stock": load_checkpoint(str(save_stock(tmp_path_factory.mktemp("stock"))), "cpu")[0],
    }


@pytest.mark.parametrize("name", ["fathom", "pondering", "stock"])
@pytest.mark.parametrize(
    ("length", "window", "stride"),
    [(41, 16, 8), (41, 16, 16), (38, 16, 8), (23, 16, 5), (23, 16, 1), (12, 16, 8), (17, 16, 4), (2, 16, 8), (9, 1, 1)],
)
def test_sliding_window_equals_one_forward_a_token(models, name, length, window, stride):
    ids = tokens(1, length)[0].tolist()
    nats, count = text_loss(models[name], ids, window, stride, batch_size=3)
    assert count == length - 1
    assert math.isclose(nats, loss_token_by_token(models[name], ids, window, stride), rel_tol=1e-5)


def test_batch_size_and_mode_do_not_matter(models):
    model = tiny_model("llama", residual_dropout=0.5).train()
    one, three = (text_loss(model, tokens(1, 50)[0], 16, 8, batch_size)[0] for batch_size in (1, 3))
    assert math.isclose(one, three, rel_tol=1e-6)
    assert model.training


@pytest.mark.parametrize(("length", "window", "stride"), [(40, 16, 8), (41, 16, 7), (16, 16, 3), (100, 10, 10)])
def test_every_token_is_scored_once_with_enough_context(length, window, stride):
    scored = []
    for number, (start, stop) in enumerate(scored_spans(length, window, stride)):
        assert stop - window >= 0
        if number:
            assert start - (stop - window) >= window - stride
        scored += range(start, stop)
    assert scored == list(range(length))


def test_text_is_scored_whole_after_the_eos_token():
    model, tokenizer = tiny_model(vocab_size=300), tiny_tokenizer()
    score = evaluate_text(model, tokenizer, TEXT, window=32, stride=16)
    ids = tokenizer(TEXT)["input_ids"]
    assert score.tokens == len(ids)
    assert score.bytes == len(TEXT.encode()) > len(TEXT)
    expected = loss_token_by_token(model, [tokenizer.eos_token_id, *ids], 32, 16)
    assert math.isclose(score.nats, expected, rel_tol=1e-5)
    assert math.isclose(score.perplexity, math.exp(expected / len(ids)), rel_tol=1e-5)
    assert math.isclose(score.bits_per_byte, expected / math.log(2) / len(TEXT.encode()), rel_tol=1e-5)


def test_a_bos_token_goes_before_eos():
    model, tokenizer = tiny_model(vocab_size=301), tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ids = tokenizer("The sea", add_special_tokens=False)["input_ids"]
    expected = loss_token_by_token(model, [tokenizer.bos_token_id, *ids], 32, 16)
    assert math.isclose(evaluate_text(model, tokenizer, "The sea").nats, expected, rel_tol=1e-5)


def test_special_tokens_in_a_text_are_characters():
    model, tokenizer = tiny_model(vocab_size=300), tiny_tokenizer()
    assert evaluate_text(model, tokenizer, "a<|endoftext|>b").tokens > 3


def test_window_is_cut_to_the_models_positions_and_stride_follows():
    score = evaluate_text(tiny_model(vocab_size=300), tiny_tokenizer(), TEXT)
    assert (score.window, score.stride) == (64, 32)


def test_uniform_model_needs_log2_of_the_vocabulary():
    """A model that knows nothing: all logits 0."""
    model, tokenizer = tiny_model(vocab_size=256 + 44), tiny_tokenizer()
    torch.nn.init.zeros_(model.lm_head.weight)
    score = evaluate_text(model, tokenizer, TEXT, 32)
    assert math.isclose(score.perplexity, 300, rel_tol=1e-6)
    assert math.isclose(score.bits_per_byte, math.log2(300) * score.tokens / score.bytes, rel_tol=1e-6)


def test_bits_per_byte():
    assert math.isclose(bits_per_byte(math.log(2) * 12, 4), 3.0)


def test_unigram_by_counting():
    train, targets = tokens(1, 200)[0], tokens(1, 50, seed=2)[0]
    counts = Counter(train.tolist())
    expected = -sum(math.log((counts[t] + 1) / (200 + VOCABULARY)) for t in targets.tolist())
    assert math.isclose(unigram_loss(train, targets, VOCABULARY), expected, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [1]}, "token_ids has 1 tokens: at least 2 are needed"),
        ({"window": 65}, "window=65: must be at least 1 and at most the model's 64 positions"),
        ({"window": 0}, "window=0: must be at least 1"),
        ({"stride": 0}, "stride=0: must be at least 1 and at most window=16"),
        ({"stride": 17}, "stride=17: must be at least 1 and at most window=16"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
    ],
)
def test_arguments_out_of_range(models, arguments, message):
    with pytest.raises(ValueError, match=message):
        text_loss(models["fathom"], **{"token_ids": [1, 2, 3], "window": 16, "stride": 8, **arguments})


def test_empty_text_is_refused(models):
    with pytest.raises(ValueError, match="text is empty"):
        evaluate_text(models["fathom"], tiny_tokenizer(), "")


def test_a_tokenizer_that_loses_bytes_is_refused(models):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    lossy = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "sea": 1}, unk_token="<unk>")), eos_token="<unk>"
    )
    with pytest.raises(ValueError, match="bytes per token are not known"):
        evaluate_text(models["fathom"], lossy, "sea land")


def test_a_tokenizer_without_bos_and_eos_is_refused(models):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS token"):
        evaluate_text(models["fathom"], tokenizer, "sea")


def test_read_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\n")
    assert read_text(file) == "naïve\r\n"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent.txt")
    file.write_bytes(b"one\ntwo \xff three")
    with pytest.raises(ValueError, match=r"text.txt: not UTF-8 at byte 8 \(0xff, line 2\)"):
        read_text(file)
    file.write_text(" \n")
    with pytest.raises(ValueError, match=r"text.txt: holds no text"):
        read_text(file)


def test_a_loaded_checkpoint_scores_like_the_model_saved(tmp_path):
    folder = save_fathom(tmp_path, depth={"name": "loop", "passes": 2})
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    saved = tiny_model(vocab_size=300, eos_token_id=0, bos_token_id=None, depth={"name": "loop", "passes": 2})
    assert evaluate_text(model, tokenizer, TEXT).nats == evaluate_text(saved, tiny_tokenizer(), TEXT).nats
