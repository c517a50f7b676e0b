"""Self-speculation changes how fast text comes, not which: greedy text is the same, drawn text as often."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from tiny import tiny_model, tokens

DEPTHS: list[dict[str, Any]] = [
    {"name": "loop", "passes": 3}, {"name": "pondering", "steps": 2}, {"name": "adaponderlm", "steps": 2},
    {"name": "adaptive_latent_cot", "steps": 2, "router_bias": 0.0, "threshold": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("depth", DEPTHS, ids=lambda depth: depth["name"])
@pytest.mark.parametrize("draft_passes", [1, 2])
def test_greedy_text_is_the_same(depth: dict[str, Any], draft_passes: int) -> None:
    model = tiny_model(depth=depth)
    for seed in (1, 2):
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        alone = model.generate(tokens(1, 6, seed), **options)
        drafted = model.generate(tokens(1, 6, seed), **options, draft_passes=draft_passes, draft_tokens=3)
        assert torch.equal(drafted, alone)
        counted = model.speculation
        assert counted.drafted >= counted.accepted and counted.accepted + counted.forwards == 20
        assert 0 <= counted.rate <= 1


@pytest.mark.parametrize(
    "depth", [DEPTHS[0], pytest.param(DEPTHS[3], marks=pytest.mark.slow)], ids=lambda depth: depth["name"]
)
def test_drawn_text_is_as_likely_as_the_full_model_says(depth: dict[str, Any]) -> None:
    """χ² of two drawn tokens against the probabilities of the full model, one forward of all pairs."""
    model, prompt, draws, kept = tiny_model(depth=depth, vocab_size=16), tokens(1, 5) % 13 + 3, 500, 3
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "top_k": kept, "eos_token_id": None}
    pairs: dict[tuple[int, int], int] = {}
    accepted = drafted = 0
    for _ in range(draws):
        pair = tuple(model.generate(prompt, **options, draft_passes=1, draft_tokens=2)[0, -2:].tolist())
        pairs[pair] = pairs.get(pair, 0) + 1
        accepted, drafted = accepted + model.speculation.accepted, drafted + model.speculation.drafted

    def likely(ids: torch.Tensor) -> dict[int, float]:
        with torch.no_grad():
            values, index = model(ids).logits[0, -1].topk(kept)
        return dict(zip(index.tolist(), values.double().softmax(0).tolist(), strict=True))

    expected = {
        (a, b): p * q
        for a, p in likely(prompt).items()
        for b, q in likely(torch.cat((prompt, torch.tensor([[a]])), 1)).items()
    }
    assert set(pairs) <= set(expected)
    common = [pair for pair in expected if expected[pair] * draws >= 5]
    rest = draws - sum(pairs.get(pair, 0) for pair in common)
    seen = [*(pairs.get(pair, 0) for pair in common), rest]
    wanted = [*(expected[pair] * draws for pair in common), draws - sum(expected[pair] for pair in common) * draws]
    if wanted[-1] < 5:
        seen, wanted = seen[:-1], [w * (draws - rest) / sum(wanted[:-1]) for w in wanted[:-1]]
    assert len(common) > 2
    assert chisquare(seen, wanted).pvalue > 1e-3
    assert 0 < accepted < drafted  # some drafts were refused: the rule was needed


def test_what_cannot_speculate_is_refused_by_name() -> None:
    loop, vanilla = tiny_model(depth={"name": "loop", "passes": 2}), tiny_model()
    ids = tokens(1, 4)
    for model, options, named in (
        (vanilla, {"draft_passes": 1}, "depth='vanilla'"), (loop, {"draft_passes": 2}, "draft_passes=2"),
        (loop, {"draft_passes": 0}, "draft_passes=0"), (loop, {"draft_passes": 1, "draft_tokens": 0}, "draft_tokens=0"),
        (loop, {"draft_passes": 1, "num_beams": 2}, "mode"),
        (loop, {"draft_passes": 1, "num_return_sequences": 2, "do_sample": True}, "2 rows"),
        (loop, {"draft_passes": 1, "assistant_model": vanilla}, "assistant_model"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            model.generate(ids, max_new_tokens=2, **options)


def test_the_draft_leaves_the_model_as_it_was() -> None:
    model = tiny_model(depth={"name": "adaponderlm", "steps": 2})
    ids = tokens(1, 6)
    with torch.no_grad():
        before = model(ids).logits
        model.generate(ids, max_new_tokens=4, do_sample=False, draft_passes=1)
        assert torch.equal(model(ids).logits, before)
    assert not any(itertools.chain(model._forward_hooks, model._forward_pre_hooks))
