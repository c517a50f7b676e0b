"""Oracles of the depth wing, written from the equations in plain loops over the model's own weights, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fathom import FathomConfig, FathomForCausalLM
from tiny import SIZES

# one token's query [H, D], key and value [G, D], index pass·L + layer, what the token remembers -> key, value to attend
Mix = Callable[[Tensor, Tensor, Tensor, int, dict[int, Any]], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps)


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


class ReferenceDecoder:
    """A Llama or Qwen3 decoder, token by token. `memory[t]` is what a mixer left behind at token t."""

    def __init__(self, model: FathomForCausalLM, mix: Mix):
        self.config: FathomConfig = model.config
        self.w = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.mix = mix
        self.memory: list[dict[int, Any]] = []
        self.values: dict[int, list[Tensor]] = {}  # by index: what the value cache must hold, per token [G, D]

    def layer(self, number: int, index: int, inputs: list[Tensor]) -> list[Tensor]:
        c, w, name = self.config, self.w, f"model.layers.{number}."
        outputs, keys, values = [], [], []
        for t, x in enumerate(inputs):
            y = rms_norm(x, w[name + "input_layernorm.weight"], c.norm_eps)
            q, k, v = (
                (w[f"{name}self_attn.{part}_proj.weight"] @ y).view(-1, c.head_dim).clone() for part in ("q", "k", "v")
            )
            theta, late = c.rope_parameters["rope_theta"], c.mixer.get("k_norm_position") == "post_rope"
            for heads, part in ((q, "q"), (k, "k")):
                for h in range(len(heads)):
                    gain = w[f"{name}self_attn.{part}_norm.weight"] if c.qk_norm else None
                    if gain is not None and not (late and part == "k"):
                        heads[h] = rms_norm(heads[h], gain, c.norm_eps)
                    heads[h] = rope(heads[h], t, theta)
                    if gain is not None and late and part == "k":
                        heads[h] = rms_norm(heads[h], gain, c.norm_eps)
            k, v = self.mix(q, k, v, index, self.memory[t])
            keys.append(k)
            values.append(v)
            group = c.num_attention_heads // c.num_key_value_heads
            attended = []
            for h in range(c.num_attention_heads):
                scores = torch.stack([q[h] @ key[h // group] for key in keys]) / math.sqrt(c.head_dim)
                shares = scores.softmax(0)
                attended.append(sum(share * value[h // group] for share, value in zip(shares, values)))
            x = x + w[name + "self_attn.o_proj.weight"] @ torch.cat(attended)
            y = rms_norm(x, w[name + "post_attention_layernorm.weight"], c.norm_eps)
            gate, up = w[name + "mlp.gate_proj.weight"] @ y, w[name + "mlp.up_proj.weight"] @ y
            outputs.append(x + w[name + "mlp.down_proj.weight"] @ (silu(gate) * up))
        self.values[index] = values
        return outputs

    def layers(self, states: list[Tensor], r: int = 0) -> list[Tensor]:
        count = self.config.num_hidden_layers
        for number in range(count):
            states = self.layer(number, r * count + number, states)
        return states

    def norm(self, states: list[Tensor]) -> list[Tensor]:
        return [rms_norm(x, self.w["model.norm.weight"], self.config.norm_eps) for x in states]

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V], under vanilla depth, loop, or pondering (E ← E + Σ_v p_v c·W_in[v])."""
        self.memory = [{} for _ in ids]
        table, head, depth = self.w["model.embed_tokens.weight"] * self.config.embed_scale, self.w["lm_head.weight"], {}
        depth = self.config.depth
        states = [table[i] for i in ids]
        if depth["name"] == "loop":
            for r in range(depth["passes"]):
                states = self.layers(states, r)
            states = self.norm(states)
        elif depth["name"] == "pondering":
            embeddings = states
            for r in range(depth["steps"] + 1):
                states = self.norm(self.layers(embeddings, r))
                embeddings = [e + (head @ h).softmax(0) @ table for e, h in zip(embeddings, states)]
        else:
            states = self.norm(self.layers(states))
        return torch.stack([head @ h for h in states])


