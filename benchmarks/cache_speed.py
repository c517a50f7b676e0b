"""Decode tokens/s and time to first token under every cache, at Llama-3.1-8B shapes with random weights.

    python benchmarks/cache_speed.py OUT.json [--contexts 2048 8192 32768 131072] [--batches 1 8]      one GPU
    python benchmarks/cache_speed.py OUT.json --tiny                                                   CPU, seconds

Two comparisons, never mixed: "graph" (each side one CUDA graph: our fixed-size caches against transformers'
StaticCache) and "eager" (our caches against the full cache in the same harness).
What does not fit the card is recorded as such.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.caches import (
    H2O,
    KIVI,
    TOVA,
    VQKV,
    Codebooks,
    FourierAttention,
    FreqKV,
    Full,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    TreeKV,
    WeightedKV,
    cache_shape,
)
from fathom.caches.record import fingerprint
from fathom.caches.speed import decode_speed, first_token

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--modes", nargs="+", default=["graph", "eager"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument(
        "--ttft", type=int, nargs="*", default=[8192, 32768], help="prompt lengths for time to first token"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    if args.tiny:
        args.contexts, args.batches, args.modes, args.budget, args.ttft, args.repeats = (
            [300],
            [1, 2],
            ["eager"],
            64,
            [300],
            2,
        )
    model = build(TINY if args.tiny else LLAMA_8B, device)
    results: dict[str, Any] = {
        "about": {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": os.environ.get("COMMIT", "unknown"),
            "shapes": "tiny" if args.tiny else "Llama-3.1-8B, random weights, bf16",
            "full": "graph: StaticCache with stock SDPA; eager: the full cache of this library (SDPA, grouped queries)",
        },
        "decode": [],
        "first_token": [],
    }

    def save() -> None:
        temporary = args.output.with_suffix(".part")
        temporary.write_text(json.dumps(results, indent=1))
        os.replace(temporary, args.output)

    def attempt(table: str, name: str, call: Any, **where: Any) -> None:
        try:
            row = {"method": name, **call()}
        except torch.cuda.OutOfMemoryError:
            row = {"method": name, **where, "failed": "does not fit the card"}
        except Exception as error:  # one failure must not lose the table
            row = {"method": name, **where, "failed": f"{type(error).__name__}: {error}"[:300]}
        results[table].append(row)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)
        save()

    m = args.budget
    with tempfile.TemporaryDirectory() as folder:
        small = args.tiny
        fixed: dict[str, Any] = {
            "treekv": TreeKV(budget=m),
            "weightedkv": WeightedKV(budget=m),
            "streaming_llm": StreamingLLM(budget=m),
            "h2o": H2O(budget=m),
            "tova": TOVA(budget=m),
        }
        growing: dict[str, Any] = {
            "full": Full(),
            "snapkv": SnapKV(budget=m),
            "pyramidkv": PyramidKV(budget=m),
            "freqkv": FreqKV(budget=m),
            "kivi2": KIVI(bits=2, **({"group": 16, "residual": 32} if small else {})),
            "fourier_fft": FourierAttention(**({"n_local": 32, "frequencies": 16} if small else {})),
            "fourier_projection": FourierAttention(
                reconstruction="projection", **({"n_local": 32, "frequencies": 16} if small else {})
            ),
            "fourier_dense": FourierAttention(
                attention="dense", **({"n_local": 32, "frequencies": 16} if small else {})
            ),
        }
        if device == "cuda":
            growing["fourier_triton"] = FourierAttention(attention="triton")
        codebooks = random_codebooks(model, folder)
        local = 32 if small else 1024
        growing["vqkv_lut"] = VQKV(codebooks=codebooks, n_local=local)
        growing["vqkv_dense"] = VQKV(codebooks=codebooks, n_local=local, attention="dense")
        wanted = lambda names: {n: x for n, x in names.items() if not args.methods or n in args.methods}  # noqa: E731
        for batch in args.batches:
            for context in args.contexts:
                where = {"context": context, "batch": batch}
                if "graph" in args.modes:
                    for name, method in {"full_static": None, **wanted(fixed)}.items():
                        call = lambda x=method, w=where: decode_speed(model, x, **w, graph=True, repeats=args.repeats)  # noqa: E731
                        attempt("decode", name, call, **where, mode="graph")
                if "eager" in args.modes:
                    for name, method in wanted({**growing, **fixed}).items():
                        call = lambda x=method, w=where: decode_speed(model, x, **w, graph=False, repeats=args.repeats)  # noqa: E731
                        attempt("decode", name, call, **where, mode="eager")
        for context in args.ttft:
            for name, method in wanted({**growing, **fixed}).items():
                if name.startswith("fourier"):
                    continue  # its window is set by the prompt: time it with one chunk in cache_memory.py
                call = lambda x=method, c=context: first_token(model, x, c, 1, repeats=1 if small else 3)  # noqa: E731
                attempt("first_token", name, call, context=context, batch=1)


if __name__ == "__main__":
    main()
