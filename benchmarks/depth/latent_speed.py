"""Latent thoughts against their targets: training step and memory, attention of slot layouts, decoding.

    python benchmarks/depth/latent_speed.py --out docs/results/latent_speed.json     (one GPU, --minutes 4.5 or less)
    python benchmarks/depth/latent_speed.py --tiny --out /tmp/latent.json            (CPU, a dry run of the script)

One process, contestants taking turns, median of the blocks with the spread in the file, which is written after every
row. What has a target runs first; a row that fails says why, and the others go on.

training   A step of PonderLM-2 (K = 1, J = 3), 1024 tokens, against 9 × vanilla's step plus the time that its longer
           sequences' extra attention takes: extra attention FLOPs in closed form, over the rate measured for causal
           attention at the slot length. With every pass checkpointed: peak memory and step. Layers are compiled, one
           graph for all of them at one length; the 120 that PonderLM-2 runs would compile for minutes as one.
           `--compile model` compiles the whole model, as the Trainer does.
attention  Forward and backward: the unbiased layout, the key bias by range kernels, by a channel and by
           FlexAttention, against plain causal attention of the same length. Tensors lie as projections leave them.
decode     Seconds a token at K = 1 on a dynamic cache, uncompiled, against vanilla's times the ratio of bytes:
           weights and keys and values, once for each of the K + 1 passes. On a GPU a token at the same context is also
           replayed as a CUDA graph, so that launches cost nothing: its bytes hold the dynamic cache's copy of itself
           (read and written once more in each pass), which the first figure leaves out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from speed import SHAPES, TINY, TrainingStep, environment, make_fathom, seconds_of, synchronize, take_turns
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fathom.cost import forward_flops_per_token
from fathom.cost.sizes import kv_bytes_per_token
from fathom.decoding.graphs import CudaGraphs
from fathom.models.decoder import Block
from fathom.ops.biased_attention import (
    ChannelBias,
    FlexBias,
    RangeBias,
    biased_attention,
    block_mask,
    causal_ranges,
)
from fathom.ops.visibility import CAUSAL

STARTED = time.perf_counter()
FIXED = {"sweeps": 3, "random_sweeps": False}
PONDERLM2: dict[str, Any] = {"name": "ponderlm2", "thoughts": 1, **FIXED}
PONDERLM3: dict[str, Any] = {"name": "ponderlm3", "thoughts": 1, **FIXED}
TRAINING: dict[str, dict[str, Any]] = {
    "vanilla": {"name": "vanilla"},
    "ponderlm2": PONDERLM2,
    "ponderlm2 checkpointed": {**PONDERLM2, "checkpoint_passes": True},
    "ponderlm2 two passes learn": {**PONDERLM2, "gradient_passes": 2},
    "ponderlm3 checkpointed": {**PONDERLM3, "checkpoint_passes": True},
    "ponderlm3 checkpointed, flex": {**PONDERLM3, "checkpoint_passes": True},
    "pause": {"name": "pause"},
}
BACKENDS = {"ponderlm3 checkpointed, flex": "flex_attention"}  # others: sdpa
DECODING = {"vanilla": TRAINING["vanilla"], "ponderlm2": PONDERLM2, "ponderlm3": {**PONDERLM3, "threshold": 0.0}}
MAIN = ["vanilla", "ponderlm2", "ponderlm2 checkpointed"]


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.0f} s  {text}", flush=True)


class Step(TrainingStep):
    """A training step of a model whose layers are compiled, or of a compiled model."""

    def __init__(self, *args: Any, by_layer: bool):
        self.by_layer = by_layer
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        super().__init__(*args)
        if self.peak is not None:  # of a step, not of compiling it
            torch.cuda.reset_peak_memory_stats()
            self(1)
            self.peak = torch.cuda.max_memory_allocated() - before

    def __call__(self, steps: int) -> float:
        if self.by_layer:
            self.compiled = self.model
            for layer in self.model.model.layers:  # the standard residual does not read it: one graph for all layers
                layer.layer_idx = 0
        return super().__call__(steps)


def release(device: str) -> None:
    """Memory, not compiled code."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def attention(
    names: tuple[str, ...], sizes: dict, batch: int, length: int, device: str, blocks: int, repeats: int
) -> Iterator[dict]:
    """Plain causal attention of `length` slots against the forms of a layout; forward only on a CPU."""
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["hidden_size"] // heads
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [
        torch.randn(batch, length, n, width, device=device, dtype=dtype).transpose(1, 2)
        for n in (heads, groups, groups)
    ]
    for tensor in tensors:
        tensor.requires_grad_(device == "cuda")
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
        "key bias, flex": lambda: biased(FlexBias(bias, block_mask(CAUSAL, length, length, bias.device))),
        "key bias, channel": lambda: biased(ChannelBias(bias)),
        "key bias, ranges": lambda: biased(RangeBias(bias, causal_ranges(batch, length, bias.device))),
    }

    def both(form):
        out = form()
        if device == "cuda":
            out.backward(out.detach())

    forms = {name: forms[name] for name in ("causal", *names)}
    for form in forms.values():
        for _ in range(3):
            both(form)
    timed = take_turns({n: lambda f=f: seconds_of(lambda: both(f), device, repeats) for n, f in forms.items()}, blocks)
    pairs = length * (length + 1) / 2
    for name, figures in timed.items():
        flops = (3 if device == "cuda" else 1) * batch * heads * width * 4 * pairs
        row = {
            "kind": "attention", "contestant": name, "batch": batch, "slots": length, "heads": heads,
            "kv_heads": groups, "head_dim": width, **figures, "flops_per_s": flops / figures["median_s"],
            "time_vs_causal": figures["median_s"] / timed["causal"]["median_s"],
        }  # fmt: skip
        say(f"attention {length} slots  {name:20} {row['time_vs_causal']:.3f} x causal")
        yield row


