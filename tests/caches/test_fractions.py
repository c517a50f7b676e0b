"""Counts that follow from a ratio are exact: the ratio is the decimal that one reads, not its binary neighbour."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from cache_cases import get_model

from fathom.caches import FreqKV, Scored, cache_shape, compress, prefill
from fathom.caches.base import CacheShape
from fathom.caches.channels import default_channels, paper_ratios
from fathom.caches.versions import CACHE_NAME

RATIOS = [0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1e-05]


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_ratio_keeps_its_exact_share_of_every_prompt(ratio):
    """⌊n(1 − r)⌋ in integers, and at least one token."""
    method, exact = Scored(compression_ratio=ratio, acts_on="prompt"), Fraction(str(ratio))
    for tokens in range(1, 400):
        share = tokens * (exact.denominator - exact.numerator) // exact.denominator
        assert method.kept(tokens) == max(1, share), tokens
    assert Scored(compression_ratio=0.7, acts_on="prompt").kept(90) == 27


def test_sinks_and_recent_tokens_are_kept_as_far_as_there_are_tokens():
    method = Scored(compression_ratio=0.9, acts_on="prompt", n_sink=4, n_recent=4)
    assert [method.kept(tokens) for tokens in (1, 5, 8, 9, 80, 100)] == [1, 5, 8, 8, 8, 10]
    shape = CacheShape(1, 2, 8, 8, 4)
    assert method.layer_bytes(shape, prompt=5) == 5 * shape.token_bytes()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [2, 3, 9, 10, 90])
@pytest.mark.parametrize("ratio", [0.7, 0.9])
def test_short_prompts_keep_a_token(tokens, ratio):
    """Stored slots and bytes are the closed form's, down to two tokens; generation goes on."""
    model, method = get_model("llama"), Scored(compression_ratio=ratio, acts_on="prompt")
    ids = torch.arange(1, tokens + 1)[None]
    with compress(model, method):
        out = prefill(model, ids)
        cache = out[CACHE_NAME]
        assert cache.layers[0].states[0].stored == method.kept(tokens) >= 1
        assert cache.nbytes() == method.cache_bytes(cache_shape(model), tokens)
        assert model(ids[:, :1], **{CACHE_NAME: cache}).logits.isfinite().all()
        assert cache.nbytes() == method.cache_bytes(cache_shape(model), tokens, 1)


def test_other_counts_that_follow_from_a_ratio():
    assert FreqKV(budget=94, ratio=0.7).compressed_length == 63
    shape = CacheShape(1, 2, 90, 90, 4, layers=16)  # two heads of 90 channels
    sets, of_a_head = default_channels(shape), {0.9: 81, 0.95: 85, 0.8: 72, 0.5: 45, 0.7: 63}
    for (key, value), keys, values in zip(paper_ratios(16), sets.key, sets.value):
        assert (len(keys), len(values)) == (2 * of_a_head[key], 2 * of_a_head[value])
