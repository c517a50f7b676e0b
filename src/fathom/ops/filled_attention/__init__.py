"""Attention of one new token a row over a cache with room: a mask shows which slots of the buffers count.

    o_h = Σ_s p_hs v_s,   p_hs = softmax over the visible s of (scaling · q_h·k_s)

Query head h reads key/value head h // (H/G). Softmax in fp32. Every row sees one slot at least.
"""

from __future__ import annotations

import torch
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
    if torch.compiler.is_compiling():
        return _opaque(query, key, value, visible, scaling)
    if has_kernel(query.device.type) and not wants_gradient(query, key, value):
        from fathom.ops.filled_attention import kernel

        if kernel.serves(query, key, value):
            return kernel.filled_attention(query, key, value, visible, scaling)
    return plain_filled_attention(query, key, value, visible, scaling)


SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor visible, float scaling) -> Tensor"


@torch.library.custom_op("fathom::filled_attention", mutates_args=(), schema=SCHEMA)  # annotations may be checked ones
def _opaque(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """The same for a compiled graph, which does not look inside: torch 2.11's compiler fails at the kernels."""
    return filled_attention(query, key, value, visible, scaling).contiguous()


@_opaque.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