def training(
    names: list[str], sizes: dict, vocab: int, batch: int, length: int, device: str, blocks: int, steps: int,
    by_layer: bool, rate: float | None, enough: Callable[[], bool],
) -> Iterator[dict]:  # fmt: skip
    """`rate`: FLOPs a second of causal attention, forward and backward, at the slot length; None: not measured."""
    runs: dict[str, Step] = {}

    def build(name: str) -> torch.nn.Module:
        model = make_fathom(sizes, vocab, length, depth=TRAINING[name])
        model.set_attn_implementation(BACKENDS.get(name, "sdpa"))
        return model

    for name in names:
        if not enough():
            yield {"kind": "training", "contestant": name, "error": "no time left"}
            continue
        try:
            runs[name] = Step(lambda n=name: build(n), vocab, batch, length, device, by_layer=by_layer)
        except Exception as error:
            yield {"kind": "training", "contestant": name, "error": described(error)}
        release(device)
        say(f"{name}: {'ready' if name in runs else 'failed'}")
    timed = take_turns({name: lambda r=run: r.time(steps) for name, run in runs.items()}, blocks)
    config = {name: run.model.config for name, run in runs.items()}
    vanilla = timed["vanilla"]["median_s"]
    for name, figures in timed.items():
        cost = forward_flops_per_token(config[name], length, parallel=True)
        plain = forward_flops_per_token(config["vanilla"], length)
        passes = cost.linear / plain.linear
        extra = None if rate is None else 3 * batch * length * (cost.attention - passes * plain.attention) / rate
        row = {
            "kind": "training", "contestant": name, "batch": batch, "length": length, "vocab": vocab, **figures,
            "passes": passes, "extra_attention_s": extra, "time_vs_vanilla": figures["median_s"] / vanilla,
            "time_vs_passes": None if extra is None else figures["median_s"] / (passes * vanilla + extra),
            "time_vs_bare_passes": figures["median_s"] / (passes * vanilla), "peak_bytes": runs[name].peak,
            "peak_vs_vanilla": runs[name].peak / runs["vanilla"].peak if runs[name].peak else None,
        }  # fmt: skip
        say(
            f"{name:28} {row['time_vs_vanilla']:.3f} x vanilla, {row['time_vs_passes'] or 0:.3f} x ({passes:.0f} x "
            f"vanilla + attention), {row['time_vs_bare_passes']:.3f} without; peak {row['peak_vs_vanilla'] or 0:.2f} x"
        )
        yield row
    runs.clear()
    release(device)


