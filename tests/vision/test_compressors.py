"""What every compressor makes of a grid of features, against scipy and plain loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn
from vision_cases import NOT_ALL, applied, method_of

from fathom.ops.dct import resample_grid
from fathom.vision import METHODS, from_dict
from fathom.vision.base import GridCompressor

GRIDS = [((6, 6), (3, 3)), ((24, 24), (12, 12)), ((5, 8), (2, 7)), ((1, 9), (1, 4)), ((7, 1), (7, 1))]


def features(grid, channels=5, batch=2, dtype=torch.float64, seed=0):
    n = grid[0] * grid[1]
    return torch.randn(batch, n, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_scipy(x, grid, kept):
    image = x.double().numpy().reshape(x.shape[0], *grid, x.shape[-1])
    low = dctn(image, axes=(1, 2), norm="ortho")[:, : kept[0], : kept[1]]
    return torch.from_numpy(idctn(low, axes=(1, 2), norm="ortho").reshape(x.shape[0], -1, x.shape[-1]))


@pytest.mark.parametrize("transform", ["gemm", "fft"])
@pytest.mark.parametrize("grid,kept", GRIDS)
def test_the_low_pass_of_a_grid_is_scipys(grid, kept, transform):
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
        x = features(grid, dtype=dtype)
        found, expected = resample_grid(x, grid, kept, "none", transform), by_scipy(x, grid, kept)
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found.double() - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("transform", ["gemm", "fft"])
def test_constants_grow_or_stay(transform):
    x = torch.full((1, 24 * 24, 2), 3.0, dtype=torch.float64)
    assert torch.allclose(resample_grid(x, (24, 24), (12, 12), "none", transform), torch.tensor(6.0).double())
    assert torch.allclose(resample_grid(x, (24, 24), (12, 12), "amplitude", transform), torch.tensor(3.0).double())


def test_identities_of_the_low_pass():
    """A Aᵀ = I, low-pass pictures come back by the adjoint, two steps are one, and a turned grid gives a turned one."""
    eye = torch.eye(48, dtype=torch.float64)[:, :, None]
    matrix = resample_grid(eye, (6, 8), (3, 5))[..., 0].T  # [15, 48]
    assert torch.allclose(matrix @ matrix.T, torch.eye(15, dtype=torch.float64), atol=1e-12)
    x = features((6, 8))
    low = matrix.T @ (matrix @ x)
    assert torch.allclose(matrix.T @ resample_grid(low, (6, 8), (3, 5)), low, atol=1e-12)
    twice = resample_grid(resample_grid(x, (6, 8), (4, 6)), (4, 6), (2, 3))
    assert torch.allclose(twice, resample_grid(x, (6, 8), (2, 3)), atol=1e-12)
    turned = x.unflatten(1, (6, 8)).transpose(1, 2).flatten(1, 2)
    expected = resample_grid(x, (6, 8), (3, 5)).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2)
    assert torch.allclose(resample_grid(turned, (8, 6), (5, 3)), expected, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_what_it_says(name):
    """Shape and dtype; rows alone equal rows in a batch; with all tokens kept nothing changes (but coefficients)."""
    grid, method = (6, 6), method_of(name, 9)
    kept = 36 if name == "all_tokens" else 9
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = features(grid, channels=8, batch=3, dtype=dtype)
        found = applied(method, x, grid)
        assert found.dtype == dtype and found.shape == (3, kept, 8)
        assert torch.isfinite(found).all()
    x = features(grid, channels=8, batch=3)
    found = applied(method, x, grid)
    assert torch.allclose(found, torch.cat([applied(method, row[None], grid) for row in x]), atol=1e-6)
    if name not in NOT_ALL:
        assert torch.allclose(applied(method_of(name, 36), x, grid), x, atol=1e-10)
    assert from_dict(method.to_dict()) == method and dataclasses.is_dataclass(method)
    with pytest.raises(ValueError, match=r"use at most that|there are 36 queries"):
        method_of("divprune" if name == "all_tokens" else name, 37).count(grid)


def test_coefficients_are_scipys():
    x = features((6, 8))
    low = dctn(x.numpy().reshape(2, 6, 8, 5), axes=(1, 2), norm="ortho")[:, :3, :4].reshape(2, 12, 5)
    assert np.allclose(from_dict({"name": "dct_coefficients", "tokens": 12})(x, (6, 8)), low, atol=1e-12)


def test_average_pooling_is_the_mean_of_rectangles():
    x = features((5, 8))
    found = from_dict({"name": "average_pooling", "ratio": "1/2"})(x, (5, 8)).unflatten(1, (2, 4))
    image = x.unflatten(1, (5, 8))
    for i, rows in enumerate((slice(0, 3), slice(2, 5))):
        for j in range(4):
            assert torch.allclose(found[:, i, j], image[:, rows, 2 * j : 2 * j + 2].mean((1, 2)))


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_resizing_keeps_constants_and_channels_apart(name):
    method = from_dict({"name": name, "tokens": 9})
    assert torch.allclose(method(torch.ones(1, 36, 2).double(), (6, 6)), torch.ones(1, 9, 2).double())
    x = features((6, 6))
    assert torch.allclose(method(x.flip(-1), (6, 6)), method(x, (6, 6)).flip(-1), atol=1e-12)


def test_divprune_is_the_greedy_choice():
    x = features((4, 5), batch=1)[0]
    unit = x / x.norm(dim=-1, keepdim=True)
    distance = 1 - unit @ unit.T
    n = len(x)
    chosen = [max(range(n), key=lambda i: (min(distance[i, j].item() for j in range(n) if j != i), -i))]
    while len(chosen) < 7:
        left = [i for i in range(n) if i not in chosen]
        chosen.append(max(left, key=lambda i: (min(distance[i, j].item() for j in chosen), -i)))
    assert torch.equal(from_dict({"name": "divprune", "tokens": 7})(x[None], (4, 5))[0], x[sorted(chosen)])


def test_tome_is_a_loop_over_rounds():
    x = features((4, 4), batch=1)[0]
    held = [(i, vector, 1) for i, vector in enumerate(x)]  # place, mean, how many tokens
    while len(held) > 5:
        a, b = held[::2], [list(one) for one in held[1::2]]
        similar = [[torch.cosine_similarity(one[1], two[1], 0).item() for two in b] for one in a]
        order = sorted(range(len(a)), key=lambda i: -max(similar[i]))
        gone = order[: min(len(held) - 5, len(held) // 2)]
        sums = [[place, mean * size, size] for place, mean, size in b]
        for i in gone:
            j = similar[i].index(max(similar[i]))
            sums[j][1], sums[j][2] = sums[j][1] + a[i][1] * a[i][2], sums[j][2] + a[i][2]
        held = [a[i] for i in range(len(a)) if i not in gone] + [(p, total / size, size) for p, total, size in sums]
        held.sort(key=lambda one: one[0])
    found = from_dict({"name": "tome", "tokens": 5})(x[None], (4, 4))[0]
    assert torch.allclose(found, torch.stack([mean for _, mean, _ in held]), atol=1e-12)


def test_cost_is_what_the_counter_counts():
    from torch.utils.flop_counter import FlopCounterMode

    method = from_dict({"name": "fourier_vlm", "ratio": "2/3"})
    x = features((9, 12), channels=7, batch=1, dtype=torch.float32)
    method(x, (9, 12))  # makes the matrices, once
    with FlopCounterMode(display=False) as counter:
        method(x, (9, 12))
    assert counter.get_total_flops() == method.flops((9, 12), 7)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"name": "fourier_vlm"}, "give tokens or ratio"),
        ({"name": "fourier_vlm", "tokens": 9, "ratio": 0.5}, "give tokens or ratio"),
        ({"name": "fourier_vlm", "tokens": 0}, "at least 1"),
        ({"name": "fourier_vlm", "ratio": "3/2"}, r"\(0, 1\]"),
        ({"name": "fourier_vlm", "ratio": "half"}, r"\(0, 1\]"),
        ({"name": "fourier_vlm", "tokens": 9, "rescale": "energy"}, "'none' or 'amplitude'"),
        ({"name": "fourier_vlm", "tokens": 9, "transform": "dct"}, "'gemm' or 'fft'"),
        ({"name": "fourier_vml", "tokens": 9}, "did you mean 'fourier_vlm'"),
        ({"name": "fourier_vlm", "token": 9}, "did you mean 'tokens'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_dict(options)


def test_counts_that_a_grid_does_not_have_are_refused():
    method = from_dict({"name": "fourier_vlm", "tokens": 10})
    assert isinstance(method, GridCompressor)
    with pytest.raises(ValueError, match="use 9 or 16"):
        method.count((6, 6))
    with pytest.raises(ValueError, match="6 × 6 = 36; use at most that"):
        from_dict({"name": "divprune", "tokens": 37}).count((6, 6))
    assert from_dict({"name": "fourier_vlm", "tokens": 144}).kept((24, 24)) == (12, 12)
    assert from_dict({"name": "fourier_vlm", "ratio": "2/3"}).kept((17, 1)) == (11, 1)
