r"""One representative of all checkpoints that compute the same function: what every lineage method reads.

A pre-norm decoder keeps its function under a group of re-parameterisations. Each is undone here by a choice that
does not
depend on where in the group one starts (exact: equal up to rounding), so methods built on top need no defence of
their own:

    norm gains          W ← W·diag(γ), γ ← 1;  LayerNorm also W ← W(I − 11ᵀ/d) and E ← E(I − 11ᵀ/d)
    q/k under RoPE      per head and rotary pair: q·a, k/a with a = (n_k/n_q)^¼, n = squared norms of the
    pair's rows
    q/k elsewhere       W_qᵀW_k = U S Vᵀ per head:  W_q ← S^½Uᵀ, W_k ← S^½Vᵀ  (any B ∈ GL(h) cancels)
    QK-norm             each head's rows to unit norm, times its gains, then pair balance (the norm hides head scale)
    v/o                 as q/k elsewhere
    heads               each (q, k) to norm 1, weighed by ‖W_oW_v‖; equal patterns added; what writes nothing left out
    up/down             gated or ReLU: neuron i scaled so that ‖up_i‖ = ‖down_i‖
    padding             dead layers, heads, neurons and residual dims removed; split neurons merged

What is left — orthogonal maps on head outputs, order of heads and neurons, rotation of the residual stream — is
left to the
metric (CKA and products of weights do not see the first two) and to `align` (the third).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.lineage.reader import Checkpoint
from fathom.lineage.short_products import length, near_one

_PROBE_ROWS = 8  # a live writer shows non-zero entries in its first rows; only suspects are read whole
_PROBES = 8  # random directions that tell attention patterns apart
_ALIKE = 1e-2  # patterns of different heads differ by more than their own size; rounding to bfloat16 stays below this
_NOTHING = 1e-6  # products this small against their factors are rounding


def residual_dims(model: Checkpoint) -> Tensor | None:
    """Indices of the residual dims that anything writes to, or None when all are live (the usual case, one cheap
    look)."""
    dead = ~model.embedding(slice(0, 4096)).bool().any(0)
    if not dead.any():
        return None
    dead &= ~model.embedding().bool().any(0)
    for layer in range(model.geometry.layers):
        for role in _writers(model, layer):
            if not dead.any():
                return None
            dead &= ~model.read(layer, role).bool().any(1)
    return None if not dead.any() else torch.nonzero(~dead).flatten()


def _writers(model: Checkpoint, layer: int) -> Iterator[str]:
    if model.has(layer, "o"):
        yield "o"
    yield from (prefix + "down" for prefix in model.feed_forwards(layer))


def live_layers(model: Checkpoint) -> list[int]:
    """Layers that write something: those with W_o ≠ 0 or W_down ≠ 0. Depth growth (LLaMA-Pro) adds dead ones."""

    def writes(layer: int, role: str) -> bool:
        return bool(model.read(layer, role, slice(0, _PROBE_ROWS)).any()) or bool(model.read(layer, role).any())

    return [l for l in range(model.geometry.layers) if any(writes(l, role) for role in _writers(model, l))]


def embedding(model: Checkpoint, dims: Tensor | None, rows: slice | None = None) -> Tensor:
    """Input embedding [rows, d] over live dims; LayerNorm models: without the row mean that their norms remove."""
    return _centre(model, _select(model.embedding(rows), dims))


def output_head(model: Checkpoint, dims: Tensor | None, rows: slice | None = None) -> Tensor:
    """Output head [rows, d] with the final norm's gain folded in."""
    head = model.head(rows)
    if (gain := model.outer("final_norm")) is not None:
        head = head * gain
    return _centre(model, _select(head, dims))


def _select(weight: Tensor, dims: Tensor | None) -> Tensor:
    return weight if dims is None else weight[..., dims]


def _centre(model: Checkpoint, weight: Tensor) -> Tensor:
    return weight - weight.mean(-1, keepdim=True) if model.family.norm == "layer" else weight


def fold(model: Checkpoint, layer: int, weight: Tensor, norm: str, dims: Tensor | None) -> Tensor:
    """A reader of the residual stream [out, d] with the gain of the norm before it multiplied in, over live dims."""
    if norm == "ffn_norm" and not model.has(layer, norm):
        norm = "attn_norm"  # parallel blocks (Phi, Cohere) share one norm
    if model.family.post_norm:
        return _select(weight, dims)
    if model.has(layer, norm):  # OLMo's norms centre without a gain
        weight = weight * model.read(layer, norm)
    return _centre(model, _select(weight, dims))