def decoding(
    names: list[str], sizes: dict, vocab: int, contexts: tuple[int, ...], batches: tuple[int, ...], device: str,
    blocks: int, new: int, enough: Callable[[], bool],
) -> Iterator[dict]:  # fmt: skip
    """Greedy steps on a filled cache, which is cropped back after each block."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models = {}
    for name in names:
        torch.manual_seed(0)
        models[name] = make_fathom(sizes, vocab, 2 * max(contexts), depth=DECODING[name]).to(device, dtype).eval()
    table = vocab * sizes["hidden_size"]  # a token reads one row of it
    weights = sum(p.numel() for p in models["vanilla"].parameters()) - table

    @torch.no_grad()
    def run(name: str, token: torch.Tensor, cache: DynamicCache) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(new):
            token = models[name](token, past_key_values=cache).logits[:, -1:].argmax(-1)
        synchronize(device)
        seconds = (time.perf_counter() - start) / new
        cache.crop(-new)
        return seconds

    @torch.no_grad()
    def captured(name: str, token: torch.Tensor, cache: DynamicCache) -> Callable[[], float]:
        """The next token's step as a graph, replayed on the same cache."""
        model, result = models[name], []
        for _ in range(3):
            model(token, past_key_values=cache)
            cache.crop(-1)
        held = [
            tuple(vars(layer).values()) for layer in cache.layers
        ]  # what the graph reads; the layers then forget it
        recorded = CudaGraphs().record(
            lambda: result.append(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))
        )

        def replay() -> float:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(new):
                recorded()
            synchronize(device)
            return (time.perf_counter() - start) / new

        replay.keeps = held, result, cache  # type: ignore[attr-defined]
        return replay

    def measure(context: int, batch: int) -> Iterator[dict]:
        ids = torch.randint(0, vocab, (batch, context), device=device)
        caches, held = {}, {}
        for name, model in models.items():
            caches[name] = DynamicCache()
            with torch.no_grad():
                model(ids, past_key_values=caches[name], logits_to_keep=1)
            held[name] = batch * (context + new / 2) * kv_bytes_per_token(model.config, dtype)
        eager = {name: lambda n=name: run(n, ids[:, -1:], caches[n]) for name in models}
        for turn in eager.values():
            turn()
        yield from compared("eager", context, batch, take_turns(eager, blocks), held, 1)
        if device == "cuda":
            graphs = {name: captured(name, ids[:, -1:], caches[name]) for name in models}
            for turn in graphs.values():
                turn()
            yield from compared("graph", context, batch, take_turns(graphs, blocks), held, 3)

    def compared(mode: str, context: int, batch: int, timed: dict, held: dict, times: int) -> Iterator[dict]:
        """`times`: how often a pass moves the cache's bytes."""
        moved = {n: m.depth.slots * (weights * dtype.itemsize + times * held[n]) for n, m in models.items()}
        for name, figures in timed.items():
            ratio = figures["median_s"] / timed["vanilla"]["median_s"]
            by_bytes = moved[name] / moved["vanilla"]
            say(
                f"decode {mode} context {context:5} batch {batch:3} {name:10} {1e3 * figures['median_s']:.2f} ms, "
                f"{ratio:.2f} x vanilla (bytes {by_bytes:.2f} x): {by_bytes / ratio:.2f} of the prediction"
            )
            yield {
                "kind": "decode", "mode": mode, "contestant": name, "context": context, "batch": batch, "new": new,
                **figures, "time_vs_vanilla": ratio, "bytes_vs_vanilla": by_bytes, "speed_vs_bytes": by_bytes / ratio,
                "bytes_per_s": moved[name] / figures["median_s"],
            }  # fmt: skip

    for context in contexts:
        for batch in batches:
            where = {"kind": "decode", "contestant": names[-1], "context": context, "batch": batch}
            if not enough():
                yield {**where, "error": "no time left"}
                continue
            try:
                yield from measure(context, batch)
            except Exception as error:
                yield {**where, "error": described(error)}
            release(device)


