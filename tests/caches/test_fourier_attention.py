"""FourierAttention: the coefficients, the affine repair, both attention forms, the life cycle, channel sets."""

from __future__ import annotations

import json
import math
import os
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from cache_cases import VOCABULARY, get_model, relative

from fathom.caches import ChannelSets, FourierAttention, cache_shape, compress, load_channels, prefill, search_channels
from fathom.caches.channels import affine_repair, default_channels, paper_ratios
from fathom.caches.methods.fourier_attention import FourierState, Side
from fathom.caches.versions import CACHE_NAME
from fathom.ops import fourier_coefficients as fourier
from fathom.ops import fourier_grid, kernels
from fathom.ops.fourier_grid import make_grid

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


@pytest.mark.parametrize("frequencies,window,block", [(4, 84, 64), (12, 30, 8), (16, 2000, 32), (64, 4500, 64)])
def test_the_coarse_grid_gives_the_sums(frequencies, window, block):
    """Both directions against cosines and sines, one token at a time, blocks as the kernel cuts them."""
    grid = make_grid(frequencies, window, block)
    length, support = window - 3, fourier_grid.SUPPORT
    amplitude = torch.randn(2, 3, 2 * frequencies, dtype=torch.float64)
    g = fourier.evaluate(amplitude / fourier_grid.spectrum(grid, amplitude.device), grid.points, grid.points)
    p, spread = torch.rand(2, 3, length), torch.zeros(2, 3, grid.blocks(length), grid.span, dtype=torch.float64)
    got, held = torch.zeros(2, 3, length, dtype=torch.float64), [0] * grid.blocks(length)
    for t in range(length):
        block_of = t * grid.points // window // grid.cells
        held[block_of] += 1
        for j in range(grid.span):
            point = block_of * grid.cells + j - support + 1
            phi = kaiser_bessel(t * grid.points / window - point, grid)
            got[..., t] += phi * g[..., point % grid.points]
            spread[:, :, block_of, j] += phi * p[..., t]
    assert 0 < max(held) <= block and sum(held) == length
    angles = fourier.basis(0, length, frequencies, window, torch.float64, amplitude.device)
    assert relative(got, amplitude @ angles) < 1e-6
    projected = fourier.project(fourier_grid.overlap_add(spread, grid), frequencies, grid.points)
    assert relative(projected / fourier_grid.spectrum(grid, p.device), p.double() @ angles.T) < 1e-6


def kaiser_bessel(z, grid):
    under = fourier_grid.SUPPORT**2 - z * z
    if under <= 0:
        return 0.0
    scale = math.exp(-grid.shape * fourier_grid.SUPPORT) / math.pi
    return scale * math.sinh(grid.shape * math.sqrt(under)) / math.sqrt(under)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("reconstruction", ["affine", "projection"])
def test_the_path_around_the_kernel_equals_dense(family, reconstruction, monkeypatch):
    """The whole decode path of attention="triton", with the plain form of its op."""
    model, ids = get_model(family), long_ids()
    logits = []
    for attention in ("dense", "fft"):
        if attention == "fft":
            monkeypatch.setattr(kernels, "TRITON", False)
            monkeypatch.setattr(FourierState, "attend_fft", FourierState.attend_triton)
        with compress(model, FourierAttention(reconstruction=reconstruction, attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            logits.append(torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 36)], 1))
    assert relative(logits[1], logits[0]) < 2e-5


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
ATTENTION_SHAPES = [(2, 8, 2, 64, 300, 320, 20), (1, 4, 4, 32, 128, 500, 100), (1, 6, 1, 128, 77, 77, 30)]
ATTENTION_SHAPES += [(1, 8, 4, 128, 500, 1000, 16)]


