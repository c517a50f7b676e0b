"""Attention of a later step of the adaptive methods: how its tokens are laid out, and what computes it.

    python benchmarks/depth/step_attention.py OUT.json           one GPU, about a minute
    python benchmarks/depth/step_attention.py OUT.json --tiny    CPU: a dry run

The third step of 16 × 1024 tokens (16 / 4 heads of 64, bf16) over the slots of all three, of which each step keeps a
share. "rows": every row by itself, padded; "flat": the tokens of all rows end to end, FlexAttention under a block mask;
"ranges": the same by the kernels of `ops/range_attention`. Milliseconds of a forward pass, and of one with its
backward pass, the best of three; FLOPs of the scores that are seen (4·D each, 14·D with the backward pass), whose rate
says how far from the chip's a form is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import environment, seconds_of, take_turns
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fathom.ops.range_attention import range_attention, serves
from fathom.ops.token_blocks import BLOCK, sees, token_block_mask, token_ranges
from fathom.writing import write_json

NOWHERE = 2**30
TILE = {"BLOCK_M": 64, "BLOCK_N": 64}


def rows(batch: int, length: int) -> tuple[Tensor, list[Tensor], None]:
    token = torch.arange(length, dtype=torch.int32).expand(batch, length)
    return token, [token] * 3, None


def flat(batch: int, length: int, share: float) -> tuple[Tensor, list[Tensor], Tensor]:
    """Numbers of the queries of step 3, of the keys of steps 1 to 3, and of the first token of each query's row."""
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(batch * length, dtype=torch.int32)
    live, keys, query = torch.ones(len(order), dtype=torch.bool), [order[None]], order
    for _ in range(2):
        live &= torch.rand(len(order), generator=generator) < share
        chosen = live.nonzero()[:, 0]
        size = max(2 * BLOCK, -(-len(chosen) // BLOCK) * BLOCK)
        query = order[torch.cat((chosen, chosen[-1:].expand(size - len(chosen))))]
        key = query.clone()
        key[len(chosen) :] = NOWHERE
        keys.append(key[None])
    return query[None], keys, (query // length * length)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    batch, length, heads, groups, width = (16, 1024, 16, 4, 64) if device == "cuda" else (2, 256, 4, 2, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results: dict[str, Any] = {"environment": environment(device), "rows": []}

    def attention(form: str, inputs: tuple) -> tuple[Callable[..., Tensor], list[Tensor], int]:
        query, keys, first = (
            [part.to(device) for part in x] if isinstance(x, list) else x if x is None else x.to(device) for x in inputs
        )
        key, scaling = torch.cat(keys, 1), width**-0.5
        q = torch.randn(len(query), query.shape[1], heads, width, device=device, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(len(key), groups, key.shape[1], width, device=device, dtype=dtype) for _ in range(2))
        seen = sum(
            sees(q_, key, None if first is None else f_).sum().item()
            for q_, f_ in zip(query.split(1024, 1), (query if first is None else first).split(1024, 1), strict=True)
        )
        if form == "ranges":
            ranges = token_ranges(query[0], [part[0] for part in keys], first[0], 4)
            return lambda: range_attention(q, k, v, ranges, scaling), [q, k, v], seen
        mask = token_block_mask(query, key, first)
        attend: Any = torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
        options: Any = TILE if form == "flat" and device == "cuda" else None
        return lambda: attend(q, k, v, None, mask, scaling, True, kernel_options=options), [q, k, v], seen

    layouts = {"rows, 1": ("rows", rows(batch, length))}
    for share in (1.0, 0.9, 0.4, 0.2):
        for form in ("flat", *(["ranges"] if serves(device, width, heads // groups, dtype) else [])):
            layouts[f"{form}, {share:g}"] = form, flat(batch, length, share)
    for name, (form, inputs) in layouts.items():
        torch._dynamo.reset()
        attend, tensors, seen = attention(form, inputs)
        row: dict[str, Any] = {"name": name, "queries": inputs[0].numel(), "scores": seen * heads}

        def forward(attend=attend) -> None:
            with torch.no_grad():
                attend()

        def both(attend=attend, tensors=tensors) -> None:
            out = attend()
            torch.autograd.grad(out, tensors, out)

        try:
            forward(), forward()
            found = take_turns({"forward": lambda f=forward: seconds_of(f, device, 10)}, 3)["forward"]["min_s"]
            row |= {"forward_ms": 1e3 * found, "forward_tflops": 4e-12 * width * row["scores"] / found}
            if device == "cuda":  # FlexAttention has no backward pass on a CPU
                for tensor in tensors:
                    tensor.requires_grad_()
                both(), both()
                found = take_turns({"both": lambda f=both: seconds_of(f, device, 10)}, 3)["both"]["min_s"]
                row |= {"both_ms": 1e3 * found, "both_tflops": 14e-12 * width * row["scores"] / found}
        except Exception as error:  # a form that fails must not cost the others their figures
            row["failed"] = f"{type(error).__name__}: {error}"[-300:]
        results["rows"].append(row)
        write_json(args.out, results)
        print(f"{time.strftime('%X')} {row}", flush=True)


if __name__ == "__main__":
    main()
