"""Our decoding loop gives transformers' tokens, scores, logits and stream. The oracle is transformers' own loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fathom.caches import TreeKV, compress
from fathom.decoding import switch
from fathom.decoding.switch import say
from fathom.models.hf_versions import CACHE_NAME
from tiny import VOCABULARY, tiny_model, tokens
from tiny_checkpoint import tiny_tokenizer


@contextlib.contextmanager
def stock_loop() -> Iterator[None]:
    switch.FAST = False
    try:
        yield
    finally:
        switch.FAST = True


class Recorded:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.put_tokens: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


class Shifted(LogitsProcessor):
    """A user's own processor: it reads the text so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids[:, -3:], torch.full_like(scores[:, :3], -0.7))


class UntilToken(StoppingCriteria):
    """A user's own criterion, by row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 3


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "plain_sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "eos_list": {"eos_token_id": [5, 11, 40, 41, 42, 43, 60, 61, 62], "do_sample": True},
    "own_processor": {"logits_processor": LogitsProcessorList([Shifted()]), "do_sample": True},
    "own_criterion": {"stopping_criteria": StoppingCriteriaList([UntilToken()]), "do_sample": True},
    "bad_words": {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [10]},
    "length": {"max_length": 20, "max_new_tokens": None},
    "time": {"max_time": 100.0},
}


def compare(model: Any, batch: dict[str, Any], expect_ours: bool = True, **options: Any) -> Any:
    """Generates with both loops from the same seed, and requires all outputs to be equal."""
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, **options}
    options |= {"output_logits": True, "pad_token_id": 0}
    given, found = [], []
    say.cache_clear()
    for loop in (stock_loop(), contextlib.nullcontext()):
        streamer = None if len(batch["input_ids"]) > 1 or options.get("num_beams") else Recorded()
        torch.manual_seed(3)
        with loop:
            out = model.generate(**batch, **options, streamer=streamer)
        found.append(out)
        given.append(streamer)
    assert (say.cache_info().misses == 0) == expect_ours
    stock, ours = found
    assert torch.equal(stock.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(stock[name], ours[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert ours[CACHE_NAME].get_seq_length() == stock[CACHE_NAME].get_seq_length()
    if given[0] is not None and options.get("num_return_sequences", 1) == 1:
        assert given[0].put_tokens == given[1].put_tokens and given[1].ended
    return ours


def padded(rows: int = 3, length: int = 9) -> dict[str, Any]:
    ids, mask = tokens(rows, length), torch.ones(rows, length, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def vanilla() -> Any:
    return tiny_model()


@pytest.mark.parametrize("mode", MODES)
def test_every_option_gives_the_tokens_of_transformers_loop(vanilla: Any, mode: str) -> None:
    options = MODES[mode]
    compare(vanilla, {"input_ids": tokens(1, 6)}, **options)
    compare(vanilla, padded(), **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"depth": {"name": "loop", "passes": 2}},
        {"depth": {"name": "pondering", "steps": 1}},
        {"depth": {"name": "adaponderlm"}},
        {"depth": {"name": "ponderlm2"}},
        {"depth": {"name": "pause"}},
        {"mixer": {"name": "depth_attention"}},
        {"family": "gpt2"},
    ],
    ids=lambda fields: str(next(iter(fields.values()))),
)
def test_methods_decode_the_same_tokens(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields)
    compare(model, padded())
    compare(model, {"input_ids": tokens(1, 6)}, do_sample=True)


def test_a_stock_model_under_compress(stock: Any) -> None:
    with compress(stock, TreeKV(budget=16, n_sink=2, n_recent=6, block=3)):
        compare(stock, {"input_ids": tokens(2, 9)}, max_new_tokens=20)
        compare(stock, padded(), do_sample=True)
    assert "generate" not in vars(stock)


def test_stop_strings() -> None:
    model, tokenizer = tiny_model(vocab_size=300), tiny_tokenizer()
    first = model.generate(tokens(1, 6), max_new_tokens=12, do_sample=False, eos_token_id=None)
    stop = next(word for word in map(tokenizer.decode, first[0, 8:]) if word.isascii() and word.strip())
    ours = compare(model, {"input_ids": tokens(1, 6)}, stop_strings=[stop], tokenizer=tokenizer)
    assert tokenizer.decode(ours.sequences[0, -1]).endswith(stop)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"output_hidden_states": True},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_rest_runs_in_transformers_loop_and_says_so_once(
    vanilla: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    say.cache_clear()
    with caplog.at_level(logging.DEBUG, "fathom.decoding"):
        for _ in range(2):
            found = vanilla.generate(tokens(1, 6), max_new_tokens=4, do_sample=False, **options)
    assert len([record for record in caplog.records if record.name == "fathom.decoding"]) == 1
    with stock_loop():
        assert torch.equal(found, vanilla.generate(tokens(1, 6), max_new_tokens=4, do_sample=False, **options))


def test_inputs_that_another_prepares_are_prepared_by_it_for_every_step() -> None:
    """As prompt tuning of peft does, which puts its own method on the model."""
    model = tiny_model()
    own, seen = model.prepare_inputs_for_generation, []

    def prepared(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        inputs = own(*args, **kwargs)
        return {**inputs, "input_ids": inputs["input_ids"] * 0 + 5}  # what is read is not what was written

    model.prepare_inputs_for_generation = prepared
    compare(model, {"input_ids": tokens(1, 6)}, expect_ours=False, max_new_tokens=4)
    assert len(seen) == 8


def test_a_conversation_goes_on_in_a_cache_of_the_users_own(vanilla: Any) -> None:
    found = []
    for loop in (stock_loop(), contextlib.nullcontext()):
        with loop:
            first = vanilla.generate(tokens(1, 6), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
            text = torch.cat((first.sequences, tokens(1, 4, seed=5)), 1)
            more = vanilla.generate(text, max_new_tokens=5, do_sample=False, **{CACHE_NAME: first[CACHE_NAME]})
        found.append(more)
    assert torch.equal(*found)


@pytest.mark.parametrize(("rows", "switched"), [(1, True), (2, True), (3, False)])
def test_experts_are_not_copied_for_every_token_of_many_rows(
    rows: int, switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 experts of which 2 run: 3 rows pick more than there are."""
    section = {"name": "moe", "experts": 4, "active": 2, "width": 16}
    model: Any = tiny_model(feed_forward=section).eval()
    asked: list[bool] = []

    @contextlib.contextmanager
    def optimise() -> Iterator[None]:
        asked.append(True)
        yield

    monkeypatch.setattr(model, "_optimize_model_for_decode", optimise)
    model.generate(tokens(rows, 5), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert bool(asked) == switched
