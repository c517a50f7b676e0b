"""What RoPE++ costs on one GPU: a compiled training step and a step of `generate()`, beside rotary positions.

    python benchmarks/positions/speed.py OUT.json --rows decode,step      one GPU, about a minute and a half
    python benchmarks/positions/speed.py OUT.json --tiny                  CPU: all lines run, times mean nothing

Decoders of 1024 × 24, 16 query and 4 key/value heads of 64 channels, bf16:

    rotary, EC (equal cache), EH (equal heads), and 2H: rotary with as many heads as EC, of queries of their own

`decode` goes through `generate()` (its measurement is that of benchmarks/decoding/generate.py). `step` is forward,
backward and AdamW with layers compiled, contestants in turn. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "decoding"))
from generate import CUDA, DEVICE, MIDDLE, TINY, bandwidth, floor, free, measure, ours

from fathom.caches import Full, cache_shape
from fathom.train.trainer import compile_layers
from fathom.writing import write_json

ENDS = float(os.environ.get("STOP", "inf"))  # unix seconds: no row begins later


def contestants(sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    fixed = {**sizes, "head_dim": sizes["hidden_size"] // heads}
    half = {"num_attention_heads": heads // 2, "num_key_value_heads": groups // 2}
    return {
        "rotary": fixed,
        "EC": {**fixed, "positions": {"name": "rope_pp"}},
        "2H": {**fixed, "num_attention_heads": 2 * heads},
        "EH": {**fixed, **half, "positions": {"name": "rope_pp"}},
    }


def decode(sizes: dict[str, Any], length: int, batch: int, new: int, copied: float) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "decode", "length": length, "batch": batch}
    for name, fields in contestants({**sizes, "max_position_embeddings": length + new}).items():
        if name == "2H" or time.time() > ENDS - 8:
            continue
        model = ours(fields, torch.bfloat16 if CUDA else torch.float32)
        cache = Full().cache_bytes(cache_shape(model, batch), length, new // 2)
        found = measure(model, "graphs", batch, length, new, None)
        found |= {"cache_bytes": cache, "floor_ms": 1000 * floor(model, cache) / copied}
        row[name] = found
        print(json.dumps({"decode": name, **found}), flush=True)
        del model
        free()
    return row


class Step:
    """A contestant's training step on tokens of its own."""

    def __init__(self, fields: dict[str, Any], batch: int, length: int):
        self.model = ours({**fields, "max_position_embeddings": length}, torch.float32).train()
        compile_layers(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(1, fields["vocab_size"], (batch, length), device=DEVICE)

    def __call__(self) -> float:
        """Seconds of one step."""
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - began


def step(sizes: dict[str, Any], length: int, batch: int, turns: int) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "step", "length": length, "batch": batch}
    runs: dict[str, Step] = {}
    for name, fields in contestants(sizes).items():
        if len(runs) > 1 and time.time() > ENDS - 15:
            break
        began = time.perf_counter()
        runs[name] = Step(fields, batch, length)
        for _ in range(3):
            runs[name]()
        print(name, length, "ready in", round(time.perf_counter() - began, 1), "s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(1000 * run())
    for name, values in times.items():
        row[name] = {"median_ms": statistics.median(values), "min_ms": min(values), "max_ms": max(values)}
        row[name]["parameters"] = sum(p.numel() for p in runs[name].model.parameters())
    for over, under in (("EC", "2H"), ("EC", "rotary"), ("EH", "rotary")):
        if over in times and under in times:
            ratios = [a / b for a, b in zip(times[over], times[under])]
            row[f"{over} / {under}"] = [min(ratios), statistics.median(ratios), max(ratios)]
    print(json.dumps(row), flush=True)
    runs.clear()
    free()
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", default="decode,step")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.automatic_dynamic_shapes = False  # one length, one graph
    torch._dynamo.config.recompile_limit = 64
    sizes = TINY if args.tiny else MIDDLE
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__, "sizes": sizes,
        "rows": [],
    }  # fmt: skip
    jobs: list[Any] = []
    for kind in args.rows.split(","):
        if kind == "decode":
            copied = bandwidth()
            result["copy_bytes_s"] = copied
            jobs.append(lambda c=copied: decode(sizes, *((64, 2, 8) if args.tiny else (32768 - 64, 8, 64)), c))
        else:
            for length, batch in ((32, 2), (64, 1)) if args.tiny else ((2048, 8), (8192, 2)):
                jobs.append(lambda n=length, b=batch: step(sizes, n, b, 2 if args.tiny else 8))
    for job in jobs:
        if time.time() > ENDS - 15:
            print("out of time", flush=True)
            break
        result["rows"].append(job())
        write_json(args.output, result)


if __name__ == "__main__":
    main()
