"""What methods promise by name (`Compressor.invariants`), and what all of them keep within a model.

What a tower or a language model attended to stays as it is while features change: it is another argument.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_vision_families import batch
from vision_cases import OWN_WEIGHTS, applied, method_of, pair, seen_by

from fathom.vision import METHODS, compress_vision
from fathom.vision.base import Compressor, LanguageCompressor, TowerCompressor

GRID = (6, 6)
X = torch.randn(2, 36, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def promised(invariant: str) -> Any:
    return pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if invariant in cls.invariants])


def given(name: str, tokens: int = 9) -> Any:
    """The method as a function of features, with what was attended to held fixed."""
    method = method_of(name, tokens)
    if isinstance(method, TowerCompressor):
        return lambda x: method(x, GRID, seen_by(X))
    if isinstance(method, LanguageCompressor):
        scores = X.square().mean(-1)
        return lambda x: torch.stack([method.keep(score, row, tokens)[1] for score, row in zip(scores, x)])
    return lambda x: applied(method, x, GRID)


def test_every_promise_has_a_test():
    known = {"identity", "linear", "channels", "scale", "transpose", "subset"}
    assert all(f'"{name}":' in str(Compressor.__doc__) for name in known)
    assert all(set(cls.invariants) <= known for cls in METHODS.values())
    assert {name for cls in METHODS.values() for name in cls.invariants} == known


@promised("identity")
@torch.no_grad()
def test_with_all_tokens_kept_the_model_is_the_stock_one(name):
    assert torch.allclose(given(name, 36)(X), X, atol=1e-10)
    model, processor = pair("llava")
    inputs = batch("llava", processor)
    expected = model(**inputs).logits
    with compress_vision(model, processor, method_of(name, 36)):
        again = batch("llava", processor)
        assert again.input_ids.equal(inputs.input_ids)
        real = inputs.attention_mask.bool()
        assert (model(**again).logits - expected)[real].abs().max() < 1e-5 * expected.abs().max()


@promised("linear")
def test_it_is_linear(name):
    method, y = given(name), X.flip(1) * 0.3
    assert torch.allclose(method(2.5 * X - y), 2.5 * method(X) - method(y), atol=1e-10)


@promised("channels")
def test_channels_are_treated_alike_and_by_themselves(name):
    method, order = given(name), torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    assert torch.allclose(method(X[..., order]), method(X)[..., order], atol=1e-12)
    changed = X.clone()
    changed[..., 5] += 1
    assert method(changed)[..., :5].equal(method(X)[..., :5])


@promised("scale")
def test_larger_features_are_kept_larger(name):
    method = given(name)
    assert torch.allclose(method(4 * X), 4 * method(X), atol=1e-10)


@promised("transpose")
def test_a_turned_grid_is_kept_turned(name):
    method, kept = given(name), 6 if name == "all_tokens" else 3
    turned = X.unflatten(1, GRID).transpose(1, 2).flatten(1, 2)
    expected = method(X).unflatten(1, (kept, kept)).transpose(1, 2).flatten(1, 2)
    assert torch.allclose(method(turned), expected, atol=1e-12)


@promised("subset")
def test_kept_tokens_are_some_of_the_features_in_order(name):
    for found, row in zip(given(name)(X), X):
        places = [int((row == token).all(-1).nonzero()[0]) for token in found]
        assert places == sorted(set(places)) and len(places) == 9


ALL = [name for name in METHODS if name not in OWN_WEIGHTS]


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_steps_with_a_cache_are_the_full_forward_and_nothing_is_added(name):
    """A method that chooses by the last token chooses in the prompt alone: test_attention_methods.py has its steps."""
    model, processor = pair("llava")
    method, names = method_of(name, 9), {key: value.shape for key, value in model.state_dict().items()}
    with compress_vision(model, processor, method):
        assert {key: value.shape for key, value in model.state_dict().items()} == names
        inputs = batch("llava", processor, (0, 1))
        made = model.generate(
            **inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, suppress_tokens=[2, 3, 4, 31],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        first = model(**inputs).logits[:, -1]
        assert (made.logits[0] - first).abs().max() < 1e-5 * first.abs().max()
        cache = getattr(made, "cache", None) or made.past_key_values
        text = inputs.input_ids.shape[1] - method.count(GRID)
        read = method.read(GRID, 2)
        assert [layer.keys.shape[2] for layer in cache.layers] == [tokens + text + 2 for tokens in read]
        if isinstance(method, LanguageCompressor):
            return
        ids = made.sequences[:, :-1]
        mask = torch.cat((inputs.attention_mask, torch.ones(2, 2, dtype=torch.long)), 1)
        full = model(input_ids=ids, pixel_values=inputs.pixel_values, attention_mask=mask).logits[:, -1]
        assert (made.logits[-1] - full).abs().max() < 2e-5 * full.abs().max()


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_the_tower_and_two_models_do_not_meet(name):
    model, processor = copy.deepcopy(pair("llava")[0]), pair("llava")[1]
    other = copy.deepcopy(model)
    with compress_vision(model, processor, method_of(name, 9)):
        inputs = batch("llava", processor, (0, 1))
        model.train()
        model(**inputs, labels=inputs.input_ids).loss.backward()
        gradients = [p.grad for p in model.model.vision_tower.parameters() if p.grad is not None]
        assert max(gradient.abs().max() for gradient in gradients) > 0
        assert all(gradient.isfinite().all() for gradient in gradients)
        with compress_vision(other, None, method_of("average_pooling", 9)):
            assert type(other.model.multi_modal_projector) is not type(pair("llava")[0].model.multi_modal_projector)
    stock = batch("llava", processor, (0, 1))
    assert other(**stock).logits.equal(pair("llava")[0](**stock).logits)
