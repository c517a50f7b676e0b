"""The spectral filter of the Fourier Transformer against SciPy's DCT and by its laws."""

import math

import pytest
import torch
from scipy import fft

from fathom.ops.dct import dct, idct, low_pass, low_pass_rows

SIZES = [(1, 1), (2, 1), (7, 3), (8, 8), (12, 5), (13, 12), (64, 17)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_scipy(x: torch.Tensor, kept: int) -> torch.Tensor:
    spectrum = fft.dct(x.numpy(), norm="ortho", axis=-2)[..., :kept, :]
    return torch.from_numpy(fft.idct(spectrum, norm="ortho", axis=-2))


@pytest.mark.parametrize("transform", ["matmul", "fft"])
@pytest.mark.parametrize(("n", "kept"), SIZES)
def test_it_is_scipys_dct_cut_and_inverted_at_the_shorter_length(n, kept, transform):
    x = numbers(2, n, 3)
    torch.testing.assert_close(low_pass(x, kept, transform), by_scipy(x, kept), rtol=0, atol=1e-12)
    torch.testing.assert_close(dct(x.mT), torch.from_numpy(fft.dct(x.mT.numpy(), norm="ortho")), rtol=0, atol=1e-12)
    torch.testing.assert_close(idct(x.mT), torch.from_numpy(fft.idct(x.mT.numpy(), norm="ortho")), rtol=0, atol=1e-12)


@pytest.mark.parametrize("transform", ["matmul", "fft"])
def test_its_laws(transform):
    n, kept = 23, 9
    matrix = low_pass(torch.eye(n, dtype=torch.float64), kept, transform)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(kept, dtype=torch.float64), rtol=0, atol=1e-12)
    constant = low_pass(torch.full((1, n, 1), 2.5, dtype=torch.float64), kept, transform)
    torch.testing.assert_close(constant, torch.full_like(constant, 2.5 * math.sqrt(n / kept)))
    x = numbers(2, n, 4).requires_grad_()
    given = numbers(2, kept, 4)
    low_pass(x, kept, transform).backward(given)
    torch.testing.assert_close(x.grad, matrix.T @ given)  # the adjoint
    whole = torch.from_numpy(fft.idct(fft.dct(numbers(n, 2).numpy(), axis=0, norm="ortho") * (torch.arange(n) < kept)
                                      .numpy()[:, None], axis=0, norm="ortho"))  # fmt: skip
    torch.testing.assert_close(matrix.T @ low_pass(whole, kept, transform), whole)  # nothing above the band is lost
    twice = low_pass(low_pass(x, 15, transform), kept, transform)
    torch.testing.assert_close(twice, low_pass(x, kept, transform))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(low_pass(x[..., order], kept, transform), low_pass(x, kept, transform)[..., order])


@pytest.mark.parametrize("transform", ["matmul", "fft"])
def test_rows_of_several_lengths_are_the_rows_alone(transform):
    x = numbers(4, 20, 3)
    lengths, kept = torch.tensor([20, 7, 1, 7]), torch.tensor([10, 4, 1, 7])
    out = low_pass_rows(x, lengths, kept, 10, transform)
    for row, (n, k) in enumerate(zip(lengths.tolist(), kept.tolist(), strict=True)):
        torch.testing.assert_close(out[row, :k], by_scipy(x[row, :n], k), rtol=0, atol=1e-12)
        assert not out[row, k:].any()


def test_half_precision_is_computed_in_fp32():
    x = numbers(1, 30, 2)
    out = low_pass(x.bfloat16(), 10)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_scipy(x.bfloat16().double(), 10), rtol=1e-2, atol=1e-2)
