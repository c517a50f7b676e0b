"""Decode tokens/s and time to first token under every cache, at Llama-3.1-8B shapes with random weights.

    python benchmarks/caches/speed.py OUT.json --minutes 5      one GPU
    python benchmarks/caches/speed.py OUT.json --tiny           CPU, seconds

"graph" rows are one CUDA graph a step, "eager" rows are not; compare rows of one mode only. The full cache comes as
`full_static` (transformers' StaticCache), `full_buffer` (preallocated, SDPA over exactly its tokens: the strongest
baseline) and, eager, `full`. A graph row that says `grows` is the device's time for one step of a cache that gets
longer: in use its step is eager, and every 32nd (fourier) or 1024th (vqkv) one also moves tokens, which is not in the
row; `fourier_triton_every` moves one every step. Beside each row: the bytes that a step must read (weights and the
cache's closed form) and the seconds these take at the card's measured copy bandwidth. Rows that targets need come
first.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.caches import KIVI, METHODS, VQKV, Codebooks, FourierAttention, Full, cache_shape
from fathom.caches.record import fingerprint
from fathom.caches.speed import BUFFER, STATIC, decode_speed, first_token, timed

BUDGETED = [name for name, cls in METHODS.items() if hasattr(cls, "budget") and cls.role != "adapter"]
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072 + 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(sizes: dict[str, Any], device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(default)


def random_codebooks(model: LlamaForCausalLM, folder: str) -> str:
    """The paper's sizes (56 × 1024 and 16 × 512) with random entries: speed does not depend on what they hold."""
    shape, device = cache_shape(model), next(model.parameters()).device
    keys, values = ((56, 1024), (16, 512)) if shape.layers > 8 else ((4, 16), (2, 16))

    def tables(stages: int, entries: int) -> tuple[torch.Tensor, ...]:
        size = (1, stages, entries, shape.key_dim)
        return tuple(torch.randn(size, device=device, dtype=model.dtype) / stages**0.5 for _ in range(shape.layers))

    path = f"{folder}/codebooks.safetensors"
    Codebooks(tables(*keys), tables(*values), "layer", "post", "", fingerprint(model)).save(path)
    return path


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy on the device, reads and writes together."""
    source = torch.empty(2**31 if device == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(timed(lambda: target.copy_(source), 10, target.device))


def make_methods(budget: int, tiny: bool, codebooks: str, cuda: bool) -> dict[str, Any]:
    local = {"n_local": 32} if tiny else {}
    # the oldest 32 local tokens become coefficients together; "every" is the paper's one a step
    fourier = {**local, "flush_every": 8 if tiny else 32, **({"frequencies": 16} if tiny else {})}
    methods: dict[str, Any] = {
        "full_buffer": BUFFER,
        "full_static": STATIC,
        "full": Full(),
        **{name: METHODS[name](budget=budget) for name in BUDGETED},  # type: ignore[call-arg]
        "kivi2": KIVI(bits=2, **({"group": 16, "residual": 32} if tiny else {})),
        "fourier_fft": FourierAttention(**fourier),
        "fourier_projection": FourierAttention(reconstruction="projection", **fourier),
        "fourier_dense": FourierAttention(attention="dense", **fourier),
        "vqkv_lut": VQKV(codebooks=codebooks, **local),
        "vqkv_dense": VQKV(codebooks=codebooks, attention="dense", **local),
    }
    if cuda:
        methods["fourier_triton"] = FourierAttention(attention="triton", **fourier)
        methods["fourier_triton_every"] = FourierAttention(attention="triton")
        methods["vqkv_triton"] = VQKV(codebooks=codebooks, attention="triton", **local)
    return methods


Row = tuple[str, str, int, int]  # mode, method, context, batch


def plan(most: int) -> list[Row]:
    """All rows, the targets' first. `most`: rows of the largest batch whose full cache fits at 131,072 tokens."""
    both, evicting = ("full_buffer", "full_static"), ("treekv", "weightedkv")
    coded = ("fourier_triton", "fourier_fft", "fourier_triton_every", "vqkv_triton", "vqkv_lut", "vqkv_dense")
    others = (*(name for name in BUDGETED if name not in evicting), "kivi2")
    graph = [("graph", name, 32768, 8) for name in (*both, *evicting)]
    graph += [("graph", name, 131072, most) for name in (*both, *evicting)]
    graph += [("graph", name, 2048, batch) for batch in (1, 8) for name in (*both, *evicting)]
    graph += [("graph", name, 32768, 8) for name in coded]
    graph += [("graph", name, 32768, 1) for name in (*both, *coded, *evicting)]
    eager = [("eager", name, 32768, 8) for name in ("full", *evicting, *coded)]
    first = [("first token", name, 8192, 1) for name in ("full", *evicting, *others, "fourier_fft", "vqkv_lut")]
    first += [("first token", name, 32768, 1) for name in ("full", "treekv", "streaming_llm", "freqkv", "snapkv")]
    rest = [("graph", name, 32768, 8) for name in (*others, "fourier_projection")]
    rest += [("graph", name, 131072, most) for name in coded[:1] + coded[3:5] + others]
    rest += [("graph", name, 131072, 1) for name in (both[0], *evicting)]
    late = [("first token", name, 131072, 1) for name in ("full", "treekv", "streaming_llm", "freqkv", "snapkv")]
    late += [
        ("first token", name, 32768, 1) for name in ("h2o", "tova", "fourier_fft", "weightedkv", "kivi2", "vqkv_lut")
    ]
    everyone = (*both, *evicting, *coded, *others)
    small = [("graph", name, 8192, batch) for batch in (8, 1) for name in everyone]
    small += [("graph", name, 32768, 1) for name in others]
    large = [("graph", name, 131072, batch) for batch in (1, 8) for name in everyone]  # the full cache fits at 1 only
    prompts = ("full", *evicting, *others, "fourier_fft", "vqkv_lut")
    late += [("first token", name, context, 1) for context in (32768, 131072) for name in prompts]
    late += [("first token", name, context, 8) for context in (8192, 32768) for name in prompts]
    return list(dict.fromkeys(graph + eager + first + rest + small + large + late))


