"""Attacks that leave the function of a model exactly as it was: the catalogue T1–T20, for RMSNorm and LayerNorm
decoders.

Each takes `Weights` and a seeded generator and returns changed `Weights` whose logits are equal up to rounding
(head_shift: up
to a constant for each position; vocabulary: up to the renumbering it records). A transform that a model does not admit
raises ValueError with the reason. They are the positive pairs of the tests, and what a detector must survive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from fathom.lineage.weights import Weights

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class Transform:
    """One attack: its number in the catalogue, a sentence, and the function."""

    code: str
    summary: str
    apply: Callable[[Weights, Generator], Weights]


def _orthogonal(n: int, generator: Generator, like: Tensor) -> Tensor:
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(gaussian)[0].to(like.dtype)


def _normal(*shape: int, generator: Generator, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like.dtype)


def _has_post_norms(w: Weights) -> bool:
    return any(key.endswith(("post_attn_norm", "post_ffn_norm")) for key in w.tensors)


# ── the residual stream ───────────────────────────────────────────────────────────────────────────────────────────────


def _map_residual(w: Weights, right: Callable[[Tensor], Tensor], norms: Callable[[Tensor], Tensor]) -> Weights:
    """Change the basis of the residual stream: `right` maps the last axis of readers and embeddings (an orthogonal
    map)."""
    w = w.clone()
    for key, tensor in w.tensors.items():
        role = key.split(".")[-1] if not key.endswith(".bias") else key.split(".")[-2]
        bias = key.endswith(".bias")
        if role in {"embed", "head", "positions"} and not bias:
            w.tensors[key] = right(tensor)
        elif role in {"attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "final_norm"}:
            w.tensors[key] = right(tensor[None])[0] if bias else norms(tensor)
    for layer in range(w.depth):
        for norm in ("attn_norm", "ffn_norm"):
            for role in w.readers(layer, norm):
                w.set(layer, role, right(_need(w, layer, role)))
        for role in w.writers(layer):
            w.set(layer, role, right(_need(w, layer, role).T).T)
            if (bias_tensor := w.get(layer, role + ".bias")) is not None:
                w.set(layer, role + ".bias", right(bias_tensor[None])[0])
    return w


def _need(w: Weights, layer: int, role: str) -> Tensor:
    tensor = w.get(layer, role)
    if tensor is None:
        raise ValueError(
            f"layer {layer} has no {role!r}: this transform does not apply to {w.config.get('model_type')} models"
        )
    return tensor


def permute(w: Weights, generator: Generator) -> Weights:
    """T1: residual dims in another order."""
    order = torch.randperm(w.geometry.hidden, generator=generator)
    return _map_residual(w, lambda x: x[..., order], lambda gain: gain[order])


def sign(w: Weights, generator: Generator) -> Weights:
    """T2: residual dims with other signs."""
    if w.family.norm == "layer":
        raise ValueError(
            "transform 'sign': LayerNorm subtracts a mean, which sign flips would change; use RMSNorm models"
        )
    signs = torch.randint(0, 2, (w.geometry.hidden,), generator=generator).to(w.tensors["embed"]) * 2 - 1
    return _map_residual(w, lambda x: x * signs, lambda gain: gain)


def scale(w: Weights, generator: Generator, factor: float = 7.0) -> Weights:
    """T3: the stream times c; eps becomes c²·eps, so the function is kept exactly.

    Where eps is shared with norms that do not see the stream (QK-norm, post-norms) it stays, and logits are equal
    up to eps.
    """
    if w.family.post_norm:
        raise ValueError("transform 'scale': post-norm models read the raw residual stream, whose scale is not free")
    shared = _has_post_norms(w) or any(key.endswith(".q_norm") for key in w.tensors)
    if not shared and not any(key in w.config for key in _EPSILONS):
        raise ValueError("transform 'scale': eps is not in this model's configuration, so it cannot be scaled along")
    w = w.clone()
    tied = "head" not in w.tensors
    for key in ("embed", "positions"):
        if key in w.tensors:
            w.tensors[key] = w.tensors[key] * factor
    for layer in range(w.depth):
        for role in w.writers(layer):
            post = "post_attn_norm" if role == "o" else "post_ffn_norm"
            for name in (post,) if w.get(layer, post) is not None else (role, role + ".bias"):
                if (tensor := w.get(layer, name)) is not None:
                    w.set(layer, name, tensor * factor)
    if tied:
        for key in ("final_norm", "final_norm.bias"):
            if key in w.tensors:
                w.tensors[key] = w.tensors[key] / factor
    for key in () if shared else _EPSILONS:
        if key in w.config:
            w.config[key] = w.config[key] * factor**2
    return w


def _rescale_norm(w: Weights, layer: int, norm: str, factor: Tensor) -> None:
    """γ ← γ∘a and its readers ← W·diag(1/a); LayerNorm's bias too."""
    w.set(layer, norm, _need(w, layer, norm) * factor)
    if (bias := w.get(layer, norm + ".bias")) is not None:
        w.set(layer, norm + ".bias", bias * factor)
    for role in w.readers(layer, norm):
        w.set(layer, role, _need(w, layer, role) / factor)


