"""One token in, one token out of a full slot cache, in three kernel launches.

M slots are stored and a token comes: n = M + 1 slots, the newest last. For the query heads h of a key/value head, with
unrotated keys k_s and R(s) the rotation at position s (the identity without tables):

    p_hs = softmax_s(scaling · R(n − 1) q_h · R(s) k_s),   o_h = Σ_s p_hs v_s
    r_s  = mean, sum or max over h of p_hs;   S ← [S, 0] + r  (or S = r);   C ← [C, 0] + 1
    j    = argmin of S/C (or S) over the candidates first … first + candidates − 1        (ties: the oldest)
    slot j leaves and later ones move up;  if values merge, v_{j+1} ← (s̄_j v_j + s̄_{j+1} v_{j+1}) / (s̄_j + s̄_{j+1})

The plain form is the pass that the cache makes for calls of any length (`SlotState.attend_part`), of `rotary_slots`,
`observed_softmax` and `take_slots`: this kernel is the three of them in one step.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fathom.ops.kernels import has_kernel, wants_gradient


def slot_decode(
    query: Float[Tensor, "B H 1 D"],
    new_key: Float[Tensor, "B G 1 D"],
    new_value: Float[Tensor, "B G 1 Dv"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M Dv"],
    table: tuple[Tensor, Tensor] | None,
    scaling: float,
    received: Float[Tensor, "B G M"] | None,
    queries: Int[Tensor, "B G M"] | None,
    pointer: Int[Tensor, " B"] | None,
    first: int,
    candidates: int = 1,
    stride: int = 0,
    cycle: int = 1,
    reduce: str = "none",
    accumulate: bool = False,
    average: bool = False,
    by_layer: bool = False,
    merge: bool = False,
) -> Float[Tensor, "B H 1 Dv"] | None:
    """The output o; key, value, received (fp32), queries (int32) and pointer (int64), all contiguous, change in place.

    None where no kernel takes these; then nothing has changed.

    table: cos and sin [1, ≥ n, D] of positions 0, 1, …, the second half of the channels as the first.
    first, candidates: the slots that may leave; with a pointer p [B] they begin at first + p, and p ← (p + stride) mod
        cycle. One candidate leaves whatever it received; several need reduce ≠ "none".
    reduce: "mean", "sum" or "max" over the query heads of a group; "none" observes nothing.
    accumulate: S ← [S, 0] + r rather than S = r. average: candidates compare by S/C, which needs `queries`.
    by_layer: candidates compare by their mean over the heads. merge: the value of slot j goes into slot j + 1.
    """
    if not has_kernel(query.device.type) or wants_gradient(query, new_key, new_value, key, value):
        return None
    from fathom.ops.slot_decode import kernel

    if not kernel.serves(query, key, value, None if table is None else table[0]):
        return None
    return kernel.slot_decode(
        query, new_key, new_value, key, value, table, scaling, received, queries, pointer, first, candidates, stride,
        cycle, reduce, accumulate, average, by_layer, merge,
    )  # fmt: skip