def described(error: Exception) -> str:
    say(f"failed: {error!r:.300}")
    return repr(error)[:2000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--compile", choices=("layer", "model"), default="layer")
    parser.add_argument("--minutes", type=float, default=4.5, help="nothing is begun that would end later")
    parser.add_argument("--only", choices=("training", "attention", "decode"), help="run one part")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # lengths × with and without gradients × forms of the bias
    sizes = next(iter(TINY.values())) if args.tiny else SHAPES[args.shape]
    vocab, batch, length = (97, 2, 64) if args.tiny else (50304, args.batch, 1024)
    contexts, batches, new = ((16, 32), (1, 2), 4) if args.tiny else ((256, 1024, 4096), (1, 32), 32)
    blocks, steps, repeats = (2, 2, 2) if args.tiny else (5, 4, 30)
    results: dict[str, Any] = {"environment": environment(device), "compile": args.compile, "rows": []}

    def run(kind: str, part: Callable[..., Iterator[dict]], *arguments: Any, **options: Any) -> None:
        if args.only not in (None, kind) and not (kind == "attention" and args.only == "training"):
            return
        try:
            for row in part(*arguments, **options):
                save(row)
        except Exception as error:
            save({"kind": kind, "contestant": str(arguments[0]), "error": described(error)})
        release(device)

    def save(row: dict) -> None:
        results["rows"].append(row)
        with open(args.out + ".part", "w") as file:
            json.dump(results, file, indent=1)
        os.replace(args.out + ".part", args.out)

    def enough(seconds: float) -> Callable[[], bool]:
        return lambda: time.perf_counter() - STARTED + seconds < 60 * args.minutes

    def train(names: list[str], seconds: float) -> None:
        if not enough(seconds)():
            return save({"kind": "training", "contestant": ", ".join(names), "error": "no time left"})
        rates = [row["flops_per_s"] for row in results["rows"] if row.get("flops_per_s")]
        one_layer = Block.forward
        by_layer = args.compile == "layer"
        if by_layer:
            backend = "aot_eager" if device == "cpu" else "inductor"
            # lengths are fixed here; the compiler would take the second one for the first of many
            Block.forward = torch.compile(one_layer, backend=backend, dynamic=False)  # type: ignore[method-assign]
        try:
            run(
                "training", training, names, sizes, vocab, batch, length, device, blocks, steps, by_layer,
                rates[0] if rates else None, enough(seconds),
            )  # fmt: skip
        finally:
            Block.forward = one_layer  # type: ignore[method-assign]

    def attend(*names: str) -> None:
        if enough(20)():
            run("attention", attention, names, sizes, batch, 2 * length, device, 2 * blocks, repeats)
        else:
            save({"kind": "attention", "contestant": ", ".join(names), "error": "no time left"})

    def decode(name: str) -> None:
        run("decode", decoding, ["vanilla", name], sizes, vocab, contexts, batches, device, blocks, new, enough(15))

    attend("unbiased layout", "key bias, channel", "key bias, ranges")  # two seconds; training needs the rate
    train(MAIN, 40)
    attend("key bias, flex")
    decode("ponderlm2")
    train(["vanilla", "ponderlm3 checkpointed", "pause"], 30)
    train(["vanilla", "ponderlm2 two passes learn", "ponderlm3 checkpointed, flex"], 30)
    decode("ponderlm3")
    say("done")


if __name__ == "__main__":
    main()
