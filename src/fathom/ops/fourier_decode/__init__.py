"""One query over raw channels and Fourier coefficients, in one pass over the tokens (flash decoding).

Coefficients meet the tokens on the coarse grid of `fourier_grid`: with g the grid of the scores that the compressed
key channels give, Φ its interpolation to a block of tokens, and k_raw, v_raw the raw channels of all heads,

    s = scaling · (g Φ + q k_rawᵀ),   e = e^{s − μ},   l = Σ e,   o = Σ e v_raw,   z = e Φᵀ

z goes back through the grid's FFT to the value coefficients. No key or value is rebuilt; the kernel writes no score.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathom.ops.fourier_decode import plain
from fathom.ops.fourier_grid import Grid
from fathom.ops.kernels import FLOATS, has_kernel


def raw_partials(
    query: Float[Tensor, "B H Rk"],
    scores: Float[Tensor, "B H K"],
    raw_key: Float[Tensor, "B t Rk"],
    raw_value: Float[Tensor, "B t Rv"],
    key_starts: list[int],
    value_starts: list[int],
    grid: Grid,
    scaling: float,
) -> tuple[Float[Tensor, "B H 1"], Float[Tensor, "B H 1"], Float[Tensor, "B H Rv"], Float[Tensor, "B H K"]]:
    """μ, l, o and z over all tokens, not yet divided by l; fp32.

    Of o only the channels of a head's own key head have a meaning. query: zero outside the own key head's channels.
    scores: g, fp32. *_starts [G+1]: where each head's raw channels begin. grid: made for `block_tokens(dtype)`.
    """
    given = query, scores, raw_key, raw_value, key_starts, value_starts, grid, scaling
    if has_kernel(query.device.type) and query.dtype in FLOATS:
        from fathom.ops.fourier_decode import kernel

        return kernel.raw_partials(*given)
    return plain.raw_partials(*given)
