"""Attention over packed min/max codes (KIVI, arXiv 2402.02750).

Of n tokens, keys 0 … n_k − 1 are codes in groups along tokens, one scale and minimum a channel; values 0 … n_v − 1 are
codes in groups along channels, one scale and minimum a token; n_v ≤ n_k, and what is newer is held in full:

    k̂ = code · scale + minimum,   s_t = scaling · q·k̂_t,   o = Σ_t e^{s_t − μ} v̂_t / Σ_t e^{s_t − μ}
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.group_quantize import Quantized
from fathom.ops.kernels import has_kernel
from fathom.ops.quantized_attention import plain
from fathom.ops.quantized_attention.plain import rebuilt_blocks

__all__ = ["quantized_attention", "rebuilt_blocks", "ring_quantized_attention"]


def quantized_attention(
    query: Float[Tensor, "B H m Dk"],
    key_codes: Quantized,
    value_codes: Quantized | None,
    key: Float[Tensor, "B G nk_full Dk"],
    value: Float[Tensor, "B G nv_full Dv"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H m Dv"]:
    """o of the m newest tokens, causal among themselves; their own keys and values are the newest of `key`, `value`.

    key_codes: packed codes [B,G,n_k/group,Dk,·], scale and minimum [B,G,n_k/group,Dk,1]. value_codes: the same,
    [B,G,n_v,Dv/group,·]; None where no value is coded. Together they hold as many keys as values.
    """
    given = query, key_codes, value_codes, key, value, bits, group, scaling
    if has_kernel(query.device.type):
        from fathom.ops.quantized_attention import kernel

        if kernel.serves(query, key, value, bits, group):
            return kernel.quantized_attention(*given)
    return plain.quantized_attention(*given)


def ring_quantized_attention(
    query: Float[Tensor, "B H 1 Dk"],
    key_codes: Quantized,
    value_codes: Quantized,
    key: Float[Tensor, "B G r Dk"],
    value: Float[Tensor, "B G r1 Dv"],
    newest: Int[Tensor, " 1"],
    bits: int,
    group: int,
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """o of the newest token, whose number n, counted from 0, only the device knows.

    Stores have room for more than what counts: codes of the keys before n − n mod r, codes of the values before n − r
    (of no value where n ≤ r).
    The key of a later token t is key[t mod r], its value value[t mod (r + 1)].
    """
    given = query, key_codes, value_codes, key, value, newest, bits, group, scaling
    if has_kernel(query.device.type):
        from fathom.ops.quantized_attention import kernel

        if kernel.serves(query, key, value, bits, group):
            return kernel.ring_quantized_attention(*given)
    return plain.ring_quantized_attention(*given)
