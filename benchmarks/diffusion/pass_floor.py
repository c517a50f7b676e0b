"""Where a step's pass over a block goes: its matrix products alone, and what each of the other kernels takes.

The pass of Sparse-dLLM over 32 tokens at LLaDA-8B's shapes, one row, recorded; and a recording of its matrix products
alone, of the same weights and shapes. Their difference over the other operations that PyTorch issues is the price of a
small kernel within a graph. The floor by memory is the weights' bytes over --bandwidth.

python benchmarks/diffusion/pass_floor.py -o floor.json          (--shapes tiny: a dry run on a CPU, kernel by kernel)
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from speed import FIELDS, SHAPES, seconds
from torch.utils._python_dispatch import TorchDispatchMode

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.decoding.graphs import recorder_for
from fathom.diffusion import SparseDLLM
from fathom.diffusion.base import Block
from fathom.diffusion.passes import Passes, sampling_attention
from fathom.diffusion.recorded import Recorded
from fathom.report.provenance import provenance
from fathom.writing import write_json


class Operations(TorchDispatchMode):
    """Counts what is issued, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "view" not in str(function):
            self.calls[str(function).split(".")[1]] += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(SHAPES), default="llada-8b")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second, by the GPU's data sheet")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *sizes, base = SHAPES[given.shapes]
    shapes: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    config = FathomConfig(
        **shapes, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": base},
        max_position_embeddings=2 * given.prompt, bos_token_id=None, eos_token_id=None,
        diffusion={"name": "masked", "mask_token_id": shapes["vocab_size"] - 1},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = FathomForMaskedDiffusion(config).eval()
    torch.set_default_dtype(torch.float32)
    length, start = given.prompt + 4 * given.block, given.prompt
    canvas = torch.randint(0, 400, (1, length), device=device)
    real, block = torch.ones_like(canvas, dtype=torch.bool), Block(0, start, start + given.block, given.block, False)
    hidden = torch.zeros_like(real)
    hidden[:, start:] = True
    quota = torch.ones(1, dtype=torch.long, device=device)
    recorder = recorder_for(device)
    with sampling_attention(model):
        state = SparseDLLM().new_state(Passes(model, real, recorder))
        state.begin(block)
        state.states(canvas, hidden, 1, quota)
        state.states(canvas, hidden, 2, quota)  # as it is
        plain = SparseDLLM().new_state(Passes(model, real))
        plain.begin(block)
        plain.states(canvas, hidden, 1, quota)
        with Operations() as issued:
            plain.states(canvas, hidden, 2, quota)
        whole = seconds(lambda: state.states(canvas, hidden, 2, quota), device, 0.5)
        layers = [module.weight for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
        inputs = {
            weight.shape[1]: torch.randn(given.block, weight.shape[1], device=device).to(weight) for weight in layers
        }

        def products(_: torch.Tensor) -> None:
            for weight in layers:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        alone: Any = products if recorder is None else Recorded(recorder, products, canvas)
        alone(canvas), alone(canvas)
        matrices = seconds(lambda: alone(canvas), device, 0.5)
    weights = sum(weight.numel() * weight.element_size() for weight in layers)
    others = sum(count for name, count in issued.calls.items() if name not in ("mm", "addmm", "bmm"))
    found = {
        "shapes": given.shapes, "pass": whole, "products": matrices, "products_issued": len(layers),
        "others_issued": others, "seconds_each_of_the_others": (whole - matrices) / others,
        "floor_by_memory": weights / given.bandwidth, "issued": dict(issued.calls), **provenance(1),
    }  # fmt: skip
    write_json(given.output, found)
    print({name: found[name] for name in ("pass", "products", "products_issued", "others_issued", "floor_by_memory")})


if __name__ == "__main__":
    main()