def query_key(model: Checkpoint, layer: int, dims: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Canonical (W_q, W_k), both [H'·h, d], of a layer: the H' heads that reach the stream, each with √weight."""
    heads = attention_heads(model, layer, dims)
    live = heads.weight > 0
    root = heads.weight[live].sqrt().to(heads.q.dtype)[:, None, None]
    return (heads.q[live] * root).flatten(0, 1), (heads.k[live] * root).flatten(0, 1)


@dataclass(frozen=True)
class Heads:
    """The query heads of a layer, each beside the key head that it meets: q and k [H, h, d], of norm 1 each.

    weight [H]: ‖W_oW_v‖ of each head, the largest 1. Heads with one attention pattern act as one: their products are
    added, and the first of them bears the weight. 0: nothing reaches the stream, q and k are no part of the function.
    """

    q: Tensor
    k: Tensor
    weight: Tensor


def attention_heads(model: Checkpoint, layer: int, dims: Tensor | None = None) -> Heads:
    """Canonical heads. Grouped queries are written out, so that sharing a key head or copying it is the same."""
    g = model.geometry
    q = fold(model, layer, model.read(layer, "q"), "attn_norm", dims)
    k = fold(model, layer, model.read(layer, "k"), "attn_norm", dims)
    q = q.reshape(g.heads, 1, g.head_dim, -1)
    k = k.reshape(g.kv_heads, 1, g.head_dim, -1)
    normed = model.has(layer, "q_norm") and model.has(layer, "k_norm")
    if normed:
        q = _apply_head_norm(q, model.read(layer, "q_norm"))
        k = _apply_head_norm(k, model.read(layer, "k_norm"))
    k = k.repeat_interleave(g.heads // g.kv_heads, 0)
    weight = _head_weights(model, layer, q[:, 0], k[:, 0], dims, normed)
    q, k = (t[:, 0] for t in balance_query_key(q, k, g.rotary(layer), normed))
    q, k = (t / length(t, (1, 2)).clamp_min(1e-37).to(t.dtype) for t in (q, k))
    return Heads(q, k, weight)


def _apply_head_norm(heads: Tensor, gain: Tensor) -> Tensor:
    """[H, 1, h, d] → unit-norm rows of each head, times gains. OLMo-2 norms all heads together: gain [H·h]."""
    if gain.numel() == heads.shape[2]:
        return heads / length(heads, (2, 3)).clamp_min(1e-37).to(heads.dtype) * gain[:, None]
    return heads / length(heads).clamp_min(1e-37).to(heads.dtype) * gain.reshape(*heads.shape[:3], 1)


def _head_weights(model: Checkpoint, layer: int, q: Tensor, k: Tensor, dims: Tensor | None, normed: bool) -> Tensor:
    """What each head writes, [H] in float64, the largest 1; see `Heads`. All 1 where the layer has no v or o."""
    if not (model.has(layer, "v") and model.has(layer, "o")):
        return q.new_ones(len(q), dtype=torch.float64)
    v, o = _value_output_heads(model, layer, dims)
    squares = [(t @ t.mT).double() for t in (v, o)]
    size = torch.stack([t.diagonal(dim1=1, dim2=2).sum(1) for t in squares]).prod(0).sqrt()
    weight = (squares[0] * squares[1]).sum((1, 2)).clamp_min(0).sqrt()
    leader = _pattern_leaders(model, layer, q, k, normed)
    members = torch.bincount(leader, minlength=len(q))
    weight = torch.where(members > 0, weight, 0.0)
    # The traces above lose products far below the sizes of their factors; those, and sums over heads, are made in full.
    for head in torch.nonzero((members > 1) | ((members == 1) & (weight < 1e-2 * size))).flatten().tolist():
        same = torch.nonzero(leader == head).flatten()
        product = torch.einsum("mhd,mhe->de", o[same].double(), v[same].double()).norm()
        weight[head] = torch.where(product > _NOTHING * size[same].sum(), product, 0.0)
    return weight / weight.max().clamp_min(1e-300)


def _value_output_heads(model: Checkpoint, layer: int, dims: Tensor | None) -> tuple[Tensor, Tensor]:
    """W_v and W_oᵀ of every query head, both [H, h, d], brought near 1 by powers of two."""
    g = model.geometry
    v = fold(model, layer, model.read(layer, "v"), "attn_norm", dims).reshape(g.kv_heads, -1, _width(model, dims))
    o = written(model, layer, model.read(layer, "o"), "post_attn_norm", dims).T.reshape(g.heads, v.shape[1], -1)
    return (v * near_one(v)).repeat_interleave(g.heads // g.kv_heads, 0), o * near_one(o)


def _pattern_leaders(model: Checkpoint, layer: int, q: Tensor, k: Tensor, normed: bool) -> Tensor:
    """For every head the first head that attends as it does, [H].

    Two heads attend alike iff for each rotary pair the complex products (q·x)(k·y)* agree for all x and y, and for the
    other rows the sum of theirs. A few random x and y decide that.
    """
    alone = torch.arange(len(q), device=q.device)
    biased = model.has(layer, "q.bias") or model.has(layer, "k.bias")
    if model.config.get("alibi") or model.config.get("model_type") in {"bloom", "mpt"} or (biased and normed):
        return alone  # ALiBi: every head has its own slope. Under QK-norm a bias is scaled with its head: not followed
    generator = torch.Generator().manual_seed(20251006)
    x, y = torch.randn(2, q.shape[2], _PROBES, generator=generator, dtype=torch.float64).to(q)
    half = model.geometry.rotary(layer) // 2
    sides = []
    for role, heads, probe in (("q", q, x), ("k", k, y)):
        seen = (heads * near_one(heads)) @ probe
        if model.has(layer, role + ".bias"):
            bias = model.read(layer, role + ".bias").reshape(-1, heads.shape[1], 1) * near_one(heads)
            seen = seen + bias.repeat_interleave(len(heads) // len(bias), 0)
        sides.append((torch.complex(seen[:, :half], seen[:, half : 2 * half]), seen[:, 2 * half :]))
    (turn_q, rest_q), (turn_k, rest_k) = sides
    pairs = torch.view_as_real(turn_q * turn_k.conj()).flatten(1)
    pattern = torch.cat([pairs, (rest_q * rest_k).sum(1)], dim=1)
    apart = torch.cdist(pattern, pattern, compute_mode="donot_use_mm_for_euclid_dist")
    return (apart <= _ALIKE * pattern.norm(dim=1)).int().argmax(1)


def writes(model: Checkpoint, layer: int) -> bool:
    """Whether anything the layer computes reaches the stream: a head, or a neuron whose three rows are not zero."""
    if all(model.has(layer, role) for role in "qkvo") and attends(model, layer):
        return True
    return any(len(feed_forward(model, layer, prefix)[1]) for prefix in model.feed_forwards(layer))


def attends(model: Checkpoint, layer: int) -> bool:
    """Whether any head of the layer writes something."""
    return bool((attention_heads(model, layer).weight > 0).any())


def balance_query_key(q: Tensor, k: Tensor, rotary: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Spread q [Hkv, g, h, d] and k [Hkv, 1, h, d] evenly over the maps that keep every score qᵀ·RoPE·k.

    Rotary pairs (rows i and i + rotary/2) admit one scale for each KV group; other rows any invertible map — under
    QK-norm
    only a scale for each row.
    """
    half = rotary // 2

    def scale(rows_q: Tensor, rows_k: Tensor) -> Tensor:
        """√(‖k‖/‖q‖) for norms [Hkv, n]; 1 where a side is zero."""
        return torch.where((rows_q > 0) & (rows_k > 0), rows_k / rows_q, 1.0).sqrt()

    norm_q, norm_k = (length(x, 3).double().norm(dim=1)[..., 0] for x in (q, k))
    pair = scale(*(torch.hypot(n[:, :half], n[:, half:rotary]) for n in (norm_q, norm_k)))
    rest = scale(norm_q[:, rotary:], norm_k[:, rotary:]) if normed else torch.ones_like(norm_q[:, rotary:])
    a = torch.cat([pair, pair, rest], dim=1)[:, None, :, None].to(q.dtype)
    q, k = q * a, k / a
    if not normed and rotary < q.shape[2]:
        free_q, free_k = balance_product(q[:, :, rotary:], k[:, :, rotary:])
        q = torch.cat([q[:, :, :rotary], free_q], dim=2)
        k = torch.cat([k[:, :, :rotary], free_k], dim=2)
    return q, k


def balance_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a [G, m, h, d], b [G, n, h, d'] seen up to a → Ba, b → B⁻ᵀb: S^½Uᵀ and S^½Vᵀ of the product Σ_h a_h ⊗ b_h =
    USVᵀ."""
    flat_a, flat_b = a.transpose(1, 2).flatten(2), b.transpose(1, 2).flatten(2)  # [G, h, m·d]
    base_a, tri_a = torch.linalg.qr(flat_a.mT)
    base_b, tri_b = torch.linalg.qr(flat_b.mT)
    u, s, vt = torch.linalg.svd(tri_a @ tri_b.mT)
    root = s.sqrt()[:, None, :]

    def back(base: Tensor, factor: Tensor, like: Tensor) -> Tensor:
        rows = (base @ (factor * root)).mT
        return rows.reshape(like.shape[0], -1, like.shape[1], like.shape[3]).transpose(1, 2)

    return back(base_a, u, a), back(base_b, vt.mT, b)


def value_output(model: Checkpoint, layer: int, dims: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Canonical (W_v [H'·h, d], W_o [d, H'·h]) of the heads that reach the stream: each W_oW_v, split evenly."""
    live = attention_heads(model, layer, dims).weight > 0
    v, o = (t[live][:, None] for t in _value_output_heads(model, layer, dims))
    v, o = balance_product(v, o)
    return v.flatten(0, 2), o.flatten(0, 2).T


def _width(model: Checkpoint, dims: Tensor | None) -> int:
    return model.geometry.hidden if dims is None else len(dims)


def written(model: Checkpoint, layer: int, weight: Tensor, post_norm: str, dims: Tensor | None) -> Tensor:
    """A writer [d, in] over live dims; sandwich norms: with the gain that follows it; LayerNorm: without its mean."""
    if model.has(layer, post_norm):
        weight = weight * model.read(layer, post_norm)[:, None]
    weight = weight if dims is None else weight[dims]
    return weight - weight.mean(0) if model.family.norm == "layer" else weight


def feed_forward(
    model: Checkpoint, layer: int, prefix: str, dims: Tensor | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Canonical (W_gate [F', d] or None, W_up [F', d], W_down [d, F']) of the network `prefix` (see `feed_forwards`).

    Dead neurons are dropped, neurons that were split (same gate, parallel up) merged, up/down balanced where the
    activation allows it. Gate rows get the size of their up rows: what they weigh is what their neuron writes.
    """
    up = fold(model, layer, model.read(layer, prefix + "up"), "ffn_norm", dims)
    down = written(model, layer, model.read(layer, prefix + "down"), "post_ffn_norm", dims).T
    scales = near_one(up), near_one(down)  # products of both must stay within float32
    up, down, back = up * scales[0], down * scales[1], (scales[0] * scales[1]) ** -0.5
    if model.has(layer, prefix + "gate"):
        gate = fold(model, layer, model.read(layer, prefix + "gate"), "ffn_norm", dims)
        gate = gate * near_one(gate)
        live = gate.bool().any(1) & up.bool().any(1) & down.bool().any(1)
        gate, up, down = (gate, up, down) if live.all() else (gate[live], up[live], down[live])
        size = length(up, 1).to(up.dtype)
        keep, down = merge_split(torch.cat([gate, up / size], dim=1), down * size)
        gate, up = gate[keep], up[keep] / size[keep]
    else:
        gate, live = None, down.bool().any(1)
        bias = model.read(layer, prefix + "up.bias") if model.has(layer, prefix + "up.bias") else up.new_zeros(len(up))
        up, down, bias = (up, down, bias) if live.all() else (up[live], down[live], bias[live])
        keep, down = merge_split(torch.cat([up, bias[:, None]], dim=1), down)
        up = up[keep]
        if "relu" not in str(model.config.get("hidden_act") or model.config.get("activation_function") or ""):
            return None, up / scales[0], down.T / scales[1]
    scale = (length(down, 1).double() / length(up, 1).double().clamp_min(1e-37)).sqrt().to(up.dtype)
    up, down = up * scale, down / scale.clamp_min(1e-37)
    if gate is not None:
        gate = gate * (length(up, 1) / length(gate, 1)).to(gate.dtype)
    return gate, up * back, down.T * back


def merge_split(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Neurons with equal input rows [F, n] act as one: (indices kept [F'], their summed outputs [F', d]).

    Rows equal to 1e-5 of their norm count as equal; opposite signs of a parallel up row stay two neurons (never
    found in
    practice, and harmless: the pair's Gram is the same).
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(inputs.shape[1], generator=generator, dtype=torch.float64).to(inputs.device, inputs.dtype)
    value, order = (inputs @ probe).sort()
    near = (value[1:] - value[:-1]).abs() <= 1e-5 * inputs.norm(dim=1).mean()
    candidate = torch.nonzero(near).flatten()
    if len(candidate):
        first, second = inputs[order[candidate]], inputs[order[candidate + 1]]
        near[candidate] = (first - second).norm(dim=1) <= 1e-5 * first.norm(dim=1)
    if not near.any():
        return torch.arange(len(inputs), device=inputs.device), outputs
    group = torch.cat([torch.zeros(1, dtype=torch.long, device=inputs.device), (~near).long().cumsum(0)])
    merged = outputs.new_zeros(int(group[-1]) + 1, outputs.shape[1]).index_add_(0, group, outputs[order])
    starts = torch.cat([torch.ones(1, dtype=torch.bool, device=inputs.device), ~near])
    return order[starts], merged
