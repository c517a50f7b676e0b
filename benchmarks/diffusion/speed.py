"""Sparse-dLLM and the dual cache against no cache at LLaDA-8B's shapes, random weights, bf16, in one process.

Passes of a kind cost alike, so some of each are timed; runs of `generate` at the shortest prompt say what a step costs
beside its pass. From them, with nb = G / Bk blocks:

    uncached   S full passes;      dual   nb full + (S − nb) block passes
    sparse     2 nb full (half of them evict) + (S − 2 nb) block passes over [kept; block]

python benchmarks/diffusion/speed.py -o speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion import Dual, SparseDLLM
from fathom.diffusion.base import Block
from fathom.diffusion.passes import Passes, sampling_attention
from fathom.report.provenance import provenance
from fathom.writing import write_json

# and the rotary base last
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
SHAPES = {
    "llada-8b": (4096, 12288, 32, 32, 32, 126_464, 500_000.0),
    "dream-7b": (3584, 18944, 28, 28, 4, 152_064, 1e6),
    "tiny": (64, 128, 2, 4, 4, 512, 10_000.0),
}


def seconds(function: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Median time of a call, after one; as many calls as the budget holds, one to seven."""
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 2 or (len(found) < 8 and time.perf_counter() - begun < budget):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def graphed(function: Callable[[], Tensor], device: torch.device) -> Callable[[], None] | None:
    """The same as a CUDA graph; None without a GPU."""
    if device.type != "cuda":
        return None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak(device: torch.device, function: Callable[[], Any]) -> int | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def passes(
    model: Any, prompt: int, rows: int, given: Any, device: torch.device, graphs: bool = False
) -> dict[str, Any]:
    """Seconds of each kind of pass, and bytes. `graphs`: of the block passes as CUDA graphs too."""
    length = prompt + given.tokens
    canvas = torch.randint(0, 400, (rows, length), device=device)
    real = torch.ones_like(canvas, dtype=torch.bool)
    middle = prompt + given.tokens // 2 // given.block * given.block
    block = Block(0, middle, middle + given.block, given.block, False)
    hidden = torch.zeros_like(real)
    hidden[:, middle:] = True
    quota = torch.ones(rows, dtype=torch.long, device=device)
    found: dict[str, Any] = {"prompt": prompt, "rows": rows, "length": length}
    plain = Passes(model, real)
    found["full"] = seconds(lambda: plain.full(canvas)[0], device, 1.5)
    found["peak_uncached"] = peak(device, lambda: plain.full(canvas)[0])
    for name, cache in (("sparse", SparseDLLM()), ("dual", Dual())):
        state = cache.new_state(Passes(model, real))
        state.begin(block)
        delay = cache.delay_steps

        def build(state: Any = state, delay: int = delay) -> None:
            state.begin(block)
            state.states(canvas, hidden, delay, quota)

        found[f"{name}_build"] = seconds(build, device, 1.5)
        found[f"peak_{name}"] = peak(device, build)
        found[f"{name}_bytes"] = state.nbytes()
        step = lambda state=state, delay=delay: state.states(canvas, hidden, delay + 1, quota)[0]  # noqa: E731
        found[f"{name}_block"] = seconds(step, device, 1.0)
        if graphs:
            replay = graphed(step, device)
            found[f"{name}_block_graph"] = None if replay is None else seconds(replay, device, 0.5)
            del replay
        del state, step, build
    return found


def floor(found: dict[str, Any], given: Any, kind: str = "block") -> dict[str, float]:
    """Seconds of all passes of a run, by cache."""
    blocks, steps, full = given.tokens // given.block, given.tokens, found["full"]
    totals = {"none": steps * full}
    if found.get(f"sparse_{kind}") is not None:
        totals["sparse"] = blocks * (full + found["sparse_build"]) + (steps - 2 * blocks) * found[f"sparse_{kind}"]
        totals["dual"] = blocks * found["dual_build"] + (steps - blocks) * found[f"dual_{kind}"]
    return totals


def runs(model: Any, alone: dict[str, Any], given: Any, device: torch.device, late: Callable[[], bool]) -> list[Any]:
    """Whole answers at the shortest prompt, beside the time of their passes alone."""
    found: list[Any] = []
    ids = torch.randint(0, 400, (alone["rows"], given.prompts[0]), device=device)
    for name, cache in (("sparse", SparseDLLM()), ("dual", Dual()), ("none", None)):
        if late():
            break
        options = {"block_length": given.block, "block_cache": cache}
        model.generate(ids, max_new_tokens=given.block, steps=4, **options)
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=given.tokens, return_dict_in_generate=True, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        found.append({
            "cache": name, "prompt": alone["prompt"], "rows": alone["rows"], "seconds": took, "nfe": out.nfe,
            "tokens_per_second": given.tokens * alone["rows"] / took, "passes_alone": floor(alone, given)[name],
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(SHAPES), default="llada-8b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), help="seconds from the start after which nothing begins"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    given = parser.parse_args()
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    *sizes, base = SHAPES[given.shapes]
    shapes: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    config = FathomConfig(
        **shapes, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": base},
        max_position_embeddings=max(given.prompts) + given.tokens, bos_token_id=None, eos_token_id=None,
        diffusion={"name": "masked", "mask_token_id": shapes["vocab_size"] - 1},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        model = FathomForMaskedDiffusion(config).eval()
    torch.set_default_dtype(torch.float32)
    report: dict[str, Any] = {
        "shapes": given.shapes, "tokens": given.tokens, "block": given.block, "keep_ratio": 0.5,
        "passes": [], "runs": [],
        "about": provenance(), "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "made_after": time.perf_counter() - begun,
    }  # fmt: skip
    late = lambda: time.perf_counter() - begun > given.deadline  # noqa: E731
    for rows in given.rows:
        for prompt in given.prompts:
            if late():
                break
            with sampling_attention(model):
                found = passes(model, prompt, rows, given, device)
            totals = floor(found, given)
            found["over_none"] = {name: totals["none"] / value for name, value in totals.items()}
            report["passes"].append(found)
            write_json(given.output, report)
        if rows == given.rows[0]:
            report["runs"] = runs(model, report["passes"][0], given, device, late)
    for found in report["passes"]:  # last: what cannot be captured ends it
        if late():
            break
        with sampling_attention(model):
            graph = passes(model, found["prompt"], found["rows"], given, device, graphs=True)
        found |= {name: value for name, value in graph.items() if name.endswith("_graph")}
        totals = floor(found, given, "block_graph")
        found["over_none_graph"] = {name: totals["none"] / value for name, value in totals.items()}
        write_json(given.output, report)
    report["seconds"] = time.perf_counter() - begun
    write_json(given.output, report)
    print(json.dumps({"runs": report["runs"], "seconds": report["seconds"]}))


if __name__ == "__main__":
    main()
