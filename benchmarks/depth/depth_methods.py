"""Overhead of the cross-layer methods over vanilla: compiled training step, and decoding under CUDA graphs.

    python benchmarks/depth/depth_methods.py --shape 1024x24-gqa --out docs/results/depth_methods_gqa.json
    python benchmarks/depth/depth_methods.py --tiny --out /tmp/depth.json           (CPU, a dry run of the script)

All contestants of a shape are timed in one process, taking turns. Before that, `--warm 3` compiles three at a time
in processes of their own, so that the timing process finds the kernels in the compiler's cache. Beside each
Depth-Attention row stands its floor: the bytes that the mix must move (source reads, mixed-value write, source-gradient
writes) over the measured copy bandwidth, as a share of the vanilla step.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from speed import SHAPES as SPEED_SHAPES
from speed import TINY, TrainingStep, environment, free, make_fathom, shape, synchronize, take_turns, write_profile

from fathom.mixers.depth_attention import source_table
from fathom.models.registry import build_options

SHAPES = {**SPEED_SHAPES, "512x12-gqa": shape(512, 1408, 12, 8, 2)}  # the last of recipes/depth_attention_small.yaml
TRITON = "depth_attention, Triton"
CONTESTANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "depth_attention": {"mixer": {"name": "depth_attention"}},
    "depth_attention all": {"mixer": {"name": "depth_attention", "source_schedule": "all"}},
    TRITON: {"mixer": {"name": "depth_attention"}},
    "depth_attention uniform": {"mixer": {"name": "depth_attention", "mix_rule": "uniform"}},
    "depth_attention first": {"mixer": {"name": "depth_attention", "source_schedule": "first_only"}},
    "resformer": {"mixer": {"name": "resformer"}},
    "denseformer": {"residual": {"name": "denseformer"}},
    "attnres": {"residual": {"name": "attnres"}},
    "mhc": {"residual": {"name": "mhc"}},
}


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    size = 2**30 if device == "cuda" else 2**24
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    synchronize(device)
    return 20 * size / (time.perf_counter() - start)


def mix_bytes_per_token(sections: dict[str, Any], sizes: dict[str, int], vocab: int) -> int:
    """bf16 bytes that Depth-Attention must move per token in a training step.

    Forward: read k and v of every source, write the mixed value. Backward: read them again, read the gradient of the
    mixed value, write the gradients of k and v of every source. Everything else rides on tensors that the layer moves
    anyway.
    """
    config = make_fathom_config(sizes, vocab, sections)
    table = source_table(build_options("mixer", config.mixer), config.num_hidden_layers, 1)
    width = config.num_key_value_heads * config.head_dim
    sources = sum(map(len, table))
    mixing = sum(1 for layer in table if layer)
    return 2 * width * (2 * sources + mixing + 2 * sources + mixing + 2 * sources)


def make_fathom_config(sizes: dict[str, int], vocab: int, sections: dict[str, Any]):
    with torch.device("meta"):
        return make_fathom(sizes, vocab, 2048, **sections).config


def builder(name: str, sizes: dict[str, int], vocab: int, length: int) -> Callable[[], torch.nn.Module]:
    if name != TRITON:
        return lambda: make_fathom(sizes, vocab, length, **CONTESTANTS[name])
    import depth_mix_triton

    error = depth_mix_triton.check("cuda")
    print(f"  {name}: {error:.1e} from the reference", flush=True)
    assert error < 1e-5
    return lambda: depth_mix_triton.use(make_fathom(sizes, vocab, length, **CONTESTANTS[name]))


def training(
    names: list[str], shape: str, sizes: dict, vocab: int, batch: int, length: int, device: str, blocks: int,
    steps: int, profile: str | None,
) -> list[dict[str, Any]]:  # fmt: skip
    bandwidth = copy_bandwidth(device)
    runs, rows = {}, []
    for name in names:
        start = time.perf_counter()
        try:
            runs[name] = TrainingStep(builder(name, sizes, vocab, length), vocab, batch, length, device)
        except Exception as error:  # one contestant must not cost the others their figures
            rows.append({"kind": "training", "shape": shape, "contestant": name, "failed": repr(error)[:300]})
            print(f"  {shape} {name}: {rows[-1]['failed']}", flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            continue
        print(f"  {shape} {name}: ready in {time.perf_counter() - start:.0f} s", flush=True)
    timed = take_turns({name: lambda r=run: r.time(steps) for name, run in runs.items()}, blocks)
    for name, run in runs.items() if profile else ():
        write_profile(lambda run=run: run(2), device, f"{profile}-{name.replace(', ', '-').replace(' ', '-')}.txt")
    for name, figures in timed.items():
        row = {
            "kind": "training", "shape": shape, "contestant": name, "batch": batch, "length": length, "vocab": vocab,
            **figures, "time_vs_vanilla": figures["median_s"] / timed["vanilla"]["median_s"],
            "tokens_per_s": batch * length / figures["median_s"], "peak_bytes": runs[name].peak,
            "peak_vs_vanilla": runs[name].peak / runs["vanilla"].peak if runs[name].peak else None,
            "copy_bytes_per_s": bandwidth,
        }  # fmt: skip
        sections = CONTESTANTS[name]
        if sections.get("mixer", {}).get("name") == "depth_attention":
            floor = mix_bytes_per_token(sections, sizes, vocab) * batch * length / bandwidth
            row["floor_share"] = floor / timed["vanilla"]["median_s"]
            row["overhead_over_floor"] = (row["time_vs_vanilla"] - 1) / row["floor_share"]
        rows.append(row)
        print(
            f"{shape:12} {name:22} {row['time_vs_vanilla']:.4f} x vanilla  (floor 1+{row.get('floor_share', 0):.4f})  "
            f"peak {row['peak_vs_vanilla'] or 0:.3f} x  {row['tokens_per_s']:.0f} tok/s",
            flush=True,
        )
    runs.clear()
    free(device)
    return rows


def decoding(
    names: list[str], shape: str, sizes: dict, vocab: int, batch: int, device: str, blocks: int, new: int
) -> list[dict[str, Any]]:
    """Seconds per token of generate() with a static cache: compiled, under CUDA graphs (transformers' own path).

    Two lengths are timed and subtracted, which takes the prompt out.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = torch.randint(0, vocab, (batch, 128 if device == "cuda" else 8), device=device)
    mask = torch.ones_like(tokens)
    room = tokens.shape[1] + 3 * new
    options = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static", "attention_mask": mask}

    def run(model, count) -> float:
        synchronize(device)
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, **options)
        synchronize(device)
        return time.perf_counter() - start

    models, rows = {}, []
    for name in names:
        torch.manual_seed(0)
        model = make_fathom(sizes, vocab, 2048, **CONTESTANTS[name]).to(device, dtype).eval()
        model.generation_config.eos_token_id = None
        start = time.perf_counter()
        for _ in range(2):  # the long one first: the short one then runs in its cache, without a new graph
            run(model, 3 * new), run(model, new)
        print(f"  decode batch {batch} {name}: ready in {time.perf_counter() - start:.0f} s (room {room})", flush=True)
        models[name] = model
    timed = take_turns(
        {name: lambda m=m: (run(m, 3 * new) - run(m, new)) / (2 * new) for name, m in models.items()}, blocks
    )
    for name, figures in timed.items():
        row = {
            "kind": "decode", "shape": shape, "contestant": name, "batch": batch, "new": new, **figures,
            "time_vs_vanilla": figures["median_s"] / timed["vanilla"]["median_s"],
        }  # fmt: skip
        rows.append(row)
        print(
            f"{shape:12} decode batch {batch:3} {name:20} {row['time_vs_vanilla']:.4f} x vanilla, "
            f"{1e3 * figures['median_s']:.3f} ms a token",
            flush=True,
        )
    models.clear()
    free(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        help=f"vanilla first; default: all but {TRITON!r} (needs a GPU)",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm", type=int, default=0, help="compile this many contestants at a time beforehand")
    parser.add_argument("--compile-only", help="(used by --warm) one contestant: compile it and leave")
    parser.add_argument("--only", choices=("training", "decode"), help="run one part")
    parser.add_argument("--profile", help="write the kernels of a step of each contestant to PROFILE-NAME.txt")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a training step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--vocab", type=int, default=50304)
    args = parser.parse_args()
    args.contestants = args.contestants or [name for name in CONTESTANTS if name != TRITON]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    name, sizes = next(iter(TINY.items())) if args.tiny else (args.shape, SHAPES[args.shape])
    vocab, batch, length = (97, 2, 64) if args.tiny else (args.vocab, args.batch, args.length)
    if args.compile_only:
        TrainingStep(builder(args.compile_only, sizes, vocab, length), vocab, batch, length, device)
        return
    if args.warm:
        waiting, running = list(args.contestants), []
        start = time.perf_counter()
        while waiting or running:
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < args.warm:
                running.append(subprocess.Popen([sys.executable, *sys.argv, "--compile-only", waiting.pop(0)]))
            time.sleep(0.5)
        print(f"compiled all in {time.perf_counter() - start:.0f} s", flush=True)
    results: dict[str, Any] = {"environment": environment(device), "rows": []}
    if args.only != "decode":
        blocks, steps = (2, 2) if args.tiny else (9, 8)
        sections = (args.contestants, name, sizes, vocab, batch, length, device, blocks, steps, args.profile)
        results["rows"] += training(*sections)
        write(args.out, results)
    if args.only != "training":
        blocks, new = (2, 4) if args.tiny else (7, 128)
        for size in (1, 32):
            names = [contestant for contestant in args.contestants if contestant != TRITON]  # for training only
            results["rows"] += decoding(names, name, sizes, vocab, size, device, blocks, new)
            write(args.out, results)


def write(path: str, results: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
