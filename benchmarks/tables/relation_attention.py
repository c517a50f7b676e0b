"""Time and memory of attention with relations, forward and backward, beside the form with a vector for every pair and
beside plain attention, in one process.

    python benchmarks/tables/relation_attention.py OUT.json            one GPU: B 16, h 12, T 512, d 64, bf16
    python benchmarks/tables/relation_attention.py OUT.json --tiny     CPU

Each row: the median of the repeats in milliseconds, the fastest and slowest, and the peak of memory above the inputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.ops.relation_attention import relation_attention

RELATIONS = 45


def by_pairs(
    query: Tensor, key: Tensor, value: Tensor, relations: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> Tensor:
    """The equations with E_K[R] and E_V[R] in memory, as the official code has them."""
    of_keys, of_values = keys[relations.long()], values[relations.long()]  # [B, T, T, d]
    rows = query.permute(0, 2, 1, 3) @ of_keys.transpose(-2, -1)  # [B, T, h, T]
    scores = query @ key.transpose(-2, -1) + rows.permute(0, 2, 1, 3) + bias
    weights = scores.float().softmax(-1).to(value.dtype)
    return weights @ value + (weights.permute(0, 2, 1, 3) @ of_values).permute(0, 2, 1, 3)


def plain(
    query: Tensor, key: Tensor, value: Tensor, relations: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> Tensor:
    return (query @ key.transpose(-2, -1) + bias).float().softmax(-1).to(value.dtype) @ value


def ours(
    query: Tensor, key: Tensor, value: Tensor, relations: Tensor, keys: Tensor, values: Tensor, bias: Tensor
) -> Tensor:
    return relation_attention(query, key, value, relations, keys, values, bias)[0]


def measure(form: Callable[..., Tensor], inputs: list[Any], repeats: int, cuda: bool) -> dict[str, Any]:
    times = []
    peak = None
    seed = torch.randn_like(inputs[0])
    for number in range(repeats + 3):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        began = time.perf_counter()
        (form(*inputs) * seed).sum().backward()
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
        if number >= 3:
            times.append(1000 * (time.perf_counter() - began))
        for x in inputs:
            x.grad = None
    return {"median_ms": statistics.median(times), "range_ms": [min(times), max(times)], "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    cuda = torch.cuda.is_available() and not args.tiny
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    batch, heads, length, width = (16, 12, 512, 64) if cuda else (2, 3, 64, 16)
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    inputs: list[Any] = [draw(batch, heads, length, width) for _ in range(3)]
    inputs.append(torch.randint(0, RELATIONS + 1, (batch, length, length), device=device).to(torch.uint8))
    inputs += [draw(RELATIONS + 1, width), draw(RELATIONS + 1, width), draw(1, heads, length, length)]
    forms: dict[str, Callable[..., Tensor]] = {"plain": plain, "by_pairs": by_pairs, "ours": ours}
    if cuda:
        forms |= {"ours_compiled": torch.compile(ours), "plain_compiled": torch.compile(plain)}
    with torch.no_grad():
        difference = (ours(*inputs).float() - by_pairs(*inputs).float()).abs().max() / by_pairs(*inputs).abs().max()
    score_bytes = batch * heads * length * length * inputs[0].element_size()
    rows: dict[str, dict[str, Any]] = {}
    found = {
        "about": {
            "device": torch.cuda.get_device_name() if cuda else platform.machine(), "torch": torch.__version__,
            "shape": [batch, heads, length, width], "dtype": str(dtype), "repeats": args.repeats,
        },
        "largest_difference": float(difference), "score_matrix_bytes": score_bytes,
        "histogram_bytes_fp32": 4 * batch * heads * length * (RELATIONS + 1), "rows": rows,
    }  # fmt: skip
    for name, form in forms.items():
        rows[name] = measure(form, inputs, args.repeats, cuda)
        rows[name]["by_pairs_over_it"] = (
            rows["by_pairs"]["median_ms"] / rows[name]["median_ms"] if len(rows) > 1 else None
        )
        args.output.write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
