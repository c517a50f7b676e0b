"""Attention of one new token a row over a cache with room: a mask shows which slots of the buffers count.

    o_h = Σ_s p_hs v_s,   p_hs = softmax over the visible s of (scaling · q_h·k_s)

Query head h reads key/value head h // (H/G). Softmax in fp32. Every row sees one slot at least.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from fathom.ops.filled_attention.plain import plain_filled_attention
from fathom.ops.kernels import has_kernel, wants_gradient


def filled_attention(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G R D"],
    value: Float[Tensor, "B G R Dv"],
    visible: Bool[Tensor, "B 1 1 R"],
    scaling: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """The output o. A kernel reads a slot's key and value only where a block of slots has a visible one, and reads them
    once for all query heads of a group; without one it is SDPA with the mask."""
    if has_kernel(query.device.type) and not wants_gradient(query, key, value):
        from fathom.ops.filled_attention import kernel

        if kernel.serves(query, key, value):
            return kernel.filled_attention(query, key, value, visible, scaling)
    return plain_filled_attention(query, key, value, visible, scaling)
