"""MOVA's forward again in float64, from its equations, on weights under the release's names. Nothing of fathom."""

from __future__ import annotations

import math

import torch


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(x, eps=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + (-x).exp())


def attend(q, k, v, heads):
    """[B, L, D] each; softmax(q k / √d) v, head by head."""
    out = []
    for query, key, value in zip(*(x.chunk(heads, -1) for x in (q, k, v)), strict=True):
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        out.append(scores.softmax(-1) @ value)
    return torch.cat(out, -1)


def spin(x, angles, heads):
    """Neighbouring numbers of a head as complex ones, multiplied by e^{i·angle}; angles [L, head_dim / 2]."""
    parts = []
    for head in x.chunk(heads, -1):
        z = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angles), angles
        )
        parts.append(torch.view_as_real(z).flatten(-2))
    return torch.cat(parts, -1)


def frequencies(dim):
    return 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def grid_angles(sizes, dim):
    """Angles for a video's tokens (frame, row, column), or for an audio's (index,)."""
    if len(sizes) == 1:
        return torch.arange(sizes[0]).double()[:, None] * frequencies(dim)
    side = 2 * (dim // 6)
    rows = []
    for frame in range(sizes[0]):
        for row in range(sizes[1]):
            for column in range(sizes[2]):
                parts = [frame * frequencies(dim - 2 * side), row * frequencies(side), column * frequencies(side)]
                rows.append(torch.cat(parts))
    return torch.stack(rows)


def block(w, n, x, context, e, heads, angles):
    p = f"blocks.{n}."
    s1, k1, g1, s2, k2, g2 = (w[f"{p}modulation"] + e)[:, :, None].unbind(1)
    y = layer_norm(x) * (1 + k1) + s1
    q, k = (rms(linear(w, f"{p}self_attn.{c}", y), w[f"{p}self_attn.norm_{c}.weight"]) for c in "qk")
    q, k = spin(q, angles, heads), spin(k, angles, heads)
    read = attend(q, k, linear(w, f"{p}self_attn.v", y), heads)
    x = x + g1 * linear(w, f"{p}self_attn.o", read)
    y = layer_norm(x) * w[f"{p}norm3.weight"] + w[f"{p}norm3.bias"]
    q = rms(linear(w, f"{p}cross_attn.q", y), w[f"{p}cross_attn.norm_q.weight"])
    k = rms(linear(w, f"{p}cross_attn.k", context), w[f"{p}cross_attn.norm_k.weight"])
    read = attend(q, k, linear(w, f"{p}cross_attn.v", context), heads)
    x = x + linear(w, f"{p}cross_attn.o", read)
    y = layer_norm(x) * (1 + k2) + s2
    return x + g2 * linear(w, f"{p}ffn.2", gelu(linear(w, f"{p}ffn.0", y)))


def embed(w, x, tau, text, patch, freq_dim):
    """Tokens, caption, time vectors and the sizes of the grid."""
    kernel = w["patch_embedding.weight"]
    if x.ndim == 5:
        patches = x
        for axis, size in zip((2, 3, 4), patch, strict=True):
            patches = patches.unfold(axis, size, size)
        sizes = tuple(patches.shape[2:5])
        tokens = patches.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(1, 3)
    else:
        sizes, tokens = (x.shape[2],), x.transpose(1, 2)
    tokens = tokens @ kernel.flatten(1).T + w["patch_embedding.bias"]
    half = freq_dim // 2
    angle = tau[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    t = linear(w, "time_embedding.2", silu(linear(w, "time_embedding.0", torch.cat([angle.cos(), angle.sin()], -1))))
    e = linear(w, "time_projection.1", silu(t)).unflatten(1, (6, -1))
    context = linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", text)))
    return tokens, context, t, e, sizes


def head(w, x, t, sizes, patch, out):
    shift, scale = (w["head.modulation"] + t[:, None]).unbind(1)
    y = linear(w, "head.head", layer_norm(x) * (1 + scale[:, None]) + shift[:, None])
    if len(sizes) == 1:
        return y.transpose(1, 2)
    (f, h, v), (a, b, c) = sizes, patch
    return torch.einsum("nfhwabcz->nzfahbwc", y.view(len(y), f, h, v, a, b, c, out)).reshape(
        len(y), out, f * a, h * b, v * c
    )


def half_split(x, positions, head_dim):
    """Number i of a head turns with number i + d/2, by position · 10000^(−2i/d)."""
    angles = positions[:, None] * frequencies(head_dim)
    parts = []
    for one in x.chunk(x.shape[-1] // head_dim, -1):
        a, b = one[..., : head_dim // 2], one[..., head_dim // 2 :]
        parts.append(torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1))
    return torch.cat(parts, -1)


def receive(w, name, x, y, of_x, of_y, head_dim):
    """What x receives of y through one bridge block."""
    y = layer_norm(y) * w[f"{name}.y_norm.weight"] + w[f"{name}.y_norm.bias"]
    q = rms(linear(w, f"{name}.inner.q", x), w[f"{name}.inner.norm_q.weight"])
    k = rms(linear(w, f"{name}.inner.k", y), w[f"{name}.inner.norm_k.weight"])
    if of_x is not None:
        q, k = half_split(q, of_x, head_dim), half_split(k, of_y, head_dim)
    read = attend(q, k, linear(w, f"{name}.inner.v", y), x.shape[-1] // head_dim)
    return linear(w, f"{name}.inner.o", read)


def clock(rotary, frames, tokens, length):
    """Positions of video and audio tokens at 24 pictures, strides of 4 and 50 latents per second."""
    if rotary == "none":
        return None, None
    places = {
        "aligned": lambda i: i * 50 / 6,
        "unaligned": lambda i: float(i),
        "first_frame": lambda i: 0.0 if i == 0 else (1 / 24 + (i - 1) * 4 / 24) * 50,
    }[rotary]
    of_video = torch.tensor([places(i) for i in range(frames) for _ in range(tokens // frames)], dtype=torch.float64)
    return of_video, torch.arange(length, dtype=torch.float64)


def joint(video, audio, bridge, z_v, z_a, text, tau_v, tau_a, *, layers, rotary="aligned", directions="both", patch,
          head_dim, freq_dim, out, sequential=False):  # fmt: skip
    """Velocities; `layers`: before which the towers exchange. `sequential`: the wrong order, in which the audio tower
    reads a video that has read the audio already."""
    x, c_v, t_v, e_v, s_v = embed(video, z_v, tau_v, text, patch, freq_dim)
    y, c_a, t_a, e_a, s_a = embed(audio, z_a, tau_a, text, None, freq_dim)
    angles_v, angles_a = grid_angles(s_v, head_dim), grid_angles(s_a, head_dim)
    of_v, of_a = clock(rotary, s_v[0], x.shape[1], y.shape[1])
    count = {len({key.split(".")[1] for key in w if key.startswith("blocks.")}) for w in (video,)}.pop()
    of_audio = len({key.split(".")[1] for key in audio if key.startswith("blocks.")})
    for n in range(count):
        if n in layers:
            to_v = to_a = 0
            if directions in ("both", "a2v"):
                to_v = receive(bridge, f"audio_to_video_conditioners.{n}", x, y, of_v, of_a, head_dim)
            if directions in ("both", "v2a"):
                seen = x + to_v if sequential else x
                to_a = receive(bridge, f"video_to_audio_conditioners.{n}", y, seen, of_a, of_v, head_dim)
            x, y = x + to_v, y + to_a
        x = block(video, n, x, c_v, e_v, x.shape[-1] // head_dim, angles_v)
        if n < of_audio:
            y = block(audio, n, y, c_a, e_a, y.shape[-1] // head_dim, angles_a)
    return head(video, x, t_v, s_v, patch, out), head(audio, y, t_a, s_a, None, None)
