"""Tiny latent diffusion models with random weights, and their denoiser and decoder written out in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.latents.configuration import FathomLatentConfig
from fathom.latents.model import FathomForLatentDiffusion
from tiny import SIZES, perturb

MASK, LENGTH = 96, 12
PART = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
TOKENS = {"vocab_size": 97, "start_token_id": 1, "mask_token_id": MASK, "pad_token_id": 0, "eos_token_id": 2,
          "special_token_ids": [0, 1, 2, MASK]}  # fmt: skip


def encoder(**fields: Any) -> FathomForMaskedDiffusion:
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": MASK}
    model = FathomForMaskedDiffusion(FathomConfig(**{**SIZES, **fields}, diffusion=section))
    perturb(model)
    return model.eval()


def model(
    denoiser: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None,
    frozen: dict[str, Any] | None = None, **codar: Any,
) -> Any:  # fmt: skip
    """Trained, it says of itself; random, it is."""
    given = encoder(**(frozen or {}))
    config = FathomLatentConfig(
        encoder=given.config, denoiser={**PART, **(denoiser or {})}, decoder={**PART, **(decoder or {})},
        length=LENGTH, codar={"ema": 0.9, **codar}, trained=["latent_diffusion", "contextual_decoder"], **TOKENS,
    )  # fmt: skip
    made = FathomForLatentDiffusion.from_encoder(given, config)
    for part in (made.denoiser, made.denoiser_mean, made.decoder):
        perturb(part)
    made.space.fit([(ids(16), None)])
    return made.eval()


def ids(rows: int = 3, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Plain:
    """One row at a time, from the equations of the modules' docstrings and the weights of a part."""

    def __init__(self, part: Any):
        self.config, self.options = part.config, part.options
        self.weights = {name: x.detach().double() for name, x in part.state_dict().items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor) -> Tensor:
        """[n, heads, D] by the number of each row."""
        width, out = self.config.head_dim, x.clone()
        for i in range(width // 2):
            theta = self.config.rope_parameters["rope_theta"] ** (-2 * i / width)
            angle = (torch.arange(len(x), dtype=torch.float64) * theta)[:, None]
            first, second = x[..., i], x[..., i + width // 2]
            out[..., i] = first * angle.cos() - second * angle.sin()
            out[..., i + width // 2] = second * angle.cos() + first * angle.sin()
        return out

    def attention(self, x: Tensor, read: Tensor, name: str, causal: bool, turned: bool = True) -> Tensor:
        q, k, v = (
            self.linear(rows, f"{name}.{part}_proj").unflatten(-1, (-1, self.config.head_dim))
            for part, rows in (("q", x), ("k", read), ("v", read))
        )
        if turned:
            q, k = self.turned(q), self.turned(k)
        shared = q.shape[1] // k.shape[1]
        out = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // shared].T / math.sqrt(self.config.head_dim)
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out.append(scores.softmax(-1) @ v[:, head // shared])
        return self.linear(torch.stack(out, dim=1).flatten(1), f"{name}.o_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        up = F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(up, f"{name}.down_proj")

    def denoised(self, x: Tensor, t: float, previous: Tensor | None) -> Tensor:
        """[L, k]."""
        count, d = self.config.num_hidden_layers, self.config.hidden_size
        x, previous = x.double(), torch.zeros_like(x).double() if previous is None else previous.double()
        mode = self.options.self_conditioning
        h = self.linear(torch.cat([x, previous], -1) if mode == "concat" else x, "input")
        angles = [1000 * t * math.exp(-math.log(10_000) * i / 128) for i in range(128)]
        waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
        time = F.silu(self.linear(F.silu(self.linear(waves, "time.0")), "time.2"))
        told = self.linear(time, "time_layers").view(count, -1)
        states = []
        for layer in range(count):
            name = f"layers.{layer}"
            if self.options.skips and layer >= count - count // 2:
                h = h + states[count - 1 - layer]
            if mode == "add":
                h = h + previous @ self.weights["previous.weight"].view(count, d, -1)[layer].T
            if self.options.time == "layer":
                h = h + told[layer]
                scale, shift, gate, scale2, shift2, gate2 = 0, 0, 0, 0, 0, 0
            else:
                scale, shift, gate, scale2, shift2, gate2 = told[layer].chunk(6)
            read = self.norm(h, f"{name}.input_layernorm") * (1 + scale) + shift
            h = h + (1 + gate) * self.attention(read, read, f"{name}.self_attn", causal=False)
            read = self.norm(h, f"{name}.post_attention_layernorm") * (1 + scale2) + shift2
            h = h + (1 + gate2) * self.feed_forward(read, f"{name}.mlp")
            states.append(h)
        return self.linear(self.norm(h, "norm"), "output")

    def logits(self, inputs: list[int], z: Tensor) -> Tensor:
        """[T, V] of a decoder that reads the vectors z [L, k]."""
        memory, table = self.linear(z.double(), "project"), self.weights["model.embed_tokens.weight"][inputs]
        placed, places = self.options.memory_positions, None
        if placed == "learned":
            places = self.weights["places.weight"]
            memory = memory + places[: len(memory)]
        if self.options.diagonal:
            table = table + self.linear(z.double(), "diagonal")[: len(inputs)]
        x = table * self.config.embed_scale
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            read = self.norm(x, f"{name}.input_layernorm")
            x = x + self.attention(read, read, f"{name}.self_attn", causal=True)
            read = self.norm(x, f"{name}.cross_layernorm")
            read = read if places is None else read + places[: len(inputs)]
            x = x + self.attention(read, memory, f"{name}.cross_attn", causal=False, turned=placed == "rotary")
            read = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + self.feed_forward(read, f"{name}.mlp")
        return self.linear(self.norm(x, "model.norm"), "lm_head")
