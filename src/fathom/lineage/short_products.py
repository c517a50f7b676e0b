r"""Matrix products of numbers that bfloat16 holds: several times as fast, and nothing is lost.

Most checkpoints are stored in bfloat16. The product of two such numbers has 16 significant bits, so units that take
bfloat16 (AMX, AVX-512) or TensorFloat-32 (tensor cores) and add in float32 return what a float32 product returns, up to
the order of its sums. Permuting, flipping signs and scaling by powers of two keep a matrix short; folding a gain or a
rotation does not, and such matrices are multiplied in full float32 whatever the process has set.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_short(x: Tensor) -> bool:
    """Whether bfloat16 holds every entry of a float32 matrix: the low halves of all words are zero."""
    x = x if x.ndim == 0 or x.stride(-1) == 1 else x.mT
    if x.dtype != torch.float32 or x.stride(-1) != 1:
        return False
    return not torch.count_nonzero(x.view(torch.int16)[..., ::2])  # little endian: the low half comes first


def near_one(x: Tensor) -> float:
    """A power of two, which rounds nothing, that brings entries of x near 1; 1 where they are, or all are zero.

    Float32 holds 1e-38 … 3e38, but squares and sums of squares only of numbers within about 1e±18.
    """
    norm = length(x).item()
    if norm == 0:
        return 1.0
    exponent = math.frexp(math.sqrt(x.numel()) / norm)[1] - 1
    return 1.0 if abs(exponent) <= 10 else math.ldexp(1.0, min(max(exponent, -126), 127))


def length(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Euclidean norms of x over `dim`, which is kept (None: all, a scalar); in float64 where float32 squares overflow
    or vanish."""
    keep = dim is not None
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=keep)
    if ((norm > 1e-15) & (norm < 1e15)).all():
        return norm
    return torch.linalg.vector_norm(x, dim=dim, keepdim=keep, dtype=torch.float64)


@contextmanager
def precision(short: bool) -> Iterator[None]:
    """Float32 products inside are computed from bfloat16 or TF32 operands if `short`, else in full float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if short else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gram(x: Tensor) -> Tensor:
    """XXᵀ [d, d] of x [d, p], each block off the diagonal computed once: ¾ of the products."""
    d = x.shape[0]
    if d < 1024:
        return x @ x.T
    half, product = d // 2, x.new_empty(d, d)
    product[:half] = x[:half] @ x.T
    product[half:, half:] = x[half:] @ x[half:].T
    product[half:, :half] = product[:half, half:].T
    return product
