"""Peak memory of a long prompt read in chunks, compressed between chunks, at Llama-3.1-8B shapes, random weights.

    python benchmarks/caches/memory.py OUT.json --minutes 4 [--prompts 32768 131072] [--chunk 2048]      one GPU
    python benchmarks/caches/memory.py OUT.json --tiny  CPU: bytes of the caches only

For each method: peak minus weights, bytes of the cache at the end (measured and closed form). Token-budgeted methods
and FreqKV should stay flat in the prompt's length; the others may grow no faster than their closed form.
"""

from __future__ import annotations

import argparse
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
from speed import BUDGETED, LLAMA_8B, TINY, build, random_codebooks

from fathom.caches import KIVI, METHODS, VQKV, FourierAttention, Full, cache_shape, compress, prefill
from fathom.caches.versions import CACHE_NAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--gigabytes", type=float, default=75, help="never hold more")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    small, started = args.tiny, time.perf_counter()
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gigabytes * 1e9 / total))
    if small:
        args.prompts, args.chunk, args.budget = [256, 512], 64, 64
    model = build(TINY if small else LLAMA_8B, device)
    with torch.no_grad():  # the first product takes cuBLAS's workspace (32 MiB on an H200), held from then on
        model(torch.ones(1, 2, dtype=torch.long, device=device))
    shape = cache_shape(model)
    results: dict[str, Any] = {
        "about": {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "chunk": args.chunk,
            "shapes": "tiny" if small else "Llama-3.1-8B, random weights, bf16",
        },
        "rows": [],
    }
    m = args.budget
    with tempfile.TemporaryDirectory() as folder:
        codebooks = random_codebooks(model, folder)
        fourier = {"n_local": 32, "frequencies": 16} if small else {}
        methods: dict[str, Any] = {
            "full": lambda _: Full(),
            **{name: lambda _, cls=METHODS[name]: cls(budget=m) for name in BUDGETED},
            "kivi2": lambda _: KIVI(bits=2, **({"group": 16, "residual": 32} if small else {})),
            "fourier_attention": lambda tokens: FourierAttention(window=tokens, **fourier),
            "vqkv": lambda _: VQKV(codebooks=codebooks, n_local=32 if small else 1024),
        }

        # both lengths of a method together: a row of one length alone says nothing
        plan = [(name, n) for name in methods for n in args.prompts]
        for name, tokens in plan:
            if args.methods and name not in args.methods:
                continue
            begun = time.perf_counter()
            if begun - started > 60 * args.minutes:
                print("time is up", flush=True)
                break
            ids = torch.randint(1, 100, (1, tokens), device=device)
            method, cache = methods[name](tokens), None
            row: dict[str, Any] = {"method": name, "prompt": tokens}
            try:
                method.prepare(model, shape)  # codebooks are held once per model: with the weights
                if device == "cuda":
                    weights = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                with compress(model, method):
                    cache = prefill(model, ids, chunk_size=args.chunk)[CACHE_NAME]
                if device == "cuda":
                    row["peak_minus_weights"] = torch.cuda.max_memory_allocated() - weights
                row |= {"cache_bytes": cache.nbytes(), "closed_form": method.cache_bytes(shape, tokens)}
            except torch.cuda.OutOfMemoryError:
                row["failed"] = "does not fit"
            except Exception as error:  # one failure must not lose the table
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            cache = None
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            now = time.perf_counter()
            row["row_seconds"] = round(now - begun, 1)
            results["rows"].append(row)
            temporary = args.output.with_suffix(".part")
            temporary.write_text(json.dumps(results, indent=1))
            os.replace(temporary, args.output)
            print(f"{now - started:6.1f} s", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
