"""Σ_e g_e F_e(x) over the experts chosen for each token, by two grouped products.

A pair is a token and one of its experts. Pairs in the order of their experts are the groups of a product:

    rows    = x[token of the pair]                          spread
    hidden  = g ⊙ act(rows W_first,e)                       the gate on the narrow side: W_down (g h) = g W_down h
    y       = Σ over the pairs of a token: hidden W_down,e   gather

Spreading and gathering are each the other's adjoint, and a pair's place is known both ways. So both directions are
reads in order: nothing is added by index, which on a GPU sorts, or depends on who comes first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Spread(torch.autograd.Function):
    """[N, d] to [N·k, d]: row `order[i] // k` at i. `place` is the inverse of the permutation `order`."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, place: Tensor, each: int) -> Tensor:
        return x[order // each]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, order, place, ctx.each = inputs
        ctx.save_for_backward(order, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Gather.apply(gradient, *ctx.saved_tensors, ctx.each), None, None, None


class Gather(torch.autograd.Function):
    """[N·k, d] to [N, d]: the sum of each token's k rows, in fp32 or wider. The adjoint of `Spread`."""

    @staticmethod
    def forward(rows: Tensor, order: Tensor, place: Tensor, each: int) -> Tensor:
        return rows[place].unflatten(0, (-1, each)).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, order, place, ctx.each = inputs
        ctx.save_for_backward(order, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Spread.apply(gradient, *ctx.saved_tensors, ctx.each), None, None, None


def grouped_experts(
    experts: Any, x: Float[Tensor, "N d"], chosen: Int[Tensor, "N k"], gates: Float[Tensor, "N k"]
) -> Float[Tensor, "N d"]:
    """Σ_e g_e F_e(x). `experts` has what transformers' `ExpertsInterface` reads; all in one dtype.

    Rows that are no expert's, of experts on other devices, are not foreseen.
    """
    each = chosen.shape[-1]
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(expert, torch.arange(experts.num_experts, device=order.device), right=True).int()
    gate = Spread.apply(gates.reshape(-1, 1), order, place, 1)
    first, first_bias = (experts.gate_up_proj, experts.gate_up_proj_bias) if experts.has_gate else (
        experts.up_proj, experts.up_proj_bias
    )  # fmt: skip
    hidden = F.grouped_mm(Spread.apply(x, order, place, each), first.transpose(-2, -1), offs=ends)
    if experts.has_bias:
        hidden = hidden + first_bias[expert]
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    out = F.grouped_mm(hidden * gate, experts.down_proj.transpose(-2, -1), offs=ends)
    if experts.has_bias:
        out = out + gate * experts.down_proj_bias[expert]
    return Gather.apply(out, order, place, each)
