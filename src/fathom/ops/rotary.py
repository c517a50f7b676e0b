"""Rotary positions (RoPE, arXiv 2104.09864), the half-split layout of Llama and GPT-NeoX.

    y = x · cos + rotate_half(x) · sin,   rotate_half([a, b]) = [−b, a]

Only the first `cos.shape[-1]` channels turn (partial rotary of GPT-NeoX).
"""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(
    x: Float[Tensor, "B heads T D"], cos: Float[Tensor, "#B T R"], sin: Float[Tensor, "#B T R"]
) -> Float[Tensor, "B heads T D"]:
    """Rotate queries or keys by their positions; R ≤ D channels turn, the rest passes through (cos and sin of batch 1
    serve every row)."""
    width = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = turned.chunk(2, dim=-1)
    turned = torch.addcmul(turned * cos, torch.cat((-second, first), dim=-1), sin)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
