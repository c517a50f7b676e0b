"""Decode tokens/s of every model of a finished comparison, in one process, taking turns: generate(), bf16, greedy.

    python benchmarks/depth/compare_decode.py runs/depth-attention-small --out decode.json

The first seed of each method; dynamic cache, uncompiled, as `generate()` runs by default. Prompts are random tokens,
and a model whose weights were not kept gets random ones: the speed of methods that spend the same on every token does
not depend on either, and rows say which.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from speed import environment, synchronize, take_turns

from fathom import FathomConfig, FathomForCausalLM
from fathom.report.results import Results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="a folder that `fathom compare` wrote")
    parser.add_argument("--out", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models: dict[str, FathomForCausalLM] = {}
    weights: dict[str, str] = {}
    for run in Results.load(args.comparison / "results.json").runs:
        if run.method not in models:
            folder = args.comparison / run.folder / "model"
            weights[run.method] = "trained" if (folder / "model.safetensors").exists() else "random"
            if weights[run.method] == "trained":
                model = FathomForCausalLM.from_pretrained(folder, dtype=dtype)
            else:
                model = FathomForCausalLM(FathomConfig.from_pretrained(folder)).to(dtype)
            models[run.method] = model.to(device).eval()
            models[run.method].generation_config.eos_token_id = None
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        vocab = next(iter(models.values())).config.vocab_size
        tokens = torch.randint(0, vocab, (batch, args.prompt), device=device)
        mask = torch.ones_like(tokens)

        def seconds(model: FathomForCausalLM, tokens=tokens, mask=mask) -> float:
            synchronize(device)
            start = time.perf_counter()
            model.generate(tokens, attention_mask=mask, max_new_tokens=args.new, do_sample=False, pad_token_id=0)
            synchronize(device)
            return time.perf_counter() - start

        for model in models.values():
            seconds(model)  # allocator and kernel selection
        timed = take_turns({name: lambda m=model: seconds(m) for name, model in models.items()}, args.blocks)
        base = timed["vanilla"]["median_s"] if "vanilla" in timed else None
        for name, figures in timed.items():
            row = {
                "method": name, "weights": weights[name], "batch": batch, "prompt": args.prompt, "new": args.new,
                **figures,
                "tokens_per_s": batch * args.new / figures["median_s"],
                "time_vs_vanilla": figures["median_s"] / base if base else None,
            }  # fmt: skip
            rows.append(row)
            print(f"batch {batch:3} {name:28} {row['tokens_per_s']:9.1f} tok/s", flush=True)
    with open(args.out, "w") as file:
        json.dump({"environment": environment(device), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