def sublayer_functions(model: FathomForCausalLM, ids: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]]]:
    """The embedding and the sublayers f(norm x) as black boxes, for oracles of the residual wiring around them."""
    decoder = model.model
    embedding = decoder.embed(ids)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    rotary = decoder.rotary_emb(embedding, positions)

    def attention(layer):
        return lambda x: layer.self_attn(layer.input_layernorm(x), rotary, None)[0]

    def mlp(layer):
        return lambda x: layer.mlp(layer.post_attention_layernorm(x))

    functions: list[Callable[[Tensor], Tensor]] = []
    for layer in decoder.layers:
        first, second = attention(layer), mlp(layer)
        if model.config.parallel_residual:
            functions.append(lambda x, first=first, second=second: first(x) + second(x))
        else:
            functions += [first, second]
    return embedding, functions


def head(model: FathomForCausalLM, hidden_states: Tensor) -> Tensor:
    return model.lm_head(model.model.norm(hidden_states))


def fresh_models(tmp_path: Any, **fields: Any) -> list[FathomForCausalLM]:
    """One unperturbed model three ways: constructed; made on the meta device and then filled; and a vanilla stock
    checkpoint to which the method is added."""
    config = FathomConfig(**{**SIZES, "init": "hf", **fields})
    vanilla = {name: value for name, value in fields.items() if name not in ("mixer", "residual")}
    torch.manual_seed(0)
    stock = FathomForCausalLM(FathomConfig(**{**SIZES, "init": "hf", **vanilla}))
    stock.save_stock_pretrained(tmp_path)
    sections = {name: fields[name] for name in ("mixer", "residual") if name in fields}
    return [
        FathomForCausalLM(config),
        FathomForCausalLM.from_pretrained(None, config=config, state_dict={}),
        FathomForCausalLM.from_pretrained(tmp_path, **sections),
    ]


def schedule(options, layer: int, layers: int) -> set[int]:
    """D(ℓ)."""
    name, stride = options.source_schedule, options.stride or max(1, layers // 2)
    sources = {
        "absolute_stride": {j for j in range(layer) if j % stride == 0},
        "relative_stride": {j for j in range(layer) if (layer - j) % stride == 0},
        "first_only": {j for j in range(layer) if j == 0},
        "all": set(range(layer)),
        "explicit": set(options.sources[layer]) if options.sources else set(),
    }[name]
    return sources | {j for j in range(layer) if layer - j <= options.recent_window}


def sources_of(options, index: int, layers: int, passes: int) -> list[int]:
    """D over pass·L + ℓ."""
    r, layer = divmod(index, layers)
    if passes == 1:
        return sorted(schedule(options, layer, layers))
    same = {p * layers + layer for p in range(r)}
    within = {r * layers + j for j in schedule(options, layer, layers)}
    unrolled = {j for j in range(index) if j % (options.stride or max(1, layers // 2)) == 0}
    return sorted(
        {"same_layer": same, "same_layer+stride": same | within, "unrolled_stride": unrolled}[options.loop_sources]
    )


def depth_attention(model):
    """The equations, one token and one key/value head at a time."""
    c, options = model.config, model.model.mixer.options
    group = c.num_attention_heads // c.num_key_value_heads

    def mix(query, key, value, index, memory):
        sources = sources_of(options, index, c.num_hidden_layers, c.passes)
        mixed_key, mixed_value = key.clone(), value.clone()
        for head in range(c.num_key_value_heads) if sources else ():
            mean = sum(query[head * group + i] for i in range(group)) / group
            scores = [float(mean @ memory[j]["key"][head]) / math.sqrt(c.head_dim) for j in sources]
            scores.append(float(mean @ key[head]) / math.sqrt(c.head_dim))
            if options.mix_rule == "uniform":
                scores = [0.0] * len(scores)
            total = sum(math.exp(s) for s in scores)
            alpha = [math.exp(s) / total for s in scores]
            mixed_value[head] = alpha[-1] * value[head]
            mixed_key[head] = alpha[-1] * key[head]
            for a, j in zip(alpha, sources):
                mixed_value[head] += a * memory[j]["mixed value"][head]
                mixed_key[head] += a * memory[j]["mixed key"][head]
        memory[index] = {"key": key, "mixed key": mixed_key, "mixed value": mixed_value}
        target = options.mix_target
        return mixed_key if "k" in target else key, mixed_value if "v" in target else value

    return mix
