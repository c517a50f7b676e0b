"""A float64 model's cache is float64 throughout: nothing is built in fp32 and widened, and its bytes are counted so."""

from __future__ import annotations

import copy

import pytest
import torch
from cache_cases import LARGE, SMALL, get_model, make, relative

from fathom.caches import CodebookTraining, cache_shape, compress, prefill, train_codebooks
from fathom.caches.channels import channel_error
from fathom.caches.codebooks import learn
from fathom.caches.methods.scorer import SCORERS
from fathom.caches.versions import CACHE_NAME
from fathom.ops.dct import resampler
from fathom.ops.fourier_coefficients import rebuild, transform, weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def double():
    return copy.deepcopy(get_model("llama")).double()


@torch.no_grad()
def test_with_room_every_method_is_the_stock_model(method_name, double, ids):
    stock = double(ids).logits
    with compress(double, make(method_name, LARGE)):
        cache = prefill(double, ids[:, :30])[CACHE_NAME]
        steps = [double(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 40)]
    assert relative(torch.cat(steps, dim=1), stock[:, 30:]) < 1e-13


@torch.no_grad()
def test_bytes_are_the_closed_form(method_name, double, ids):
    method = make(method_name, SMALL)
    with compress(double, method):
        cache = prefill(double, ids)[CACHE_NAME]
        for step in range(3):
            double(ids[:, step : step + 1], **{CACHE_NAME: cache})
    assert cache.nbytes() == method.cache_bytes(cache_shape(double, batch=2), 40, 3)


@pytest.mark.parametrize("window", [30, 31])
def test_a_projection_on_all_frequencies_is_exact(window):
    """N ≥ ⌊Tw/2⌋ + 1 coefficients give the signal back, but for rounding."""
    signal = torch.randn(2, window, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    frequencies = window // 2 + 1
    weight = weights("projection", frequencies, window, torch.float64, CPU)
    assert relative(rebuild(transform(signal, frequencies, window), weight, 0, window, window), signal) < 1e-13


@pytest.mark.parametrize("window", [20, 21])
def test_projection_weights(window):
    found = weights("projection", 14, window, torch.float64, CPU)
    exact = [(1 if 2 * n in (0, window) else 2 if 2 * n < window else 0) / window for n in range(14)]
    assert found.tolist() == exact * 2


def test_the_mean_of_slots():
    """7 slots become 3: the means of 3, 3 and 3, which share their edges."""
    rows = resampler(7, 3, "mean", torch.float64, CPU)
    third = 1 / 3
    assert rows.tolist() == [[third] * 3 + [0] * 4, [0] * 2 + [third] * 3 + [0] * 2, [0] * 4 + [third] * 3]


def test_scores_are_those_of_the_equation():
    keys = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = keys / keys.square().sum(-1, keepdim=True).sqrt()
    mean = direction.mean(2, keepdim=True)
    expected = {
        "knorm": -keys.square().sum(-1).sqrt(),
        "keydiff": -(direction * mean).sum(-1) / mean.square().sum(-1).sqrt(),
    }
    for name, scores in expected.items():
        torch.testing.assert_close(SCORERS[name](keys, keys), scores, rtol=1e-14, atol=1e-14)
        assert SCORERS[name](keys.bfloat16(), keys).dtype == torch.float32


def test_calibration_is_as_wide_as_the_model(double, ids):
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = {"key_stages": 1, "key_entries": 4, "value_stages": 1, "value_entries": 4, "batch": 64, "steps": 2}
    assert channel_error(x[None], 3).dtype == torch.float64
    for init in ("gaussian", "samples", "kmeans"):
        books = learn(x, 2, 4, CodebookTraining(init=init, kmeans_rounds=1, **{**sizes, "batch": 64}))
        assert books.dtype == torch.float64 and not torch.equal(books, books.float().double())
    made = train_codebooks(double, ids, CodebookTraining(**sizes, init="kmeans"))
    assert not torch.equal(made.keys[0], made.keys[0].float().double())
