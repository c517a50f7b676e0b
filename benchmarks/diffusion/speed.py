"""Block caches against no cache at the shapes of LLaDA-8B: random weights, bf16, one process, passes as CUDA graphs.

First whether recorded passes give what passes give. Then by rows and prompt: passes of each kind timed alone, and runs
of `generate` as a user sees them. Where a run takes long it fills some blocks, on a canvas as long as that of the whole
answer, and counts for all of them, which cost alike; making its recordings is in its time. With nb = G / Bk blocks:

    uncached   S full passes;      dual, prefix   nb full + (S − nb) block passes
    sparse     2 nb full (half of them evict) + (S − 2 nb) block passes over [kept; block]

The floor is the time of these passes alone. What a run takes beside them: the head, the policy and the loop.

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
from fathom.decoding import switch
from fathom.decoding.graphs import recorder_for
from fathom.diffusion import Dual, Fourier, Prefix, SparseDLLM
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


def peak(device: torch.device, function: Callable[[], Any]) -> int | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


CACHES: dict[str, Any] = {"sparse": SparseDLLM(), "dual": Dual(), "prefix": Prefix()}


@torch.no_grad()
def passes(model: Any, prompt: int, rows: int, given: Any, device: torch.device, plain: bool) -> dict[str, Any]:
    """Seconds of each kind of pass, and bytes. Passes over a block recorded, and where `plain` kernel by kernel too."""
    length = prompt + given.tokens
    canvas = torch.randint(0, 400, (rows, length), device=device)
    real = torch.ones_like(canvas, dtype=torch.bool)
    middle = prompt + given.tokens // 2 // given.block * given.block
    block = Block(0, middle, middle + given.block, given.block, False)
    hidden = torch.zeros_like(real)
    hidden[:, middle:] = True
    quota = torch.ones(rows, dtype=torch.long, device=device)
    found: dict[str, Any] = {"prompt": prompt, "rows": rows, "length": length}
    whole = Passes(model, real)
    found["full"] = seconds(lambda: whole.full(canvas)[0], device, 1.0)
    found["peak_uncached"] = peak(device, lambda: whole.full(canvas)[0])
    recorder = recorder_for(device)
    for name in given.caches:
        cache = CACHES[name]
        for way in ("block_recorded", "block") if recorder and plain else ("block_recorded" if recorder else "block",):
            state = cache.new_state(Passes(model, real, recorder if way == "block_recorded" else None))
            state.begin(block)

            def build(state: Any = state, delay: int = cache.delay_steps) -> None:
                state.states(canvas, hidden, delay, quota)

            def step(state: Any = state, delay: int = cache.delay_steps) -> Tensor:
                return state.states(canvas, hidden, delay + 1, quota)[0]

            build()
            step(), step()  # one as it is, one recorded
            found[f"{name}_{way}"] = seconds(step, device, 0.3)
            if f"{name}_build" not in found and name != "prefix":
                found[f"{name}_build"] = seconds(build, device, 0.5)
                found[f"peak_{name}"] = peak(device, build)
                found[f"{name}_bytes"] = state.nbytes()
            state.passes.release()
            del state, build, step
    found["floor"] = floor(found, given)
    return found


def floor(found: dict[str, Any], given: Any) -> dict[str, float]:
    """Seconds of all passes of an answer, by cache."""
    blocks, steps, full = given.tokens // given.block, given.tokens, found["full"]
    of_block = {name: found.get(f"{name}_block_recorded", found.get(f"{name}_block")) for name in given.caches}
    times = {"none": steps * full}
    if "sparse" in of_block:
        times["sparse"] = blocks * (full + found["sparse_build"]) + (steps - 2 * blocks) * of_block["sparse"]
    for name in ("dual", "prefix"):  # of prefix, the pass of the middle block
        if name in of_block:
            times[name] = blocks * found.get("dual_build", full) + (steps - blocks) * of_block[name]
    return times


def run(
    model: Any, name: str, alone: dict[str, Any], given: Any, device: torch.device, most: float = 4.0
) -> dict[str, Any]:
    """An answer, of which as many blocks are run as take about `most` seconds."""
    blocks, expected = given.tokens // given.block, alone["floor"][name]
    while blocks % 2 == 0 and blocks > 2 and expected * blocks * given.block / given.tokens > most:
        blocks //= 2
    part = blocks * given.block
    ids = torch.randint(0, 400, (alone["rows"], alone["length"] - part), device=device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    out = model.generate(
        ids, max_new_tokens=part, block_length=given.block, block_cache=CACHES.get(name), return_dict_in_generate=True
    )
    sync()
    took = (time.perf_counter() - start) * given.tokens / part
    return {
        "cache": name, "blocks_run": blocks, "seconds": took, "nfe_run": out.nfe, "over_floor": took / expected,
        "tokens_per_second": given.tokens * alone["rows"] / took,
    }  # fmt: skip


def policies(model: Any, rows: int, given: Any, device: torch.device, turns: int = 3) -> dict[str, Any]:
    """Seconds of a step of FourierSampler and of low_confidence, in turns: one block of 64 in 16 steps, no cache."""
    ways: dict[str, Any] = {"low_confidence": "low_confidence"}
    ways |= {f"fourier_{scope}": Fourier(variance_scope=scope) for scope in ("block", "sequence")}
    ids = torch.randint(0, 400, (rows, given.prompts[0]), device=device)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, policy in ways.items():
            options = {"max_new_tokens": 64, "block_length": 64, "steps": 16, "policy": policy}
            took[name].append(seconds(lambda options=options: model.generate(ids, **options), device, 0.0) / 16)
    step = {name: statistics.median(times) for name, times in took.items()}
    return {
        "rows": rows, "prompt": given.prompts[0], "step": step, "turns": took,
        "over_low_confidence": {name: value / step["low_confidence"] for name, value in step.items()},
    }  # fmt: skip


def exact(model: Any, given: Any, device: torch.device) -> dict[str, Any]:
    """Whether ids, steps and probabilities are those of passes that are not recorded."""
    ids = torch.randint(0, 400, (2, given.prompts[0] // 4), device=device)
    found = {}
    for name in ("none", *given.caches):
        outs = []
        for graphs in (True, False):
            switch.GRAPHS = graphs
            outs.append(model.generate(ids, max_new_tokens=16, block_length=8, temperature=1.0,
                                       block_cache=CACHES.get(name), return_dict_in_generate=True))  # fmt: skip
        switch.GRAPHS = True
        same = [torch.equal(getattr(outs[0], x), getattr(outs[1], x)) for x in ("sequences", "revealed", "confidence")]
        found[name] = {"ids": same[0], "steps": same[1], "probabilities": same[2]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(SHAPES), default="llada-8b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--caches", nargs="+", choices=list(CACHES), default=list(CACHES))
    parser.add_argument("--policies", action="store_true", help="time FourierSampler's step, and nothing else")
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
        "cells": [],
        "about": provenance(), "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "made_after": time.perf_counter() - begun,
    }  # fmt: skip
    late = lambda: time.perf_counter() - begun > given.deadline  # noqa: E731
    if given.policies:
        report["policies"] = []
        for rows in given.rows:
            if not late():
                report["policies"].append(policies(model, rows, given, device))
                write_json(given.output, report)
        return
    report["recorded_equals_plain"] = exact(model, given, device)
    write_json(given.output, report)
    for rows in given.rows:
        for prompt in given.prompts:
            if late():
                break
            first = not report["cells"]
            with sampling_attention(model):
                alone = passes(model, prompt, rows, given, device, first)
            report["cells"].append(alone)
            alone["runs"], uncached = [], alone["floor"]["none"]
            if first:
                alone["uncached"] = run(model, "none", alone, given, device, 5.0)
                uncached = alone["uncached"]["seconds"]
            for name in given.caches:
                if (first or name != "prefix") and not late():
                    alone["runs"].append(run(model, name, alone, given, device))
                    alone["runs"][-1]["times_uncached"] = uncached / alone["runs"][-1]["seconds"]
                    write_json(given.output, report)
            if first:  # what recording brings
                switch.GRAPHS = False
                alone["kernel_by_kernel"] = [
                    run(model, name, alone, given, device, 0.6) for name in given.caches if name != "prefix"
                ]
                switch.GRAPHS = True
            write_json(given.output, report)
    report["seconds"] = time.perf_counter() - begun
    write_json(given.output, report)
    print(json.dumps({"exact": report["recorded_equals_plain"], "seconds": report["seconds"]}))


if __name__ == "__main__":
    main()
