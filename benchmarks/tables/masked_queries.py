"""Which kernels of scaled_dot_product_attention make NaN of the gradients of queries that see nothing?

    python benchmarks/tables/masked_queries.py OUT.json

Four rows of padding on the left, of none, 7, 14 and 21 tokens (42 queries that see nothing), and the same without
padding, at several lengths, by each kernel. bf16, nine heads of 64 as SmolLM2-135M has; ten seconds on one GPU. Then
once more within `sound_attention`, as tasks with padding train.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fathom.ops.cudnn_attention import is_faulty, sound_attention

KERNELS = {
    "default": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}  # fmt: skip
LENGTHS = (192, 191, 128, 256, 320, 640, 680)


def not_finite(length: int, padding: int, kernel: Any, device: str) -> dict[str, int]:
    """How many numbers of the output and of each gradient are not finite; the loss reads no padding."""
    torch.manual_seed(0)
    shape = (4, 9, length, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    seen = torch.arange(length, device=device) >= padding * torch.arange(4, device=device)[:, None]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() & seen[:, None, None, :]
    with contextlib.nullcontext() if kernel is None else sdpa_kernel([kernel]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (torch.nan_to_num(out) * seen[:, None, :, None].to(out.dtype)).square().sum().backward()
    found = {"dq": q.grad, "dk": k.grad, "dv": v.grad, "out": out}
    return {f"nan_{name}": int((~torch.isfinite(x)).sum()) for name, x in found.items() if x is not None}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "rows": [],
    }  # fmt: skip
    for length in LENGTHS:
        for padding in (7, 0):
            for name, kernel in KERNELS.items():
                row: dict[str, Any] = {"length": length, "padding": padding, "kernel": name}
                try:
                    row |= not_finite(length, padding, kernel, device)
                except RuntimeError as error:  # a kernel that this machine does not have
                    row["error"] = str(error)[:90]
                found["rows"].append(row)
                print(row, flush=True)
    with sound_attention():
        found["sound_attention"] = {"faulty": is_faulty(), **not_finite(192, 7, None, device)}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
