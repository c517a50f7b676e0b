"""Attention of a block of new queries over a cache that already holds their keys, the newest in the last slots.

    o_i = Σ_s p_is v_s,   p_i = softmax_s(scaling · q_i·k_s),   s ≤ n − m + i     (n slots, m queries, i = 0 … m−1)

Three forms: plain (SDPA), observed (also how much attention the slots received), and over a cache that is rebuilt block
by block. Query head h reads key/value head h // (H/G). Softmax in fp32, or wider for float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from fathom.ops.kernels import wants_gradient
from fathom.ops.observed_softmax import weigh

# Scores that are written out at once: 2²⁵ fp32 numbers are 128 MiB.
SCORES_AT_ONCE = 2**25
# Calls of at least this many queries meet a rebuilt block in one flash kernel.
FUSED_QUERIES = 64
# Scores from which on cuDNN's two kernels and a merge beat one of flash: measured, half the time at 2²⁸ and 2²⁴, five
# times as long below 2²⁰.
TWO_PARTS = 2**23


def causal_attention(
    query: Float[Tensor, "B H m D"],
    key: Float[Tensor, "B G n D"],
    value: Float[Tensor, "B G n Dv"],
    scaling: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H m Dv"]:
    """The plain form: the fastest exact kernel of SDPA (flash on GPU), differentiable."""
    if not query.dtype == key.dtype == value.dtype:  # rotated in fp32 under autocast, which not every form below casts
        query, key = query.to(value.dtype), key.to(value.dtype)
    m, n, groups = query.shape[2], key.shape[2], key.shape[1]
    if m == 1 and groups < query.shape[1]:  # the heads of a group as queries: keys are read once, by any kernel
        grouped = query.reshape(query.shape[0], groups, -1, query.shape[3])
        mixed = F.scaled_dot_product_attention(grouped, key, value, dropout_p=dropout, scale=scaling)
        return mixed.reshape(*query.shape[:3], -1)
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if m == 1:
        return F.scaled_dot_product_attention(query, key, value, **options)
    if m == n:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if not dropout and m * n >= TWO_PARTS and _has_cudnn(query, key, value):
        return _in_two_parts(query, key, value, scaling)
    if query.is_cuda or m * n <= SCORES_AT_ONCE:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal_lower_right(m, n), **options)
    outputs, end = [], n - m  # elsewhere SDPA writes the mask out
    for part in query.split(max(1, SCORES_AT_ONCE // n), dim=2):
        end += part.shape[2]
        visible = torch.ones(part.shape[2], end, dtype=torch.bool, device=query.device).tril(end - part.shape[2])
        keys, values = key[:, :, :end], value[:, :, :end]
        outputs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=visible, **options))
    return torch.cat(outputs, dim=2)


@dataclasses.dataclass(frozen=True)
class Newest:
    """The mask of queries that are the newest tokens of a cache without pads: `causal_attention` writes none out."""


def newest_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Newest, scaling: float, dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B m H Dv"], None]:  # fmt: skip
    """`causal_attention` as a function of transformers' `AttentionInterface`."""
    return causal_attention(query, key, value, scaling, dropout).transpose(1, 2), None


def observed_attention(
    query: Float[Tensor, "B H m D"],
    key: Float[Tensor, "B G n D"],
    value: Float[Tensor, "B G n Dv"],
    scaling: float,
    last: int,
    reduce: str = "mean",
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "B H m Dv"], Float[Tensor, "B G n"]]:
    """Also returns r_s = Σ_i reduce_{h in group}(p_his) over the last `last` queries, in fp32 or wider.

    `reduce` is "mean", "sum" or "max" over the query heads of a key head. Scores are written out for a bounded number
    of queries at a time. With `last` < m the outputs come from SDPA and only the observed rows are written out. Weights
    are dropped for the output, not for r.
    """
    m, n = query.shape[2], key.shape[2]
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    last = min(last, m)
    outputs = None if last == m else causal_attention(query, key, value, scaling, dropout)
    rows = max(1, SCORES_AT_ONCE // (batch * heads * n))
    if last == m <= rows:
        weights, received = weigh(_scores(query, key), m, scaling, reduce)
        return _mix(F.dropout(weights, dropout), value, m), received
    received = key.new_zeros(batch, groups, n, dtype=torch.promote_types(key.dtype, torch.float32))
    pieces = []
    for start in range(m - last, m, rows):
        stop = min(start + rows, m)
        visible = n - m + stop
        scores = _scores(query[:, :, start:stop], key[:, :, :visible])
        weights, part = weigh(scores, stop - start, scaling, reduce)
        received[..., :visible].add_(part)
        if outputs is None:
            pieces.append(_mix(F.dropout(weights, dropout), value[:, :, :visible], stop - start))
    if outputs is None:
        outputs = torch.cat(pieces, dim=2)
    return outputs, received


def _scores(query: Tensor, key: Tensor) -> Float[Tensor, "B G hm n"]:
    """q·k, grouped by key head."""
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3]) @ key.transpose(2, 3)


def _mix(weights: Float[Tensor, "B G hm n"], value: Float[Tensor, "B G n Dv"], m: int) -> Float[Tensor, "B H m Dv"]:
    return (weights.to(value.dtype) @ value).view(len(value), -1, m, value.shape[-1])