@needs_triton
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows,heads,groups,width,tokens,window,frequencies", ATTENTION_SHAPES)
def test_kernel(dtype, tolerance, rows, heads, groups, width, tokens, window, frequencies):
    """Against softmax, cosines and sines written out, with ragged heads."""
    from fathom.ops.fourier_decode import raw_partials
    from fathom.ops.fourier_decode.kernel import head_runs
    from fathom.ops.fourier_grid import block_tokens

    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter has no bfloat16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    # the first head keeps nothing raw, the last one everything, those between two of three
    chosen = [c for c in range(groups * width) if c >= (groups - 1) * width or (c >= width and c % 3)]
    side = Side(tuple(c for c in range(groups * width) if c not in set(chosen)), groups, width).to(device)
    assert head_runs([0, 5, 9, 9, 30], [0, 1, 2, 3, 4], 9) == [(0, 3), (3, 4)]
    random = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    raw_key, raw_value = (random(rows, tokens, len(chosen)).to(dtype) for _ in range(2))
    query, amplitude = random(rows, heads, width).to(dtype), random(rows, heads, 2 * frequencies) / frequencies**0.5
    own = torch.zeros(rows, heads, groups * width, dtype=dtype, device=device)
    for h in range(heads):
        g = h // (heads // groups)
        own[:, h, g * width : (g + 1) * width] = query[:, h]
    dense = torch.zeros(2, rows, tokens, groups * width, device=device)
    dense[0][..., chosen], dense[1][..., chosen] = raw_key.float(), raw_value.float()
    keys, values = (
        d.unflatten(2, (groups, width)).transpose(1, 2).repeat_interleave(heads // groups, 1) for d in dense
    )
    angles = fourier.basis(0, tokens, frequencies, window, torch.float64, amplitude.device)
    x = (amplitude.double() @ angles).float()
    p = ((x + torch.einsum("bhd,bhtd->bht", query.float(), keys)) * 0.3).softmax(-1)
    expected = torch.einsum("bht,bhtd->bhd", p, values)

    grid = make_grid(frequencies, window, block_tokens(dtype))
    spectrum = fourier_grid.spectrum(grid, amplitude.device)
    scores = fourier.evaluate(amplitude / spectrum, grid.points, grid.points)
    top, total, mixed, spread = raw_partials(
        own[..., side.raw], scores, raw_key, raw_value, side.starts, side.starts, grid, 0.3
    )
    assert top.isfinite().all()
    projected = fourier.project(spread, frequencies, grid.points) / spectrum / total
    assert relative(projected, (p.double() @ angles.T).float()) < tolerance
    for g in range(groups):
        place = slice(side.starts[g], side.starts[g + 1])
        channels = side.raw[place] % width
        heads_of = slice(g * (heads // groups), (g + 1) * (heads // groups))
        if len(channels):
            assert relative((mixed / total)[:, heads_of, place], expected[:, heads_of, channels]) < tolerance


@needs_triton
def test_triton_equals_dense():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = get_model("llama").to(device), long_ids().to(device)
    try:
        logits = []
        for attention in ("dense", "triton"):
            with compress(model, FourierAttention(attention=attention, **SIZE)):
                cache = prefill(model, ids[:, :30])[CACHE_NAME]
                steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 50)]
                logits.append(torch.cat(steps, 1))
        assert relative(logits[1], logits[0]) < 2e-5
    finally:
        model.to("cpu")


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 allows the kernel on a CPU")
def test_triton_without_a_gpu_says_what_to_use():
    method = FourierAttention(attention="triton", **SIZE)
    with (
        pytest.raises(ValueError, match=r"attention='triton'.*CUDA.*Use attention='fft'"),
        compress(get_model("llama"), method),
    ):
        pass


@pytest.mark.parametrize("prompt,steps", [(30, 20), (8, 23)])
def test_flushing_several_tokens_at_once(prompt, steps):
    """Bytes are the closed form at every step; fft equals dense; at a flush the coefficients are those of flush 1."""
    model, ids = get_model("llama"), long_ids()
    caches, logits = {}, {}
    for name, options in {"fft": {}, "dense": {"attention": "dense"}, "single": {"flush_every": 1}}.items():
        method = FourierAttention(**{"flush_every": 3, "reconstruction": "projection", **SIZE, **options})
        with compress(model, method):
            cache, found = prefill(model, ids[:, :prompt])[CACHE_NAME], []
            for t in range(steps):
                found.append(model(ids[:, prompt + t : prompt + t + 1], **{CACHE_NAME: cache}).logits)
                assert cache.nbytes() == method.cache_bytes(cache_shape(model, batch=len(ids)), prompt, t + 1)
        caches[name], logits[name] = cache.layers[0].states[0], torch.cat(found, 1)
    assert relative(logits["fft"], logits["dense"]) < 2e-5
    lag = caches["single"].middle - caches["fft"].middle
    assert 0 <= lag < 3
    if lag == 0:
        assert relative(caches["fft"].coefficients_key, caches["single"].coefficients_key) < 1e-5


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


def test_outgrown_affine_statistics_are_reported():
    model, ids = get_model("llama"), long_ids()
    with compress(model, FourierAttention(**SIZE)), pytest.warns(UserWarning, match="reconstruction='projection'"):
        prefill(model, ids, chunk_size=16)
    for method, chunk in ((FourierAttention(**SIZE), 50), (FourierAttention(reconstruction="projection", **SIZE), 16)):
        with compress(model, method), warnings.catch_warnings():
            warnings.simplefilter("error")
            prefill(model, ids, chunk_size=chunk)


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
