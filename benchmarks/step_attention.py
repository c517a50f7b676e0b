"""Attention of a later step of the adaptive methods: how its tokens are laid out, its mask, and the kernel's tiles.

    python benchmarks/step_attention.py OUT.json           one GPU, about a minute
    python benchmarks/step_attention.py OUT.json --tiny    CPU: a dry run

The third step of 16 × 1024 tokens (16 / 4 heads of 64, bf16) over the slots of all three. "rows": every row by itself,
padded; "flat": the tokens of all rows end to end, of which each step keeps a share. Cut blocks are
those in which FlexAttention computes the mask, full ones need none. µs of a forward pass, the best of three.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fathom.ops.token_blocks import BLOCK, token_block_mask
from fathom.train.atomic import write_json
from speed import environment, synchronize

NOWHERE = 2**30
TILES = {"tiles 64 × 64": (64, 64), "tiles 128 × 64": (128, 64), "tiles 64 × 32": (64, 32)}


def rows(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, None]:
    token = torch.arange(length, dtype=torch.int32).expand(batch, length)
    return token, token.repeat(1, 3), None


def flat(batch: int, length: int, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of the queries and keys of step 3, and of the first token of each query's row."""
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(batch * length, dtype=torch.int32)
    live, keys, query = torch.ones(len(order), dtype=torch.bool), [order], order
    for _ in range(2):
        live &= torch.rand(len(order), generator=generator) < share
        chosen = live.nonzero()[:, 0]
        size = max(2 * BLOCK, -(-len(chosen) // BLOCK) * BLOCK)
        query = order[torch.cat((chosen, chosen[-1:].expand(size - len(chosen))))]
        key = query.clone()
        key[len(chosen) :] = NOWHERE
        keys.append(key)
    return query[None], torch.cat(keys)[None], (query // length * length)[None]


def one_comparison(mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> BlockMask:
    """Not the mask of `flat`, where blocks hold two rows: it says what the second comparison costs."""
    return BlockMask(
        mask.seq_lengths, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        None, None, None, None, mask.BLOCK_SIZE, lambda b, h, q, s: key[b, s] <= query[b, q],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    batch, length, heads, groups, width = (16, 1024, 16, 4, 64) if device == "cuda" else (2, 256, 4, 2, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results: dict[str, Any] = {"environment": environment(device), "rows": []}

    def measure(name: str, inputs: tuple, single: bool = False, tiles: Any = None, dynamic: bool = False) -> None:
        query, key, first = (x if x is None else x.to(device) for x in inputs)
        with torch.no_grad():
            mask = token_block_mask(query, key, first)
            mask = one_comparison(mask, query, key) if single else mask
            q = torch.randn(len(query), query.shape[1], heads, width, device=device, dtype=dtype).transpose(1, 2)
            k, v = (torch.randn(len(key), groups, key.shape[1], width, device=device, dtype=dtype) for _ in range(2))
            torch._dynamo.reset()
            attend = torch.compile(flex_attention, dynamic=dynamic) if device == "cuda" else flex_attention
            options: Any = None if tiles is None else {"BLOCK_M": tiles[0], "BLOCK_N": tiles[1]}

            def seconds(times: int) -> float:
                synchronize(device)
                start = time.perf_counter()
                for _ in range(times):
                    attend(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
                synchronize(device)
                return (time.perf_counter() - start) / times

            row: dict[str, Any] = {"name": name, "dynamic": dynamic, "queries": query.numel()}
            try:
                seconds(2)
                row["microseconds"] = 1e6 * min(seconds(10 if device == "cuda" else 1) for _ in range(3))
            except Exception as error:  # a tile that the kernel cannot have must not cost the others their figures
                row["failed"] = f"{type(error).__name__}: {error}"[-300:]
        row |= {"cut": mask.kv_num_blocks.sum().item(), "full": mask.full_kv_num_blocks.sum().item()}
        results["rows"].append(row)
        write_json(args.out, results)
        print(row, flush=True)

    for dynamic in (False, True):
        measure("rows, all tokens", rows(batch, length), dynamic=dynamic)
        for share in (1.0, 0.9, 0.4):
            inputs = flat(batch, length, share)
            measure(f"flat, {share:g}", inputs, dynamic=dynamic)
            measure(f"flat, {share:g}, one comparison", inputs, single=True, dynamic=dynamic)
            for name, tiles in TILES.items():
                measure(f"flat, {share:g}, {name}", inputs, tiles=tiles, dynamic=dynamic)


if __name__ == "__main__":
    main()
