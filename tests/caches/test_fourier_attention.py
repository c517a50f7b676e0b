"""FourierAttention: the coefficients, the affine repair, both attention forms, the life cycle, channel sets."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cache_cases import VOCABULARY, get_model, relative

from fathom.caches import ChannelSets, FourierAttention, cache_shape, compress, load_channels, prefill, search_channels
from fathom.caches.channels import affine_repair, default_channels, paper_ratios
from fathom.caches.versions import CACHE_NAME
from fathom.ops import fourier_coefficients as fourier

SIZE = {"n_sink": 2, "n_local": 5, "frequencies": 4, "headroom": 40}


def long_ids(length=50, rows=2):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


def signal(length, channels=3):
    return torch.randn(2, length, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("window", [20, 21, 30])
def test_coefficients_are_the_sums(window):
    x, frequencies = signal(18), 6
    got = fourier.transform(x, frequencies, window).numpy()
    t = np.arange(18)
    for n in range(frequencies):
        cos, sin = np.cos(2 * math.pi * n * t / window), np.sin(2 * math.pi * n * t / window)
        np.testing.assert_allclose(got[:, n], np.einsum("t,btc->bc", cos, x.numpy()), atol=1e-10)
        np.testing.assert_allclose(got[:, frequencies + n], np.einsum("t,btc->bc", sin, x.numpy()), atol=1e-10)
    assert np.abs(got[:, frequencies]).max() < 1e-12
    split = fourier.transform(x[:, :7], frequencies, window)
    split = split + fourier.transform(x[:, 7:], frequencies, window, start=7)
    np.testing.assert_allclose(split.numpy(), got, atol=1e-10)


@pytest.mark.parametrize("window", [20, 21])
@pytest.mark.parametrize("length", [20, 13])
def test_projection_is_exact_with_enough_frequencies(window, length):
    x, frequencies = signal(length), window // 2 + 1
    weight = fourier.weights("projection", frequencies, window, x.dtype, x.device)
    rebuilt = fourier.rebuild(fourier.transform(x, frequencies, window), weight, 0, length, window)
    torch.testing.assert_close(rebuilt, x)


@pytest.mark.parametrize("frequencies", [3, 10, 11, 15])
def test_fft_evaluation_and_projection_are_the_sums(frequencies):
    window, length = 20, 17
    amplitude = torch.randn(4, 2 * frequencies, dtype=torch.float64)
    angles = fourier.basis(0, length, frequencies, window, torch.float64, amplitude.device)
    torch.testing.assert_close(fourier.evaluate(amplitude, length, window), amplitude @ angles)
    p = torch.rand(4, length, dtype=torch.float64)
    torch.testing.assert_close(fourier.project(p, frequencies, window), p @ angles.T)


def test_affine_repair_restores_mean_and_deviation():
    x = signal(40)
    x[..., 2] = 3.5
    weight = fourier.weights("affine", 5, 48, x.dtype, x.device)
    rebuilt = fourier.rebuild(fourier.transform(x, 5, 48), weight, 0, 40, 48)
    scale, shift = affine_repair(x, rebuilt)
    repaired = rebuilt * scale + shift
    torch.testing.assert_close(repaired.mean(1), x.mean(1))
    deviation = lambda y: (y - y.mean(1, keepdim=True)).abs().amax(1)  # noqa: E731
    torch.testing.assert_close(deviation(repaired), deviation(x))
    assert repaired.isfinite().all()
    flat = torch.full((1, 40, 1), 2.0, dtype=torch.float64)
    scale, shift = affine_repair(flat, flat + 1e-12 * torch.randn(1, 40, 1, dtype=torch.float64))
    assert abs(scale.item() - 1) < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("reconstruction", ["affine", "projection"])
def test_fft_equals_dense(family, reconstruction):
    """Step by step after a compressed prompt, in float64: 1e-10 on attention, so the logits agree too."""
    model, ids = get_model(family), long_ids()
    logits = []
    for attention in ("dense", "fft"):
        with compress(model, FourierAttention(reconstruction=reconstruction, attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            assert cache.layers[0].states[0].compressed
            logits.append(torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 50)], 1))
    assert relative(logits[1], logits[0]) < 2e-5


def test_prompt_logits_are_exact_and_nothing_compressed_is_exact():
    model, ids = get_model("llama"), long_ids()
    stock = model(ids).logits
    with compress(model, FourierAttention(**SIZE)):
        assert relative(model(ids).logits, stock) < 1e-5
    shape = cache_shape(model)
    none = ChannelSets(((),) * 3, ((),) * 3, shape.kv_heads, shape.key_dim, "", "")

    class Exact(FourierAttention):
        def prepare(self, model, shape):
            return none

    for attention in ("dense", "fft"):
        with compress(model, Exact(attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 40)]
            steps.append(model(ids[:, 40:], **{CACHE_NAME: cache}).logits)
        assert relative(torch.cat(steps, 1), stock[:, 30:]) < 1e-5


def test_a_short_prompt_is_compressed_late_and_states_match_a_long_one():
    """Coefficients after decoding equal those of the longer text compressed at once, with the same window (layer 0)."""
    model, ids = get_model("llama"), long_ids()
    options = {**SIZE, "window": 60, "reconstruction": "projection"}
    with compress(model, FourierAttention(**options)):
        late = prefill(model, ids[:, :8])[CACHE_NAME]
        for t in range(8, 50):
            model(ids[:, t : t + 1], **{CACHE_NAME: late})
            assert late.layers[0].states[0].compressed == (t + 1 > 2 + 5 + 8)
        once = prefill(model, ids)[CACHE_NAME]
    a, b = late.layers[0].states[0], once.layers[0].states[0]
    assert a.middle == b.middle == 43
    for name in ("coefficients_key", "coefficients_value", "raw_key", "local_value", "sink_key"):
        assert relative(getattr(a, name), getattr(b, name)) < 1e-3


def test_a_full_window_raises():
    model, ids = get_model("llama"), long_ids()
    with compress(model, FourierAttention(**{**SIZE, "window": 20})):
        cache = prefill(model, ids[:, :26])[CACHE_NAME]
        model(ids[:, 26:27], **{CACHE_NAME: cache})
        with pytest.raises(ValueError, match="do not fit the window of 20"):
            model(ids[:, 27:28], **{CACHE_NAME: cache})


def test_bytes_at_the_published_sizes():
    """Llama-3.1-8B at 32K: 0.275 of full for a middle layer, 0.306 over 32 layers (statistics aside)."""
    from fathom.caches.base import CacheShape

    shape = CacheShape(1, 8, 128, 128, 2, layers=32)
    method = FourierAttention(reconstruction="projection")
    full = 32768 * shape.token_bytes()
    assert abs(method.layer_bytes(shape, 32768, 0, 15) / full - 0.275) < 0.003
    assert abs(method.cache_bytes(shape, 32768) / (32 * full) - 0.306) < 0.004


def test_ratios_and_default_sets():
    ratios = paper_ratios(32)
    assert [ratios[i] for i in (0, 3, 4, 23, 24, 31)] == [(0.9, 0.95)] * 2 + [(0.8, 0.8)] * 2 + [(0.5, 0.7)] * 2
    sets = default_channels(cache_shape(get_model("llama")))
    assert sets.key[0][:4] == (0, 1, 2, 4)  # pairs (0,4) (1,5) (2,6) of 8 dims at ratio 0.8


def test_search_and_files(tmp_path):
    model = get_model("llama")
    prompts = [long_ids(40, 1), long_ids(44, 1)]
    ratios = [(0.5, 0.25)] * 3
    for calibration in ("pre_rope", "post_rope"):
        sets = search_channels(model, prompts, 4, 2, 5, calibration, ratios)
        assert [len(k) for k in sets.key] == [8] * 3 and [len(v) for v in sets.value] == [4] * 3
    sets.save(tmp_path / "c.json")
    assert load_channels(tmp_path / "c.json", model) == sets
    with compress(model, FourierAttention(channels=str(tmp_path / "c.json"), **SIZE)):
        prefill(model, long_ids())
    with pytest.raises(ValueError, match="not on this model"):
        load_channels(tmp_path / "c.json", get_model("qwen3"))
    about = json.loads((tmp_path / "c.json").read_text())
    about["layers"][0]["k"] = [3, 3]
    (tmp_path / "c.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="sorted, distinct"):
        load_channels(tmp_path / "c.json")
    with pytest.raises(ValueError, match="use more than"):
        search_channels(model, [long_ids(6, 1)], 4, 2, 5)
