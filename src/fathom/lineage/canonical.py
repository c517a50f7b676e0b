r"""One representative of all checkpoints that compute the same function: what every lineage method reads.

A pre-norm decoder keeps its function under a group of re-parameterisations. Each is undone here by a choice that
does not
depend on where in the group one starts (exact: equal up to rounding), so methods built on top need no defence of
their own:

    norm gains          W ← W·diag(γ), γ ← 1;  LayerNorm also W ← W(I − 11ᵀ/d) and E ← E(I − 11ᵀ/d)
    q/k under RoPE      per KV group and rotary pair: q·a, k/a with a = (n_k/n_q)^¼, n = squared norms of the
    pair's rows
    q/k elsewhere       W_qᵀW_k = U S Vᵀ per KV group:  W_q ← S^½Uᵀ, W_k ← S^½Vᵀ  (any B ∈ GL(h) cancels)
    QK-norm             each head's rows to unit norm, times its gains, then pair balance (the norm hides head scale)
    v/o                 as q/k elsewhere
    up/down             gated or ReLU: neuron i scaled so that ‖up_i‖ = ‖down_i‖
    padding             dead layers, heads, neurons and residual dims removed; split neurons merged

What is left — orthogonal maps on head outputs, order of heads and neurons, rotation of the residual stream — is
left to the
metric (CKA and products of weights do not see the first two) and to `align` (the third).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fathom.lineage.checkpoint import Checkpoint
from fathom.lineage.short_products import length

_PROBE_ROWS = 8  # a live writer shows non-zero entries in its first rows; only suspects are read whole


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
    """Canonical (W_q [H'·h, d], W_k [Hkv'·h, d]) of a layer; heads whose output is nowhere used are left out."""
    q, k = query_key_heads(model, layer, dims)
    if (live := live_heads(model, layer)) is not None:
        return q[live].flatten(0, 1), k[live.any(1)].flatten(0, 2)
    return q.flatten(0, 2), k.flatten(0, 2)


def query_key_heads(model: Checkpoint, layer: int, dims: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Canonical q [Hkv, heads a group, h, d] and k [Hkv, 1, h, d]; rows of dead query heads are zero."""
    g = model.geometry
    q = fold(model, layer, model.read(layer, "q"), "attn_norm", dims)
    k = fold(model, layer, model.read(layer, "k"), "attn_norm", dims)
    q = q.reshape(g.kv_heads, g.heads // g.kv_heads, g.head_dim, -1)
    k = k.reshape(g.kv_heads, 1, g.head_dim, -1)
    normed = model.has(layer, "q_norm") and model.has(layer, "k_norm")
    if normed:
        q = _apply_head_norm(q, model.read(layer, "q_norm"))
        k = _apply_head_norm(k, model.read(layer, "k_norm"))
    if (live := live_heads(model, layer)) is not None:
        q = q * live[:, :, None, None]
    return balance_query_key(q, k, g.rotary(layer), normed)


def _apply_head_norm(heads: Tensor, gain: Tensor) -> Tensor:
    """[Hkv, g, h, d] → unit-norm rows of each head, times gains. OLMo-2 norms all heads together: gain [H·h]."""
    if gain.numel() == heads.shape[2]:
        return (
            heads / length(heads, 3).double().norm(dim=2, keepdim=True).clamp_min(1e-37).to(heads.dtype) * gain[:, None]
        )
    return heads / length(heads).clamp_min(1e-37).to(heads.dtype) * gain.reshape(*heads.shape[:3], 1)


def live_heads(model: Checkpoint, layer: int) -> Tensor | None:
    """Mask [Hkv, g] of heads with a non-zero W_o block, or None when all are live."""
    if not model.has(layer, "o"):
        return None
    g = model.geometry

    def live(o: Tensor) -> Tensor:
        return o.bool().any(0).reshape(g.kv_heads, g.heads // g.kv_heads, -1).any(2)

    mask = live(model.read(layer, "o", slice(0, _PROBE_ROWS)))
    if not mask.all():
        mask = live(model.read(layer, "o"))
    return None if mask.all() else mask


def attends(model: Checkpoint, layer: int) -> bool:
    """Whether any head of the layer writes something."""
    mask = live_heads(model, layer)
    return mask is None or bool(mask.any())


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
    """Canonical (W_v [Hkv'·h, d], W_o [d, H'·h]): the product of each KV group's W_v and its W_o blocks, split
    evenly."""
    g = model.geometry
    v = fold(model, layer, model.read(layer, "v"), "attn_norm", dims).reshape(g.kv_heads, 1, -1, _width(model, dims))
    o = written(model, layer, model.read(layer, "o"), "post_attn_norm", dims)
    o = o.T.reshape(g.kv_heads, g.heads // g.kv_heads, v.shape[2], -1)
    live = live_heads(model, layer)
    v, o = balance_product(v, o)
    if live is not None:
        return v[live.any(1)].flatten(0, 2), o[live].flatten(0, 1).T
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
    activation allows it.
    """
    up = fold(model, layer, model.read(layer, prefix + "up"), "ffn_norm", dims)
    down = written(model, layer, model.read(layer, prefix + "down"), "post_ffn_norm", dims).T
    if model.has(layer, prefix + "gate"):
        gate = fold(model, layer, model.read(layer, prefix + "gate"), "ffn_norm", dims)
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
            return None, up, down.T
    scale = (length(down, 1).double() / length(up, 1).double().clamp_min(1e-37)).sqrt().to(up.dtype)
    return gate, up * scale, (down / scale.clamp_min(1e-37)).T


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