TINY_PLAN = [("eager", name, 300, 2) for name in ("full_buffer", "full_static", "full", "treekv", "weightedkv")]
TINY_PLAN += [("eager", name, 300, 1) for name in ("snapkv", "freqkv", "kivi2", "fourier_fft", "fourier_dense")]
TINY_PLAN += [("eager", name, 300, 1) for name in ("fourier_projection", "vqkv_lut", "vqkv_dense")]
TINY_PLAN += [("first token", name, 300, 1) for name in ("full", "treekv", "fourier_fft", "vqkv_lut", "full_static")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--methods", nargs="+", help="these only")
    parser.add_argument("--done", type=Path, nargs="+", default=[], help="earlier files: their rows are left out")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--gigabytes", type=float, default=75, help="never hold more: sets the batch at 131,072 tokens")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    if args.tiny:
        args.budget, args.repeats = 64, 2
    elif device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gigabytes * 1e9 / total))
    bandwidth = copy_bandwidth(device)
    model = build(TINY if args.tiny else LLAMA_8B, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    row_bytes = Full().cache_bytes(cache_shape(model), 131072)
    most = max(1, int((1e9 * args.gigabytes - weights - 3e9) // row_bytes))
    results: dict[str, Any] = {
        "about": {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": os.environ.get("COMMIT", "unknown"),
            "shapes": "tiny" if args.tiny else "Llama-3.1-8B, random weights, bf16",
            "copy_bytes_per_second": bandwidth,
            "gigabytes": args.gigabytes,
            "largest_batch_at_131072": most,
        },
        "decode": [],
        "first_token": [],
    }

    def save() -> None:
        temporary = args.output.with_suffix(".part")
        temporary.write_text(json.dumps(results, indent=1))
        os.replace(temporary, args.output)

    def measure(mode: str, method: Any, context: int, batch: int) -> dict[str, Any]:
        if mode == "first token":
            if isinstance(method, FourierAttention):  # read in chunks: the window must be known before the prompt
                method = dataclasses.replace(method, window=context)
            long = context > 8192
            return first_token(model, method, context, batch, repeats=1 if long else 2, warm=0 if long else 1)
        row = decode_speed(model, method, context, batch, mode == "graph", args.repeats)
        floor = row["bytes_per_step"] / bandwidth
        return {**row, "floor_seconds": floor, "times_floor": row["seconds_per_step"] / floor}

    earlier = [json.loads(path.read_text()) for path in args.done]
    rows = [row for file in earlier for row in (*file["decode"], *file["first_token"]) if "failed" not in row]
    done = {(row["mode"], row["method"], row["context"], row["batch"]) for row in rows}
    save()
    with tempfile.TemporaryDirectory() as folder:
        methods = make_methods(args.budget, args.tiny, random_codebooks(model, folder), device == "cuda")
        for mode, name, context, batch in TINY_PLAN if args.tiny else plan(most):
            if (args.methods and name not in args.methods) or (mode, name, context, batch) in done:
                continue
            if time.perf_counter() - started > 60 * args.minutes:
                print("time is up", flush=True)
                break
            begun = time.perf_counter()
            row: dict[str, Any] = {"method": name, "mode": mode, "context": context, "batch": batch}
            try:
                row |= measure(mode, methods[name], context, batch)
            except torch.cuda.OutOfMemoryError:
                row["failed"] = "does not fit"
            except Exception as error:  # one failure must not lose the table
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            now = time.perf_counter()
            row |= {"row_seconds": round(now - begun, 1)}
            results["first_token" if mode == "first token" else "decode"].append(row)
            save()
            print(f"{now - started:6.1f} s", json.dumps(row), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
