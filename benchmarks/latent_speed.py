"""Latent thoughts against their targets: training step and memory, attention of slot layouts, decoding.

    python benchmarks/latent_speed.py --out docs/results/latent_speed.json
    python benchmarks/latent_speed.py --tiny --out /tmp/latent.json           (CPU, a dry run of the script)

One process, contestants taking turns, median of the blocks with the spread in the file.

training   A step of PonderLM-2 (K = 1, J = 3), 1024 tokens, against 9 × vanilla's step plus the time that its longer
           sequences' extra attention takes: extra attention FLOPs in closed form, over the rate measured for causal
           attention at the slot length. With every pass checkpointed: peak memory and step. `--compile pass` compiles
           one forward of the stack instead of the whole model (six forwards of 24 layers are a large graph).
attention  Forward and backward: the unbiased layout, the key bias by FlexAttention and by a channel, against plain
           causal attention of the same length.
decode     Seconds a token at K = 1 on a dynamic cache, against vanilla's times the ratio of bytes read: weights and
           keys and values, once for each of the K + 1 passes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fathom.cost import forward_flops_per_token
from fathom.cost.sizes import kv_bytes_per_token
from fathom.models.decoder import Stack
from fathom.ops.biased_attention import KeyBias, biased_attention, block_mask, causal
from speed import SHAPES, TINY, TrainingStep, environment, free, make_fathom, seconds_of, synchronize, take_turns

FIXED = {"sweeps": 3, "random_sweeps": False}
PONDERLM2: dict[str, Any] = {"name": "ponderlm2", "thoughts": 1, **FIXED}
TRAINING: dict[str, dict[str, Any]] = {
    "vanilla": {"name": "vanilla"},
    "ponderlm2": PONDERLM2,
    "ponderlm2 checkpointed": {**PONDERLM2, "checkpoint_passes": True},
    "ponderlm2 two passes learn": {**PONDERLM2, "gradient_passes": 2},
    "ponderlm3 checkpointed": {"name": "ponderlm3", "thoughts": 1, **FIXED, "checkpoint_passes": True},
    "pause": {"name": "pause"},
}
DECODING = {
    "vanilla": TRAINING["vanilla"],
    "ponderlm2": PONDERLM2,
    "ponderlm3": {"name": "ponderlm3", "thoughts": 1, **FIXED},
}


class Step(TrainingStep):
    """A training step, its model compiled pass by pass where asked for."""

    def __init__(self, *args: Any, by_pass: bool):
        self.by_pass = by_pass
        super().__init__(*args)

    def __call__(self, steps: int) -> float:
        self.compiled = self.model if self.by_pass else self.compiled
        return super().__call__(steps)


def attention(sizes: dict, batch: int, length: int, device: str, blocks: int, repeats: int) -> list[dict]:
    """Plain causal attention of `length` slots against the forms of a layout; forward only on a CPU."""
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["hidden_size"] // heads
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [
        torch.randn(batch, n, length, width, device=device, dtype=dtype, requires_grad=device == "cuda")
        for n in (heads, groups, groups)
    ]
    bias = -torch.rand(batch, length, device=device, requires_grad=device == "cuda")
    config = make_fathom(sizes, 97, length, depth={"name": "pause"}).config
    module = make_fathom(sizes, 97, length).model.layers[0].self_attn.to(device)
    scaling = width**-0.5

    def sdpa(mask):
        return sdpa_attention_forward(module, *tensors, mask, scaling=scaling)[0]

    def unbiased():
        with torch.device("meta"):
            stack = make_fathom(sizes, 97, length, depth={"name": "pause"})
        slots = torch.empty(batch, length // 2, sizes["hidden_size"], device=device)
        stack = stack.bind_stack(slots, None, None, None, {})
        return stack.layout(2).mask(config, slots, None, packed=False)

    def biased(mask):
        return biased_attention(sdpa_attention_forward, module, *tensors, mask, scaling)[0]

    layout = unbiased()
    forms = {
        "causal": lambda: sdpa(None),
        "unbiased layout": lambda: sdpa(layout),
        "key bias, flex": lambda: biased(KeyBias(bias, block_mask(causal, length, length, bias.device))),
        "key bias, channel": lambda: biased(KeyBias(bias)),
    }

    def both(form):
        out = form()
        if device == "cuda":
            out.backward(out.detach())

    for form in forms.values():
        for _ in range(3):
            both(form)
    timed = take_turns({n: lambda f=f: seconds_of(lambda: both(f), device, repeats) for n, f in forms.items()}, blocks)
    pairs = length * (length + 1) / 2
    rows = []
    for name, figures in timed.items():
        flops = (3 if device == "cuda" else 1) * batch * heads * width * 4 * pairs
        row = {
            "kind": "attention", "contestant": name, "batch": batch, "slots": length, "heads": heads,
            "kv_heads": groups, "head_dim": width, **figures, "flops_per_s": flops / figures["median_s"],
            "time_vs_causal": figures["median_s"] / timed["causal"]["median_s"],
        }  # fmt: skip
        rows.append(row)
        print(f"attention {length} slots  {name:20} {row['time_vs_causal']:.3f} x causal", flush=True)
    return rows


def training(
    names: list[str], sizes: dict, vocab: int, batch: int, length: int, device: str, blocks: int, steps: int,
    by_pass: bool, rate: float,
) -> list[dict]:  # fmt: skip
    """`rate`: FLOPs a second of causal attention, forward and backward, at the slot length."""
    runs: dict[str, Step] = {}
    for name in names:
        start = time.perf_counter()
        build = lambda depth=TRAINING[name]: make_fathom(sizes, vocab, length, depth=depth)  # noqa: E731
        runs[name] = Step(build, vocab, batch, length, device, by_pass=by_pass)
        print(f"  {name}: ready in {time.perf_counter() - start:.0f} s", flush=True)
    timed = take_turns({name: lambda r=run: r.time(steps) for name, run in runs.items()}, blocks)
    config = {name: runs[name].model.config for name in names}
    vanilla = timed["vanilla"]["median_s"]
    rows = []
    for name, figures in timed.items():
        cost = forward_flops_per_token(config[name], length, parallel=True)
        plain = forward_flops_per_token(config["vanilla"], length)
        passes = cost.linear / plain.linear
        extra = 3 * batch * length * (cost.attention - passes * plain.attention) / rate
        row = {
            "kind": "training", "contestant": name, "batch": batch, "length": length, "vocab": vocab, **figures,
            "passes": passes, "extra_attention_s": extra, "time_vs_vanilla": figures["median_s"] / vanilla,
            "time_vs_passes": figures["median_s"] / (passes * vanilla + extra), "peak_bytes": runs[name].peak,
            "time_vs_bare_passes": figures["median_s"] / (passes * vanilla),
            "peak_vs_vanilla": runs[name].peak / runs["vanilla"].peak if runs[name].peak else None,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:28} {row['time_vs_vanilla']:.3f} x vanilla, {row['time_vs_passes']:.3f} x ({passes:.0f} x vanilla "
            f"+ attention), {row['time_vs_bare_passes']:.3f} without; peak {row['peak_vs_vanilla'] or 0:.2f} x",
            flush=True,
        )
    runs.clear()
    free(device)
    return rows


def decoding(
    sizes: dict, vocab: int, contexts: tuple[int, ...], batches: tuple[int, ...], device: str, blocks: int, new: int
) -> list[dict]:
    """Greedy steps on a filled cache, which is cropped back after each block."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models = {}
    for name, depth in DECODING.items():
        torch.manual_seed(0)
        models[name] = make_fathom(sizes, vocab, 2 * max(contexts), depth=depth).to(device, dtype).eval()
    weights = (
        sum(p.numel() for p in models["vanilla"].parameters()) - vocab * sizes["hidden_size"]
    )  # one row of a table
    rows = []
    for context in contexts:
        for batch in batches:
            ids = torch.randint(0, vocab, (batch, context), device=device)
            caches, predicted = {}, {}
            for name, model in models.items():
                caches[name] = DynamicCache()
                with torch.no_grad():
                    model(ids, past_key_values=caches[name], logits_to_keep=1)
                slots = model.depth.slots
                held = batch * (context + new / 2) * kv_bytes_per_token(model.config, dtype)
                predicted[name] = slots * (weights * dtype.itemsize + held)

            @torch.no_grad()
            def run(name, ids=ids, caches=caches):
                token, model, cache = ids[:, -1:], models[name], caches[name]
                synchronize(device)
                start = time.perf_counter()
                for _ in range(new):
                    token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                synchronize(device)
                seconds = (time.perf_counter() - start) / new
                cache.crop(-new)
                return seconds

            for name in models:
                run(name)
            timed = take_turns({name: lambda n=name: run(n) for name in models}, blocks)
            for name, figures in timed.items():
                ratio = figures["median_s"] / timed["vanilla"]["median_s"]
                by_bytes = predicted[name] / predicted["vanilla"]
                row = {
                    "kind": "decode", "contestant": name, "context": context, "batch": batch, "new": new, **figures,
                    "time_vs_vanilla": ratio, "bytes_vs_vanilla": by_bytes, "speed_vs_bytes": by_bytes / ratio,
                }  # fmt: skip
                rows.append(row)
                print(
                    f"decode context {context:5} batch {batch:3} {name:10} {1e3 * figures['median_s']:.2f} ms a token, "
                    f"{ratio:.2f} x vanilla (bytes {by_bytes:.2f} x): {row['speed_vs_bytes']:.2f} of the prediction",
                    flush=True,
                )
            caches.clear()
            free(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--contestants", nargs="+", choices=TRAINING, default=list(TRAINING), help="vanilla first")
    parser.add_argument("--compile", choices=("model", "pass"), default="pass")
    parser.add_argument("--only", choices=("training", "attention", "decode"), help="run one part")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    sizes = next(iter(TINY.values())) if args.tiny else SHAPES[args.shape]
    vocab, batch, length = (97, 2, 64) if args.tiny else (50304, args.batch, 1024)
    if args.compile == "pass":
        backend = "aot_eager" if device == "cpu" else "inductor"
        one_pass = Stack.__call__
        Stack.__call__ = torch.compile(one_pass, backend=backend)  # type: ignore[method-assign]
    results: dict[str, Any] = {"environment": environment(device), "compile": args.compile, "rows": []}

    def add(rows: list[dict]) -> None:
        results["rows"] += rows
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)

    blocks, repeats = (2, 2) if args.tiny else (9, 8)
    if args.only != "decode":
        measured = attention(sizes, batch, 2 * length, device, blocks, 2 if args.tiny else 50)
        add(measured)
        if args.only != "attention":
            rate = measured[0]["flops_per_s"]
            by_pass = args.compile == "pass"
            add(training(args.contestants, sizes, vocab, batch, length, device, blocks, repeats, by_pass, rate))
    if args.only in (None, "decode"):
        if args.compile == "pass":  # decoding runs uncompiled, its cache grows
            Stack.__call__ = one_pass  # type: ignore[method-assign]
        contexts, new = ((16, 32), 4) if args.tiny else ((256, 1024, 4096), 64)
        add(decoding(sizes, vocab, contexts, (1, 2) if args.tiny else (1, 32), device, 2 if args.tiny else 5, new))


if __name__ == "__main__":
    main()
