"""The measurements of quality: a hidden sentence is found exactly where the model says it is."""

from __future__ import annotations

import pytest
import torch
from cache_cases import codebooks, get_model

from fathom.caches import KIVI, VQKV, Full, cache_shape
from fathom.caches.base import CacheShape
from fathom.caches.budgets import NotReachable
from fathom.evaluate.cache_quality import grid, perplexity, retrieval
from fathom.evaluate.long_context import TASKS, hidden


class Letters:
    """A tokenizer of one token a character, whose first token of a text is special."""

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        ids = ([1] if add_special_tokens else []) + [ord(c) % 90 + 5 for c in text]
        wrapped = torch.tensor([ids]) if return_tensors else ids
        return type("Encoding", (), {"input_ids": wrapped})

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


def test_the_hidden_sentence_stands_at_its_depth():
    tokenizer = Letters()
    needle = tokenizer(TASKS["needle"][0].format("mango"), add_special_tokens=False).input_ids
    for depth in (0.0, 0.5, 1.0):
        ids = hidden("needle", tokenizer, "Some filler. ", 300, depth, "mango")
        cut = 1 + int(depth * (300 - 1 - len(needle)))
        assert len(ids) == 300 and ids[0] == 1 and 1 not in ids[1:]
        assert ids[cut : cut + len(needle)] == needle
    with pytest.raises(ValueError, match="tokens=20"):
        hidden("needle", tokenizer, "Some filler. ", 20, 0.5, "mango")


def test_retrieval_is_greedy_generation(llama):
    """Row by row against generate(): right answers are found, others are not."""
    tokenizer, question = Letters(), "Which one? It is"
    contexts = torch.randint(5, 95, (3, 60), generator=torch.Generator().manual_seed(0))
    asked = tokenizer(question, add_special_tokens=False).input_ids
    said = [
        llama.generate(torch.cat((row, torch.tensor(asked)))[None], do_sample=False, max_new_tokens=4)[0, -4:].tolist()
        for row in contexts
    ]
    answers = [tokenizer.decode(ids) for ids in said]
    assert retrieval(llama, tokenizer, contexts, question, answers, Full(), 16) == [True] * 3
    wrong = [answers[0], answers[1][:-1] + "~", answers[2]]
    assert retrieval(llama, tokenizer, contexts, question, wrong, Full(), 16) == [True, False, True]
    cells = grid(llama, tokenizer, "Filler. ", [120, 150], [0.0, 0.5], lambda _: Full())
    assert set(cells["cells"]) == {"120", "150"} and 0 <= cells["recall"] <= 1


def test_perplexity_is_cross_entropy():
    model, ids = get_model("llama"), torch.randint(1, 97, (2, 50), generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert perplexity(model, ids, Full(), chunk=7)["nll"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("tokens", [300, 320, 383])
def test_a_fraction_holds_in_calls_of_any_length(tokens):
    """Tokens that wait for their batch to be coded are in full: they count among the bytes of the fraction."""
    model = get_model("llama")
    shape, ids = cache_shape(model), torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(2))
    reached = set()
    for fraction in (0.5, 0.4, 0.35, 0.3, 0.25, 0.2):
        method = VQKV.at_fraction(fraction, shape, tokens, codebooks=codebooks("llama"))
        if not isinstance(method, NotReachable):
            reached.add(method.n_local)
            assert all(perplexity(model, ids, method, chunk)["real_ratio"] <= fraction for chunk in (13, 64, 100))
    assert len(reached) > 2
    shape = CacheShape(1, 2, 64, 64, 2)
    for percent in range(20, 60):
        method = KIVI.at_fraction(percent / 100, shape, tokens)
        if not isinstance(method, NotReachable):
            most = max(method.cache_bytes(shape, n) for n in range(tokens - method.residual, tokens + 1))
            assert most <= percent / 100 * Full().cache_bytes(shape, tokens)