def blockwise_attention(
    query: Float[Tensor, "B H m D"],
    blocks: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    newest: tuple[Float[Tensor, "B G t D"], Float[Tensor, "B G t Dv"]],
    scaling: float,
) -> Float[Tensor, "B H m Dv"]:
    """Attention over `blocks()` (older than every query, so all visible) and then `newest`, whose last m slots are the
    queries' own (causal). The blocks are made one at a time, so the whole cache is never rebuilt.

    With λ the log-sum-exp of a block's scores and o its output, two blocks a, b give λ = log(e^{λ_a} + e^{λ_b}) and
    o = o_a + w (o_b − o_a), w = σ(λ_b − λ_a). Every block is made once, however many queries there are.
    """
    rows = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * max(newest[0].shape[2], 4096)))
    query = query.contiguous()  # or every block would copy it
    parts = query.split(rows, dim=2)
    end, states = newest[0].shape[2] - query.shape[2], []
    for part in parts:
        end += part.shape[2]
        states.append(_partial(part, newest[0][:, :, :end], newest[1][:, :, :end], scaling, causal=True))
    for key, value in blocks():
        if query.shape[2] >= FUSED_QUERIES and _has_fused(query, key, value):
            if len(parts) > 1:  # all queries meet the block in one kernel, so their sums are kept in one piece
                states, parts = [_join(states, parts)], (query,)
            states = [_merge(states[0], _fused_partial(query, key, value, scaling))]
        else:
            states = [_merge(s, _partial(p, key, value, scaling, causal=False)) for s, p in zip(states, parts)]
    mixed = [o.reshape(*part.shape[:3], -1).to(query.dtype) for part, (_, o) in zip(parts, states)]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


# log-sum-exp [B,G,hm,1] and output [B,G,hm,Dv], in fp32 or wider
Partial = tuple[Tensor, Tensor]


def _has_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a flash kernel that also gives log-sum-exp serves these: no gradient, and half precision on a GPU."""
    if wants_gradient(query, key, value):
        return False
    fits = query.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    if query.is_cuda:
        half = query.dtype in (torch.float16, torch.bfloat16)
        return fits and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and query.device.type == "cpu"


def _has_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's attention runs, which on Hopper takes half of flash's time, but knows no triangle at the end."""
    return (
        query.is_cuda
        and not torch.compiler.is_compiling()
        and query.shape[-1] <= 128
        and _has_fused(query, key, value)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
    )


def _in_two_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """`causal_attention` of m queries: all that lies before them, then their own m slots, which are a square."""
    m, n = query.shape[2], key.shape[2]
    repeats, groups = query.shape[1] // key.shape[1], key.shape[1]
    before = _fused_partial(query, key[:, :, : n - m], value[:, :, : n - m], scaling)
    own_key, own_value = (x[:, :, n - m :].repeat_interleave(repeats, dim=1) for x in (key, value))
    total, output = _fused(query, own_key, own_value, scaling, causal=True)
    own = total.reshape(len(query), groups, -1, 1), output.reshape(len(query), groups, -1, value.shape[3])
    mixed = _merge(before, own)[1]
    return mixed.view(*query.shape[:3], -1).to(query.dtype)


def _fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool = False) -> Partial:
    """log-sum-exp [B,H,m,1] and output [B,H,m,Dv] in one kernel, of as many key heads as query heads."""
    wide = torch.promote_types(query.dtype, torch.float32)
    options: dict[str, Any] = {"is_causal": causal, "scale": scaling}
    if not query.is_cuda:
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **options)
    elif _has_cudnn(query, key, value):
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, total = attention(query, key, value, None, True, **options)[:2]
    else:
        output, total = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[:2]
    return total.reshape(*query.shape[:3], 1).to(wide), output.to(wide)


def _fused_partial(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Partial:
    """The result of `_partial` without a mask, from one kernel."""
    batch, heads, m, width = query.shape
    groups = key.shape[1]
    return _fused(query.reshape(batch, groups, heads // groups * m, width), key, value, scaling)


def _partial(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> Partial:
    batch, heads, m, width = query.shape
    groups, n = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, groups, heads // groups * m, width)
    scores = (grouped @ key.to(query.dtype).transpose(2, 3)).to(wide) * scaling
    if causal and m > 1:
        hidden = torch.ones(m, n, dtype=torch.bool, device=key.device).triu(n - m + 1)
        scores = scores.view(batch, groups, -1, m, n).masked_fill(hidden, float("-inf")).view_as(scores)
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    norm = weights.sum(-1, keepdim=True)
    return highest + norm.log(), (weights.to(value.dtype) @ value).to(wide) / norm


def _join(states: list[Partial], parts: tuple[Tensor, ...]) -> Partial:
    """The states of all parts of the queries as one: rows are query heads, each with its queries."""
    total, output = (
        torch.cat([x.unflatten(2, (-1, part.shape[2])) for x, part in zip(held, parts)], dim=3).flatten(2, 3)
        for held in zip(*states)
    )
    return total, output


def _merge(a: Partial, b: Partial) -> Partial:
    return torch.logaddexp(a[0], b[0]), torch.lerp(a[1], b[1], torch.sigmoid(b[0] - a[0]))
