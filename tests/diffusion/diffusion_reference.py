"""A masked diffusion model and its sampler written out in float64, one row at a time, from the papers' equations.

Keys and values lie in dicts by column, sets of columns are Python sets, and nothing of fathom.diffusion is used.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction

import torch
import torch.nn.functional as F


class PlainModel:
    """A decoder whose tokens see all columns that they are given, from the weights of one of ours."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: x.detach().double() for name, x in model.state_dict().items()}
        self.shift = model.config.diffusion.get("shift", False)
        self.mask = model.config.diffusion["mask_token_id"]

    def norm(self, x, name):
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + self.weights[f"{name}.bias"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def turned(self, x, columns):
        """[m, heads, D] by the positions of the columns."""
        width = int(self.config.head_dim * self.config.partial_rotary_factor)
        theta = self.config.rope_parameters["rope_theta"]
        out = x.clone()
        for i in range(width // 2):
            angle = torch.tensor([c * theta ** (-2 * i / width) for c in columns], dtype=torch.float64)[:, None]
            first, second = x[..., i], x[..., i + width // 2]
            out[..., i] = first * angle.cos() - second * angle.sin()
            out[..., i + width // 2] = second * angle.cos() + first * angle.sin()
        return out

    def run(self, ids, columns, store, kept=None, asked=None):
        """States of `columns`, which write their keys and values to `store` and read all of it (of layer l, only
        `kept[l]` and themselves). `asked` gets the queries of every layer."""
        config, columns = self.config, sorted(columns)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        x = self.weights["model.embed_tokens.weight"][[ids[c] for c in columns]] * config.embed_scale
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}"
            h = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self.linear(h, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, config.head_dim)) for part in "qkv"
            )
            q, k = self.turned(q, columns), self.turned(k, columns)
            store[layer].update({c: (k[i], v[i]) for i, c in enumerate(columns)})
            if asked is not None:
                asked.append({c: q[i] for i, c in enumerate(columns)})
            seen = sorted(store[layer] if kept is None else set(kept[layer]) | set(columns))
            mixed = torch.zeros(len(columns), heads, config.head_dim, dtype=torch.float64)
            for head in range(heads):
                keys = torch.stack([store[layer][c][0][head * groups // heads] for c in seen])
                values = torch.stack([store[layer][c][1][head * groups // heads] for c in seen])
                mixed[:, head] = (q[:, head] @ keys.T / config.head_dim**0.5).softmax(-1) @ values
            attended = self.linear(mixed.flatten(1), f"{name}.self_attn.o_proj")
            if not config.parallel_residual:
                x = x + attended
            h = self.norm(x, f"{name}.post_attention_layernorm")
            up = self.linear(h, f"{name}.mlp.up_proj")
            up = F.silu(self.linear(h, f"{name}.mlp.gate_proj")) * up if config.gated_mlp else F.gelu(up)
            x = x + self.linear(up, f"{name}.mlp.down_proj") + (attended if config.parallel_residual else 0)
        return dict(zip(columns, self.norm(x, "model.norm"), strict=True))

    def reuse(self, ids, memory, answer, prompt_anew, answer_anew, ratio):
        """States of all columns, of which each layer computes some anew and takes the rest from `memory`."""
        config, total = self.config, len(ids)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        x = self.weights["model.embed_tokens.weight"][list(ids)] * config.embed_scale
        for layer, (store, attended, fed) in enumerate(memory):
            name = f"model.layers.{layer}"
            h = self.norm(x, f"{name}.input_layernorm")
            columns = list(range(answer)) if prompt_anew else []
            if answer_anew or layer == 0:
                columns += range(answer, total)
            else:
                values = self.linear(h, f"{name}.self_attn.v_proj")
                alike = {
                    c: float(F.cosine_similarity(values[c], store[c][1].flatten(), dim=0)) for c in range(answer, total)
                }
                count = max(1, math.floor(Fraction(str(ratio)) * (total - answer)))
                columns += sorted(alike, key=lambda c: (alike[c], c))[:count]
            q, k, v = (
                self.linear(h[columns], f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, config.head_dim))
                for part in "qkv"
            )
            q, k = self.turned(q, columns), self.turned(k, columns)
            store.update({c: (k[i], v[i]) for i, c in enumerate(columns)})
            for i, c in enumerate(columns):
                mixed = []
                for head in range(heads):
                    keys = torch.stack([store[j][0][head * groups // heads] for j in range(total)])
                    values = torch.stack([store[j][1][head * groups // heads] for j in range(total)])
                    mixed.append((keys @ q[i, head] / config.head_dim**0.5).softmax(-1) @ values)
                attended[c] = self.linear(torch.cat(mixed), f"{name}.self_attn.o_proj")
            added = torch.stack([attended[c] for c in range(total)])
            between = x if config.parallel_residual else x + added
            for c in columns:
                h = self.norm(between[c], f"{name}.post_attention_layernorm")
                up = self.linear(h, f"{name}.mlp.up_proj")
                up = F.silu(self.linear(h, f"{name}.mlp.gate_proj")) * up if config.gated_mlp else F.gelu(up)
                fed[c] = self.linear(up, f"{name}.mlp.down_proj")
            x = x + added + torch.stack([fed[c] for c in range(total)])
        return dict(enumerate(self.norm(x, "model.norm")))

    def probabilities(self, state):
        logits = self.weights["lm_head.weight"] @ state
        logits[self.mask] = -torch.inf
        return logits


def keep_best(model, asked, store, block, outside, cache):
    """The columns that each layer keeps, by Sparse-dLLM's score of heads and tokens one by one."""
    found = []
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    for layer in range(model.config.num_hidden_layers):
        scores = []
        for j in outside:
            total = 0.0
            for head in range(heads):
                mean = sum(asked[layer][c][head] for c in block) / len(block)
                total += float(mean @ store[layer][j][0][head * groups // heads])
            scores.append(total / heads)
        reach = (cache.get("kernel_size", 3) or 1) // 2
        pooled = [max(scores[max(0, i - reach) : i + reach + 1]) for i in range(len(scores))]
        count = math.floor(Fraction(str(cache.get("keep_ratio", 0.5))) * len(outside))
        order = sorted(range(len(outside)), key=lambda i: (-pooled[i], i))
        found.append([outside[i] for i in order[:count]])
    return found


def energies(states, rho, step, steps):
    """φ of the block's states, by sums over tokens and bins."""
    n, width = len(states), len(states[0])
    bins = n // 2 + 1
    wide = max(1, math.floor(Fraction(str(rho)) * bins))
    u = Fraction(step, steps - 1) if steps > 1 else Fraction(1)
    first = math.floor(u * (bins - wide))
    out = [0.0] * n
    for d in range(width):
        signal = [float(state[d]) for state in states]
        spectrum = [sum(x * cmath.exp(-2j * math.pi * f * t / n) for t, x in enumerate(signal)) for f in range(bins)]
        for t in range(n):
            y = 0.0
            for f in range(first, first + wide):
                both = 1 if f == 0 or 2 * f == n else 2  # a bin and its mirror
                y += both * (spectrum[f] * cmath.exp(2j * math.pi * f * t / n)).real / n
            out[t] += y * y
    return [e / (max(out) + 1e-8) for e in out]


def sample(model, prompt, policy, cache, *, length, block_length, steps, temperature=0.0, schedule="linear", seed=0):
    """Ids, the step that revealed each, and its probability then, of one row. `policy`, `cache`: (name, options)."""
    (policy, options), (cache, kept_by) = policy, cache
    generator = torch.Generator().manual_seed(seed)
    ids, revealed, confidence = list(prompt) + [model.mask] * length, {}, {}
    layers, total = model.config.num_hidden_layers, len(prompt) + length
    history: list[float] = []
    per_block = steps // (length // block_length)
    memory = [({}, {}, {}) for _ in range(layers)]
    for number in range(length // block_length):
        start = len(prompt) + number * block_length
        block = range(start, start + block_length)
        store = [{} for _ in range(layers)]
        done, kept = set(), None
        delay = kept_by.get("delay_steps", 1 if cache == "sparse_dllm" else 0)
        official = cache == "sparse_dllm" and model.shift and kept_by.get("first_step", "official") == "official"
        extra = model.shift and not official
        for step in range(per_block):
            masked = [j for j in block if ids[j] == model.mask]
            if not masked:
                break
            every, refresh = range(total), kept_by.get("refresh")
            if schedule == "dream":
                t = torch.linspace(1, 1e-3, per_block + 1)
                quota = int(len(masked) * (1 - t[step + 1] / t[step]))
            elif schedule == "exact":
                quota = block_length * (step + 1) // per_block - block_length * step // per_block
            else:
                quota = block_length // per_block + (step < block_length % per_block)
            quota = len(masked) if step == per_block - 1 else min(quota, len(masked))
            if cache == "none":
                states = model.run(ids, every, [{} for _ in range(layers)])
            elif cache == "dllm_cache":
                now = number * per_block + step
                anew = [now % kept_by[f"{part}_interval"] == 0 for part in ("prompt", "response")]
                states = model.reuse(ids, memory, len(prompt) - model.shift, *anew, kept_by["ratio"])
            elif cache in ("dual", "prefix"):
                whole = step <= delay or bool(refresh and (step - delay) % refresh == 0)
                end = total if cache == "prefix" else block.stop
                states = model.run(ids, every if whole else range(block.start - model.shift, end), store)
            elif cache == "sparse_dllm":
                if step <= delay:
                    asked: list[dict] = []
                    store = [{} for _ in range(layers)]
                    states = model.run(ids, every, store, asked=asked)
                    if step == delay:
                        outside = [j for j in every if j not in block and not (extra and j == block.start - 1)]
                        kept = keep_best(model, asked, store, block, outside, kept_by)
                else:
                    states = model.run(ids, range(block.start - extra, block.stop), store, kept)
            else:  # dkv_cache
                known = {j for j in every if ids[j] != model.mask}
                if step % kept_by.get("cache_steps", 8) == 0:
                    columns = set(every)
                elif kept_by.get("mode") == "greedy":
                    new = known - done
                    away = {j: min((abs(j - r) for r in new if r in block), default=block_length) for j in masked}
                    near = sorted(masked, key=lambda j: (away[j], j))[: max(quota, 1)]
                    near += [j for j in masked if away[j] <= kept_by.get("window", 4) // 2]
                    columns = new | set(near) | ({j - 1 for j in near} if model.shift else set())
                else:
                    columns = set(every) - done
                    columns |= {j - 1 for j in masked} if model.shift else set()
                states = model.run(ids, columns, store)
                done |= known & columns
            able = [j for j in masked if j - model.shift in states]
            if official and step == 0:
                able, quota = [block.start], 1
            logits = torch.stack([model.probabilities(states[j - model.shift]) for j in able])
            p = logits.softmax(-1)
            if temperature:
                noise = torch.rand(len(able), logits.shape[1], dtype=torch.float64, generator=generator)
                chosen = (logits / temperature - (-noise.log()).log()).argmax(-1).tolist()
            else:
                chosen = logits.argmax(-1).tolist()
            best = [float(p[i, token]) for i, token in enumerate(chosen)]
            entropy = [-sum(float(x) * math.log(float(x)) for x in row if x > 0) for row in p]
            count = quota
            if policy == "random":
                drawn = torch.rand(block_length, generator=generator).tolist()
                rank = [drawn[j - block.start] for j in able]
            elif policy == "left_to_right":
                rank = [-j for j in able]
            elif policy == "margin":
                rank = [float(top[0] - top[1]) for top in p.topk(2).values]
            elif policy in ("entropy", "entropy_bounded"):
                rank = [-h for h in entropy]
            elif policy == "fourier_sampler":
                phi = energies([states[j - model.shift] for j in block], options.get("rho", 0.4), step, per_block)
                scope = able
                if options.get("variance_scope", "sequence") == "sequence":
                    scope = [j for j in every if ids[j] == model.mask and j - model.shift in states]
                tops = [float(model.probabilities(states[j - model.shift]).softmax(-1).max()) for j in scope]
                beta = 0.6
                if len(tops) > 1:
                    mean = sum(tops) / len(tops)
                    variance = sum((x - mean) ** 2 for x in tops) / (len(tops) - 1)
                    history = [*history, variance][-20:]
                    percent = 100 * sum(v < variance for v in history) / len(history)
                    beta = 0.4 + 0.2 * (1 - 0.5 * (1 + math.erf(3 * (percent - 50) / 50 / 2**0.5)))
                rank = [best[i] + beta * phi[j - block.start] for i, j in enumerate(able)]
            else:
                rank = best
            order = sorted(range(len(able)), key=lambda i: (-rank[i], able[i]))
            if step < per_block - 1 and policy == "threshold":
                count = max(1, sum(x >= options.get("threshold", 0.9) for x in best))
            if policy == "dynamic":
                count = max(quota, sum(x > options.get("threshold", 0.9) for x in best))
            if step < per_block - 1 and policy == "entropy_bounded":
                rising = [entropy[i] for i in order]
                count = max(k for k in range(1, len(able) + 1) if sum(rising[: k - 1]) <= options.get("bound", 0.1))
            for i in order[:count]:
                ids[able[i]] = chosen[i]
                confidence[able[i]] = best[i]
                revealed[able[i]] = number * per_block + step
    return ids, revealed, confidence