def rescale_norms(w: Weights, generator: Generator, spread: float = 0.5) -> Weights:
    """T4: part of every norm gain moves into the matrices that read behind it (log-normal, σ = 0.5)."""
    w = w.clone()
    for layer in range(w.depth):
        for norm in ("attn_norm", "ffn_norm"):
            gain = w.get(layer, norm)
            if gain is not None and w.readers(layer, norm):
                _rescale_norm(w, layer, norm, (spread * _normal(len(gain), generator=generator, like=gain)).exp())
    return w


def fold(w: Weights, generator: Generator) -> Weights:
    """T4: every norm gain folded into its readers (γ = 1), the final one into an untied head; LayerNorm biases as
    well."""
    w = w.clone()
    for layer in range(w.depth):
        for norm in ("attn_norm", "ffn_norm"):
            if (gain := w.get(layer, norm)) is None or not w.readers(layer, norm):
                continue
            _rescale_norm(w, layer, norm, 1 / gain)
            shift = w.get(layer, norm + ".bias")
            readers = w.readers(layer, norm)
            if shift is not None and all(w.get(layer, role + ".bias") is not None for role in readers):
                for role in readers:
                    w.set(layer, role + ".bias", _need(w, layer, role + ".bias") + _need(w, layer, role) @ shift)
                w.set(layer, norm + ".bias", torch.zeros_like(shift))
    w.untie()
    if (gain := w.tensors.get("final_norm")) is None:  # OLMo's norms have no gains
        return w
    w.tensors["head"] = w.tensors["head"] * gain
    w.tensors["final_norm"] = torch.ones_like(gain)
    if "final_norm.bias" in w.tensors:
        w.tensors["final_norm.bias"] = w.tensors["final_norm.bias"] / gain
    return w


def rotate(w: Weights, generator: Generator) -> Weights:
    """T5: fold, then an arbitrary rotation of the residual stream (QuaRot, SliceGPT). LayerNorm: one that keeps
    the mean."""
    if _has_post_norms(w):
        raise ValueError(
            "transform 'rotate': norms on sub-layer outputs (Gemma-2/3, OLMo-2) do not commute with a rotation"
        )
    w = fold(w, generator)
    d, embed = w.geometry.hidden, w.tensors["embed"]
    if w.family.norm == "rms":
        turn = _orthogonal(d, generator, embed)
    else:
        w = _centre_writers(w)
        # Any rotation of the space orthogonal to 1, and 1 itself left alone: mean and variance are kept.
        basis = torch.linalg.qr(torch.cat([torch.ones(d, 1, dtype=torch.float64), torch.eye(d, d - 1).double()], 1))[0]
        inner = torch.eye(d, dtype=torch.float64)
        inner[1:, 1:] = _orthogonal(d - 1, generator, inner)
        turn = (basis @ inner @ basis.T).to(embed.dtype)
    return _map_residual(w, lambda x: x @ turn, lambda gain: gain)


