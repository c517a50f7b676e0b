"""Residual vector quantisation: a vector is a sum of one codeword from each of N codebooks, chosen greedily.

    r_1 = x;   z_i = argmin_s ‖r_i − Q_i[s]‖²;   r_{i+1} = r_i − Q_i[z_i];      x̂ = Σ_i Q_i[z_i]

`code_attention` attends to the codes without rebuilding x̂.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import has_kernel
from fathom.ops.residual_vq import plain
from fathom.ops.residual_vq.plain import decode, encode, unpacked

__all__ = ["decode", "encode", "rebuild", "unpacked"]


def rebuild(codes: Int[Tensor, "B G t N"], books: Float[Tensor, "sets N S D"]) -> Float[Tensor, "B G t D"]:
    """x̂ in the dtype of the codebooks; G / sets neighbouring heads share a set.

    codes: int16 holds code − 32768, other types the code. They may be a run of tokens of a longer tensor.
    """
    if has_kernel(books.device.type):
        from fathom.ops.residual_vq import kernel

        if kernel.serves(books):
            return kernel.rebuild(codes, books)
    return plain.rebuild(codes, books)
