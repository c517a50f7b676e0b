"""Softmax of causal scores, and what every slot received.

For the query heads h of a key/value head, and the newest m of n slots as queries:

    p_his = softmax_s(scaling · x_his), s ≤ n − m + i;      r_s = Σ_i mean, sum or max over h of p_his
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fathom.ops.kernels import has_kernel
from fathom.ops.observed_softmax import plain


def weigh(
    scores: Float[Tensor, "B G hm n"], m: int, scaling: float, reduce: str
) -> tuple[Float[Tensor, "B G hm n"], Float[Tensor, "B G n"]]:
    """The weights p, which may take the place of the scores, and r in fp32 or wider.

    The rows of `scores` are the query heads of a key head, each with its m queries. reduce: "mean", "sum" or "max".
    """
    if has_kernel(scores.device.type):
        from fathom.ops.observed_softmax import kernel

        if kernel.serves(scores, m):
            return kernel.weigh_(scores, m, scaling, reduce)
    return plain.weigh(scores, m, scaling, reduce)