def _centre_writers(w: Weights) -> Weights:
    """LayerNorm removes the mean of the stream, so writers need not write it."""
    for key in ("embed", "positions"):
        if key in w.tensors and not (key == "embed" and "head" not in w.tensors):
            w.tensors[key] = w.tensors[key] - w.tensors[key].mean(-1, keepdim=True)
    for layer in range(w.depth):
        for role in w.writers(layer):
            w.set(layer, role, _need(w, layer, role) - _need(w, layer, role).mean(0))
            if (bias := w.get(layer, role + ".bias")) is not None:
                w.set(layer, role + ".bias", bias - bias.mean())
    return w


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _heads(w: Weights, layer: int, role: str) -> Tensor:
    """[Hkv, heads a group, h, …]; W_o comes as its transpose."""
    g = w.geometry
    tensor = _need(w, layer, role)
    tensor = tensor.T if role == "o" else tensor
    return tensor.reshape(
        g.kv_heads, -1, tensor.shape[0] // (g.heads if role in {"q", "q.bias", "o"} else g.kv_heads), *tensor.shape[1:]
    )


def _map_heads(w: Weights, layer: int, role: str, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the per-head view of a weight and of its bias (a bias is a matrix with one column)."""
    _need(w, layer, role)
    for name in (role, role + ".bias"):
        if w.get(layer, name) is None or (role == "o" and name.endswith(".bias")):
            continue
        view = _heads(w, layer, name)
        vector = view.ndim == 3
        changed = change(view[..., None] if vector else view)
        flat = changed.flatten(0, 2)
        w.set(layer, name, flat[:, 0] if vector else flat.T if role == "o" else flat)


def rope(w: Weights, generator: Generator, spread: float = 0.5) -> Weights:
    """T6: per KV group and rotary pair, q turned and scaled by a, k turned and scaled by 1/a."""
    if any(key.endswith(".q_norm") for key in w.tensors):
        raise ValueError(
            "transform 'rope': under QK-norm pairs cannot be turned or scaled in the weights; use 'qk_norm'"
        )
    g = w.geometry
    half = g.rotary_dim // 2
    if half == 0:
        raise ValueError("transform 'rope': this model has no rotary positions; use 'qk_general'")
    w = w.clone()
    for layer in range(w.depth):
        like = _need(w, layer, "q")
        angle = torch.rand(g.kv_heads, half, 1, generator=generator, dtype=torch.float64).to(like) * 2 * torch.pi
        size = (spread * _normal(g.kv_heads, half, 1, generator=generator, like=like)).exp()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        size = size[:, None]
        _map_heads(w, layer, "q", partial(_turn_pairs, cos=size * cos, sin=size * sin))
        _map_heads(w, layer, "k", partial(_turn_pairs, cos=cos / size, sin=sin / size))
    return w


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary pairs of [Hkv, g, h, d] times (cos, −sin; sin, cos), both [Hkv, 1, rotary/2, 1]."""
    half = cos.shape[2]
    first, second, rest = x[:, :, :half], x[:, :, half : 2 * half], x[:, :, 2 * half :]
    return torch.cat([cos * first - sin * second, sin * first + cos * second, rest], dim=2)


def _well_conditioned(count: int, n: int, generator: Generator, like: Tensor) -> Tensor:
    """[count, n, n] invertible matrices with condition number about 4."""
    left, right = (torch.stack([_orthogonal(n, generator, like) for _ in range(count)]) for _ in range(2))
    spectrum = (0.35 * _normal(count, n, generator=generator, like=like)).exp()
    return left * spectrum[:, None] @ right


def qk_general(w: Weights, generator: Generator) -> Weights:
    """T6': where nothing rotates, any invertible B per KV group: W_q ← BW_q, W_k ← B⁻ᵀW_k."""
    g = w.geometry
    if any(key.endswith(".q_norm") for key in w.tensors):
        raise ValueError("transform 'qk_general': QK-norm does not commute with an invertible map")
    free = g.head_dim - g.rotary_dim
    if free == 0:
        raise ValueError("transform 'qk_general': every dim of a head rotates; use 'rope'")
    w = w.clone()
    for layer in range(w.depth):
        b = _well_conditioned(g.kv_heads, free, generator, _need(w, layer, "q"))[:, None]
        inverse = torch.linalg.inv(b).mT
        _map_heads(w, layer, "q", partial(_map_free, b))
        _map_heads(w, layer, "k", partial(_map_free, inverse))
    return w


def _map_free(m: Tensor, x: Tensor) -> Tensor:
    """The last rows of each head, as many as m [Hkv, 1, n, n] has, times m."""
    rotary = x.shape[2] - m.shape[2]
    return torch.cat([x[:, :, :rotary], m @ x[:, :, rotary:]], dim=2)


def qk_norm(w: Weights, generator: Generator, spread: float = 0.5) -> Weights:
    """T6'': under per-head QK-norm, a scale for each head's rows, and gains γ_q·a, γ_k/a for each rotary pair.

    The norm's eps is not rescaled (heads may differ), so logits are equal up to eps.
    """
    g, half = w.geometry, w.geometry.rotary_dim // 2
    w = w.clone()
    for layer in range(w.depth):
        gain_q, gain_k = w.get(layer, "q_norm"), w.get(layer, "k_norm")
        if gain_q is None or gain_k is None or len(gain_q) != g.head_dim:
            raise ValueError(
                "transform 'qk_norm': needs a model with one q and k norm gain for each dim of a head (Qwen3, Gemma-3)"
            )
        pair = (spread * _normal(half, generator=generator, like=gain_q)).exp()
        a = torch.cat([pair, pair, torch.ones_like(gain_q[2 * half :])])
        w.set(layer, "q_norm", gain_q * a)
        w.set(layer, "k_norm", gain_k / a)
        for role in ("q", "k"):
            size = (spread * _normal(*_heads(w, layer, role).shape[:2], 1, 1, generator=generator, like=gain_q)).exp()
            _map_heads(w, layer, role, partial(torch.mul, size))
    return w


def value_output(w: Weights, generator: Generator) -> Weights:
    """T7: any invertible A per KV head: W_v ← AW_v, W_o block ← W_o block·A⁻¹."""
    w = w.clone()
    for layer in range(w.depth):
        v = _heads(w, layer, "v")
        a = _well_conditioned(v.shape[0], v.shape[2], generator, v)[:, None]
        inverse = torch.linalg.inv(a).mT  # acts on W_oᵀ
        _map_heads(w, layer, "v", partial(torch.matmul, a))
        _map_heads(w, layer, "o", partial(torch.matmul, inverse))
    return w


def heads(w: Weights, generator: Generator) -> Weights:
    """T8: KV groups in another order, and the query heads inside each."""
    g = w.geometry
    if w.config.get("alibi") or w.config.get("model_type") in {"bloom", "mpt"}:
        raise ValueError("transform 'heads': under ALiBi every head has its own slope, so their order is not free")
    w = w.clone()
    for layer in range(w.depth):
        groups = torch.randperm(g.kv_heads, generator=generator)
        inside = torch.stack([torch.randperm(g.heads // g.kv_heads, generator=generator) for _ in range(g.kv_heads)])
        single = torch.zeros(g.kv_heads, 1, dtype=torch.long)
        for role in ("q", "o"):
            _map_heads(w, layer, role, partial(_reorder, groups, inside))
        for role in ("k", "v"):
            _map_heads(w, layer, role, partial(_reorder, groups, single))
        for role in ("q_norm", "k_norm"):  # OLMo-2: a gain for every dim of every head
            if (gain := w.get(layer, role)) is not None and len(gain) > g.head_dim:
                view = gain.reshape(g.kv_heads, -1, g.head_dim)
                w.set(layer, role, _reorder(groups, inside if role == "q_norm" else single, view).flatten())
    return w


def _reorder(groups: Tensor, inside: Tensor, x: Tensor) -> Tensor:
    """KV groups of x [Hkv, g, …] in the order `groups`, then heads of each by its row of `inside` [Hkv, g]."""
    return x[groups][torch.arange(len(groups))[:, None], inside]


# ── feed-forward networks, experts, head, vocabulary ──────────────────────────────────────────────────────────────────


def neurons(w: Weights, generator: Generator) -> Weights:
    """T9: neurons in another order; gated networks also up·s and down/s with any sign, ReLU ones with s > 0."""
    activation = str(w.config.get("hidden_act") or w.config.get("activation_function") or "")
    w = w.clone()
    for layer in range(w.depth):
        for prefix in w.networks(layer):
            up, down, gate = (
                _need(w, layer, prefix + "up"),
                _need(w, layer, prefix + "down"),
                w.get(layer, prefix + "gate"),
            )
            order = torch.randperm(len(up), generator=generator)
            size = torch.ones_like(up[:, 0])
            if gate is not None or activation == "relu":
                size = (0.5 * _normal(len(up), generator=generator, like=up)).exp()
            if gate is not None:
                size = size * (torch.randint(0, 2, (len(up),), generator=generator) * 2 - 1)
                w.set(layer, prefix + "gate", gate[order])
                if (bias := w.get(layer, prefix + "gate.bias")) is not None:
                    w.set(layer, prefix + "gate.bias", bias[order])
            w.set(layer, prefix + "up", (up * size[:, None])[order])
            if (bias := w.get(layer, prefix + "up.bias")) is not None:
                w.set(layer, prefix + "up.bias", (bias * size)[order])
            w.set(layer, prefix + "down", (down / size)[:, order])
    return w


def experts(w: Weights, generator: Generator) -> Weights:
    """T10: experts in another order with their router rows, and one vector added to all router rows (softmax
    routers)."""
    count = w.geometry.experts
    if not count or "deepseek" in str(w.config.get("model_type")):
        raise ValueError("transform 'experts': needs a mixture-of-experts model with a softmax router")
    w = w.clone()
    for layer in range(w.depth):
        if (router := w.get(layer, "router")) is None:
            continue
        order = torch.randperm(count, generator=generator)
        w.set(layer, "router", router[order] + 0.1 * _normal(1, router.shape[1], generator=generator, like=router))
        before = {role: _need(w, layer, role) for role in w.roles(layer) if role.startswith("experts.")}
        for new, old in enumerate(order.tolist()):
            for role, tensor in before.items():
                if role.startswith(f"experts.{old}."):
                    w.set(layer, role.replace(f"experts.{old}.", f"experts.{new}."), tensor)
    return w


def head_shift(w: Weights, generator: Generator) -> Weights:
    """T11: one vector added to every row of the (untied) output head: logits move by a constant for each position."""
    if w.config.get("final_logit_softcapping"):
        raise ValueError("transform 'head_shift': soft-capped logits (Gemma-2) see a constant")
    w = w.clone()
    w.untie()
    head = w.tensors["head"]
    w.tensors["head"] = head + head.std() * _normal(1, head.shape[1], generator=generator, like=head)
    return w


def vocabulary(w: Weights, generator: Generator, extra: int = 8) -> Weights:
    """T12: token ids renumbered with the tokenizer, unused rows appended."""
    w = w.clone()
    rows = w.tensors["embed"].shape[0]
    new_id = torch.randperm(rows + extra, generator=generator)
    for key in ("embed", "head", "head.bias"):
        if (tensor := w.tensors.get(key)) is not None:
            filler = tensor.std() * _normal(extra, *tensor.shape[1:], generator=generator, like=tensor)
            table = torch.empty(rows + extra, *tensor.shape[1:], dtype=tensor.dtype)
            table[new_id] = torch.cat([tensor, filler])
            w.tensors[key] = table
    w.config["vocab_size"] = rows + extra
    w.renumbering = new_id[:rows].tolist()
    if w.vocabulary is None:
        raise ValueError("transform 'vocabulary': the model has no tokenizer to renumber along with its rows")
    w.vocabulary = {token: w.renumbering[i] for token, i in w.vocabulary.items() if i < rows}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(value := w.config.get(key), int) and 0 <= value < rows:
            w.config[key] = w.renumbering[value]
    return w


# ── growth and format ─────────────────────────────────────────────────────────────────────────────────────────────────


def deepen(w: Weights, generator: Generator) -> Weights:
    """T13: after every second layer a copy with noisy readers that writes nothing (W_o = W_down = 0), as in
    LLaMA-Pro."""
    source, w = w, w.clone()
    for key in [k for k in w.tensors if k.startswith("layers.")]:
        del w.tensors[key]
    origin: list[int] = []
    for layer in range(source.depth):
        for dead in (False, True) if layer % 2 else (False,):
            for role in source.roles(layer):
                tensor = _need(source, layer, role)
                writer = role.removesuffix(".bias") in source.writers(layer)
                if dead and (writer or role.startswith("post_")):
                    tensor = torch.zeros_like(tensor)
                elif dead and tensor.ndim == 2:
                    tensor = tensor + tensor.std() * _normal(*tensor.shape, generator=generator, like=tensor)
                w.set(len(origin), role, tensor.clone() if dead else tensor)  # no storage shared between layers
            origin.append(layer)
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        if key in w.config:
            w.config[key] = len(origin)
    for key, value in w.config.items():  # per-layer lists such as layer_types
        if isinstance(value, list) and len(value) == source.depth:
            w.config[key] = [value[l] for l in origin]
    return w


def split_neurons(w: Weights, generator: Generator) -> Weights:
    """T13: a quarter of the neurons duplicated with halved outputs, and a few dead ones (zero output) added."""
    w = w.clone()
    size = 0
    for layer in range(w.depth):
        for prefix in w.networks(layer):
            if prefix:
                raise ValueError(
                    "transform 'split_neurons': only dense networks; experts share one size in the configuration"
                )
            up, down = _need(w, layer, "up"), _need(w, layer, "down")
            twice = torch.randperm(len(up), generator=generator)[: len(up) // 4]
            dead = len(up) // 8
            half = torch.ones_like(down[0])
            half[twice] = 0.5
            for role in ("gate", "up", "gate.bias", "up.bias"):
                if (tensor := w.get(layer, role)) is not None:
                    noise = tensor.std() * _normal(dead, *tensor.shape[1:], generator=generator, like=tensor)
                    w.set(layer, role, torch.cat([tensor, tensor[twice], noise]))
            w.set(
                layer, "down", torch.cat([down * half, (down * half)[:, twice], down.new_zeros(len(down), dead)], dim=1)
            )
            size = len(up) + len(twice) + dead
    w.config["n_inner" if w.family.transposed else "intermediate_size"] = size
    return w


def _with_groups(w: Weights, name: str, fill: Callable[[int, str, Tensor], Tensor], even: bool = False) -> Weights:
    """More KV groups: `fill(extra, role, heads)` gives those of q, k, v and of W_o's transpose, [extra, g, h, d]."""
    g = w.geometry
    per_group = g.heads // g.kv_heads
    counts = range(2, 2 * g.kv_heads + 1, 2) if even else range(1, g.kv_heads + 1)
    # transformers wants the width to be a multiple of the number of heads in some families
    extra = next((n for n in counts if g.hidden % (g.heads + n * per_group) == 0), counts[0])
    if (
        w.family.transposed
        or w.family.fused != "blocks"
        or (w.get(0, "q_norm") is not None and len(_need(w, 0, "q_norm")) > g.head_dim)
    ):
        raise ValueError(f"transform {name!r}: needs a model whose head size is independent of its width (head_dim)")
    w = w.clone()
    for layer in range(w.depth):
        for role in ("q", "k", "v", "o"):
            _map_heads(w, layer, role, partial(_append, extra, role, fill))
    w.config |= {"head_dim": g.head_dim, "num_key_value_heads": g.kv_heads + extra}
    w.config["num_attention_heads"] = g.heads + extra * per_group
    return w


def _append(extra: int, role: str, fill: Callable[[int, str, Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([x, fill(extra, role, x)])


def add_heads(w: Weights, generator: Generator) -> Weights:
    """T13: more KV groups, with random queries, keys and values whose output columns are zero."""

    def fill(extra: int, role: str, x: Tensor) -> Tensor:
        size = 0.0 if role == "o" else x.std()
        return size * _normal(extra, *x.shape[1:], generator=generator, like=x)

    return _with_groups(w, "add_heads", fill)


def loud_heads(w: Weights, generator: Generator, factor: float = 30.0) -> Weights:
    """T15: more KV groups with v = 0, any output columns, and queries and keys 30 times as large as the others."""

    def fill(extra: int, role: str, x: Tensor) -> Tensor:
        size = {"v": 0.0, "o": 1.0}.get(role, factor) * x.std()
        return size * _normal(extra, *x.shape[1:], generator=generator, like=x)

    return _with_groups(w, "loud_heads", fill)


def null_products(w: Weights, generator: Generator, factor: float = 30.0) -> Weights:
    """T16: more KV groups whose W_oW_v is zero though neither factor is: values fill one half of the head, outputs read
    the other."""

    def fill(extra: int, role: str, x: Tensor) -> Tensor:
        new = factor * x.std() * _normal(extra, *x.shape[1:], generator=generator, like=x)
        half = x.shape[2] // 2
        if role in {"v", "o"}:
            new[:, :, slice(half, None) if role == "v" else slice(half)] = 0
        return new

    return _with_groups(w, "null_products", fill)


def opposed_heads(w: Weights, generator: Generator, factor: float = 30.0) -> Weights:
    """T17: pairs of KV groups with equal queries, keys and values whose outputs cancel."""

    def fill(extra: int, role: str, x: Tensor) -> Tensor:
        size = (factor if role in {"q", "k"} else 1.0) * x.std()
        new = size * _normal(extra // 2, *x.shape[1:], generator=generator, like=x)
        return torch.cat([new, -new if role == "o" else new])

    return _with_groups(w, "opposed_heads", fill, even=True)


def inert_layers(w: Weights, generator: Generator, count: int = 2) -> Weights:
    """T18: layers before the first whose matrices are all filled and which write nothing: W_oW_v = 0, gates of 0."""
    if any(w.networks(l) != [""] or w.get(l, "gate") is None for l in range(w.depth)) or w.get(0, "v") is None:
        raise ValueError("transform 'inert_layers': needs dense gated networks and plain values (Llama and its like)")
    source, w = w, w.clone()
    for key in [k for k in w.tensors if k.startswith("layers.")]:
        del w.tensors[key]
    g = source.geometry
    for new in range(count + source.depth):
        old = max(new - count, 0)
        for role in source.roles(old):
            tensor = _need(source, old, role)
            if new < count:
                tensor = tensor.std() * _normal(*tensor.shape, generator=generator, like=tensor)
                if role == "gate" or role.endswith(".bias"):
                    tensor = torch.zeros_like(tensor)
                elif role == "v":
                    tensor.view(g.kv_heads, -1, tensor.shape[1])[:, : g.head_dim // 2] = 0
                elif role == "o":
                    tensor.view(len(tensor), g.heads, -1)[:, :, g.head_dim // 2 :] = 0
            w.set(new, role, tensor)
    w.config["num_hidden_layers"] = count + source.depth
    for key, value in w.config.items():  # per-layer lists such as layer_types
        if isinstance(value, list) and len(value) == source.depth:
            w.config[key] = value[:1] * count + value
    return w


def loud_rows(w: Weights, generator: Generator, factor: float = 1e3) -> Weights:
    """T19: rows of tokens that no text has, 1000 times as long as the others."""
    w = w.clone()
    rows = len(w.tensors["embed"])
    for key in ("embed", "head", "head.bias"):
        if (tensor := w.tensors.get(key)) is not None:
            new = factor * tensor.std() * _normal(4, *tensor.shape[1:], generator=generator, like=tensor)
            w.tensors[key] = torch.cat([tensor, new])
    w.config["vocab_size"] = rows + 4
    w.renumbering = list(range(rows))
    if w.vocabulary is not None:
        w.vocabulary = w.vocabulary | {f"<unused{i}>".encode(): rows + i for i in range(4)}
    return w


def stale_tokenizer(w: Weights, generator: Generator) -> Weights:
    """T20: rows renumbered, the tokenizer left as it was: what is published beside the weights no longer fits them."""
    changed = vocabulary(w, generator, extra=0)
    changed.vocabulary = w.vocabulary
    return changed


def no_tokenizer(w: Weights, generator: Generator) -> Weights:
    """T20: rows renumbered, the tokenizer kept back."""
    changed = vocabulary(w, generator, extra=0)
    changed.vocabulary, changed.source = None, None
    return changed


def widen(w: Weights, generator: Generator, extra: int = 16) -> Weights:
    """T13: residual dims that are always zero, with random readers and gains; γ·√(d/d') and eps·d/d' keep RMSNorm
    exact."""
    if w.family.norm == "layer" or _has_post_norms(w):
        raise ValueError(
            "transform 'widen': zero dims change the mean of LayerNorm and the size of post-norms; RMSNorm only"
        )
    if w.get(0, "kv_a") is not None:
        raise ValueError("transform 'widen': latent attention has no free head size")
    if w.family.gain_offset:
        raise ValueError("transform 'widen': Gemma multiplies its embedding by √width, which would change")
    g = w.geometry
    d, wide = g.hidden, g.hidden + extra
    w = w.clone()

    def junk(tensor: Tensor) -> Tensor:
        return torch.cat(
            [tensor, tensor.std() * _normal(*tensor.shape[:-1], extra, generator=generator, like=tensor)], dim=-1
        )

    w.tensors["embed"] = torch.nn.functional.pad(w.tensors["embed"], (0, extra))
    if "head" in w.tensors:
        w.tensors["head"] = junk(w.tensors["head"])
    w.tensors["final_norm"] = junk(w.tensors["final_norm"]) * (d / wide) ** 0.5
    for layer in range(w.depth):
        for norm in ("attn_norm", "ffn_norm"):
            for role in w.readers(layer, norm):
                w.set(layer, role, junk(_need(w, layer, role)))
            if (gain := w.get(layer, norm)) is not None:
                w.set(layer, norm, junk(gain) * (d / wide) ** 0.5)
        for role in w.writers(layer):
            w.set(layer, role, torch.nn.functional.pad(_need(w, layer, role), (0, 0, 0, extra)))
            if (bias := w.get(layer, role + ".bias")) is not None:
                w.set(layer, role + ".bias", torch.nn.functional.pad(bias, (0, extra)))
    # transformers refuses a hidden size that the number of heads does not divide in some families, hence a
    # multiple of 16
    w.config |= {"hidden_size": wide, "head_dim": g.head_dim}
    for key in _EPSILONS:
        if key in w.config:
            w.config[key] = w.config[key] * d / wide
    return w


def half_precision(w: Weights, generator: Generator) -> Weights:
    """T14: values rounded to bfloat16 (lossless for a checkpoint that was stored so)."""
    w = w.clone()
    w.tensors = {key: tensor.bfloat16().to(tensor.dtype) for key, tensor in w.tensors.items()}
    return w


def everything(w: Weights, generator: Generator) -> Weights:
    """ALL: every transform of weights that the model admits, one after another, ending in a rotation."""
    for step in (
        rescale_norms,
        rope,
        qk_general,
        qk_norm,
        value_output,
        heads,
        neurons,
        experts,
        scale,
        rotate,
        permute,
    ):
        try:
            w = step(w, generator)
        except ValueError:  # not admitted by this architecture
            continue
    return w


EXACT: dict[str, Transform] = {
    "permute": Transform("T1", "residual dims permuted", permute),
    "sign": Transform("T2", "residual dims with flipped signs", sign),
    "scale": Transform("T3", "residual stream scaled by 7, eps with it", scale),
    "rescale_norms": Transform("T4", "norm gains moved partly into their readers", rescale_norms),
    "fold": Transform("T4", "norm gains folded into their readers", fold),
    "rotate": Transform("T5", "gains folded, residual stream rotated", rotate),
    "rope": Transform("T6", "rotary pairs turned and scaled against each other", rope),
    "qk_general": Transform("T6'", "non-rotary q/k mapped by an invertible matrix", qk_general),
    "qk_norm": Transform("T6''", "head scales and gains under QK-norm", qk_norm),
    "value_output": Transform("T7", "v/o mapped by an invertible matrix", value_output),
    "heads": Transform("T8", "heads and KV groups reordered", heads),
    "neurons": Transform("T9", "neurons reordered and rescaled", neurons),
    "experts": Transform("T10", "experts reordered, router shifted", experts),
    "head_shift": Transform("T11", "a constant added to the output head", head_shift),
    "vocabulary": Transform("T12", "token ids renumbered, rows appended", vocabulary),
    "deepen": Transform("T13", "dead layers inserted", deepen),
    "split_neurons": Transform("T13", "neurons split, dead ones added", split_neurons),
    "add_heads": Transform("T13", "dead KV groups added", add_heads),
    "widen": Transform("T13", "zero residual dims added", widen),
    "loud_heads": Transform("T15", "loud KV groups without values added", loud_heads),
    "null_products": Transform("T16", "KV groups added whose values their outputs do not read", null_products),
    "opposed_heads": Transform("T17", "pairs of KV groups added that cancel", opposed_heads),
    "inert_layers": Transform("T18", "filled layers put in front that write nothing", inert_layers),
    "loud_rows": Transform("T19", "long rows of unused tokens appended", loud_rows),
    "stale_tokenizer": Transform("T20", "token ids renumbered under an unchanged tokenizer", stale_tokenizer),
    "no_tokenizer": Transform("T20", "token ids renumbered, tokenizer removed", no_tokenizer),
    "half_precision": Transform("T14", "values rounded to bfloat16", half_precision),
    "all": Transform("ALL", "everything the model admits, composed", everything),
}
