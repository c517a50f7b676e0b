"""Attention over residual codes (VQKV, arXiv 2603.16435) without rebuilding a vector: tables and a histogram.

For tokens with codes z [tokens, N] of N codebooks Q_i with S entries each:

    q·k̂_t = Σ_i A_i[z_ti],  A_i = Q_i q;        Σ_t p_t v̂_t = Σ_i P_i Q_i,  P_i[s] = Σ_{t: z_ti = s} p_t

`lookup_scores` and `histogram_mix` are the plain forms; `code_scores` and `code_mix` take a kernel where it serves.
Codes are int16 less 32768, or int32 as they are; books [G or 1, N, S, D]. m query rows share the codes of a key head.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.code_attention.plain import histogram_mix, lookup_scores
from fathom.ops.kernels import FLOATS, has_kernel, wants_gradient

__all__ = ["code_mix", "code_scores", "histogram_mix", "lookup_scores"]


def code_scores(
    query: Float[Tensor, "B G m D"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G m t"]:
    """q·k̂ in fp32 or wider."""
    if _serves(query, books):
        from fathom.ops.code_attention import kernel

        return kernel.code_scores(query, codes, books)
    return lookup_scores(query, codes, books)


def code_mix(
    weights: Float[Tensor, "B G m t"], codes: Int[Tensor, "B G t N"], books: Float[Tensor, "#G N S D"]
) -> Float[Tensor, "B G m D"]:
    """Σ_t p_t v̂_t in fp32 or wider."""
    if _serves(weights, books):
        from fathom.ops.code_attention import kernel

        return kernel.code_mix(weights, codes, books)
    return histogram_mix(weights, codes, books)


def _serves(x: Tensor, books: Tensor) -> bool:
    """Whether the kernels take these: 16 or 32 bits, no gradient wanted."""
    return has_kernel(x.device.type) and {x.dtype, books.dtype} <= {*FLOATS} and not wants_gradient(x, books)
