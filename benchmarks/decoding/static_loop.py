"""Ours beside an outside engine's idea on the same weights: gpt-fast's loop, written here from its published idea.

    python benchmarks/decoding/static_loop.py OUT.json            one GPU, about a minute (most of it compiles)
    python benchmarks/decoding/static_loop.py OUT.json --tiny     CPU, seconds: nothing is compiled

gpt-fast (pytorch.org/blog/accelerating-generative-ai-2, 2023) decodes by one function of a token and its position, with
a static cache, compiled whole with mode="reduce-overhead", so that a step is one graph of fused kernels. `static` is
that: queries, keys and values by one product, gate and up by one, argmax inside. `ours` is `generate()` of
`FathomForCausalLM`: a recorded step, nothing compiled. A step of either is the median time between two tokens, the two
taking turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from generate import CUDA, DEVICE, MIDDLE, OPTIONS, TINY, Clock, bandwidth, floor, ours, path, prompt
from torch import Tensor, nn
from transformers import LogitsProcessorList

from fathom.caches import Full, cache_shape
from fathom.ops.rotary import rotate
from fathom.report.provenance import provenance


class Layer(nn.Module):
    """The weights of a layer, fused, and its cache. Buffers: a graph may write to those where they are."""

    def __init__(self, layer: Any, cache: Tensor):
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        for name, weight in {
            "qkv": torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]), "o": a.o_proj.weight,
            "up": torch.cat([m.gate_proj.weight, m.up_proj.weight]), "down": m.down_proj.weight,
            "before": layer.input_layernorm.weight, "after": layer.post_attention_layernorm.weight,
            "keys": cache.clone(), "values": cache.clone(),
        }.items():  # fmt: skip
            self.register_buffer(name, weight.detach())


class Static(nn.Module):
    """The weights of a vanilla model of ours, and a cache of `room` tokens."""

    def __init__(self, model: Any, rows: int, room: int):
        super().__init__()
        config, decoder = model.config, model.model
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.scale = config.norm_eps, config.embed_scale
        table = decoder.embed_tokens.weight.detach()
        cos, sin = decoder.rotary_emb(table, torch.arange(room, device=DEVICE)[None])
        for name, held in {
            "embedding": table, "head": model.lm_head.weight.detach(), "norm": decoder.norm.weight.detach(),
            "cos": cos, "sin": sin, "visible": torch.ones(room, room, dtype=torch.bool, device=DEVICE).tril(),
        }.items():  # fmt: skip
            self.register_buffer(name, held)
        cache = table.new_zeros(rows, self.groups, room, self.width)
        self.layers = nn.ModuleList(Layer(layer, cache) for layer in decoder.layers)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [B,V] of the last of tokens [B,m] at `places` [m], which must be the newest of the cache."""
        x, (rows, m) = self.embedding[ids] * self.scale, ids.shape
        cos, sin = self.cos[:, places], self.sin[:, places]
        mask = self.visible[places][None, None]
        for layer in self.layers:
            sizes = [count * self.width for count in (self.heads, self.groups, self.groups)]
            parts = F.linear(self.normed(x, layer.before), layer.qkv).split(sizes, dim=-1)
            q, k, v = (part.view(rows, m, -1, self.width).transpose(1, 2) for part in parts)
            layer.keys[:, :, places], layer.values[:, :, places] = rotate(k, cos, sin), v
            mixed = F.scaled_dot_product_attention(
                rotate(q, cos, sin), layer.keys, layer.values, attn_mask=mask, enable_gqa=self.heads != self.groups
            )
            x = x + F.linear(mixed.transpose(1, 2).reshape(rows, m, -1), layer.o)
            gate, up = F.linear(self.normed(x, layer.after), layer.up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self.normed(x[:, -1], self.norm), self.head)

    def step(self, token: Tensor, place: Tensor) -> Tensor:
        return self.forward(token, place).argmax(-1, keepdim=True)


@torch.inference_mode()
def static_tokens(static: Static, step: Any, ids: Tensor, new: int, clock: Clock) -> Tensor:
    logits = static.forward(ids, torch.arange(ids.shape[1], device=DEVICE))
    token = logits.argmax(-1, keepdim=True)
    found = [token]
    clock(ids, logits)
    place = torch.tensor([ids.shape[1]], device=DEVICE)
    for _ in range(new - 1):
        token = step(token, place).clone()
        clock(ids, logits)
        found.append(token)
        place += 1
    return torch.cat(found, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    dtype, length, new = (torch.bfloat16, 128, 64) if CUDA else (torch.float32, 16, 8)
    model = ours(TINY if given.tiny else MIDDLE, dtype)
    copied, found = bandwidth(), []
    for rows in given.rows:
        static = Static(model, rows, length + new)
        start = time.perf_counter()
        step = torch.compile(static.step, mode="reduce-overhead", fullgraph=True) if CUDA else static.step
        static_tokens(static, step, prompt(rows, length, model.config.vocab_size), 4, Clock())
        row: dict[str, Any] = {"rows": rows, "prompt": length, "new": new, "compile_s": time.perf_counter() - start}
        steps: dict[str, list[float]] = {"static": [], "ours": []}
        for turn in range(given.repeats + 1):
            ids, clocks = prompt(rows, length, model.config.vocab_size, seed=turn), (Clock(), Clock())
            theirs = static_tokens(static, step, ids, new, clocks[0])
            with path("graphs" if CUDA else "loop"), torch.inference_mode():
                own = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **OPTIONS,
                    logits_processor=LogitsProcessorList([clocks[1]]),
                )  # fmt: skip
            if turn:
                steps["static"] += clocks[0].steps()
                steps["ours"] += clocks[1].steps()
            row["tokens_equal"] = float((own[:, length:] == theirs).float().mean())  # in bf16 up to the first tie
        bytes_of_step = floor(model, Full().cache_bytes(cache_shape(model, rows), length, new // 2))
        row |= {f"{name}_ms": statistics.median(times) for name, times in steps.items()}
        row["ours_over_static"] = row["static_ms"] / row["ours_ms"]  # in tokens a second
        row["floor_ms"] = 1000 * bytes_of_step / copied
        found.append(row)
        print(json.dumps(row), flush=True)
        said = {"command": "benchmarks/decoding/static_loop.py", "rows": found, **provenance(1)}
        given.output.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
