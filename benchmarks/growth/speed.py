"""What a mixture's layer and its decoding cost beside dense networks and transformers' own layer, in one process.

    python benchmarks/growth/speed.py -o speed.json                  one GPU, under two minutes
    python benchmarks/growth/speed.py -o speed.json --tiny           CPU, seconds: all lines run, times mean nothing
    python benchmarks/growth/speed.py -o speed.json --only layer layer_compiled

layer       forward and backward of Innovator's layer, fp32 weights under bf16 autocast: 16,384 tokens, H 2048, a shared
            network of 5632 and 64 of 704, 8 active; beside a dense SwiGLU of 11,264 (as many FLOPs), transformers'
            Qwen2-MoE block with grouped products and with its loop. Bars: ≤ 1.40 × dense; never slower than the grouped
            block; ≥ 3 × its loop. `floor_ms`: the matrix products at 989 TFLOP/s, and the bytes of weights and of rows
            that are gathered and scattered at 4.8 TB/s
layer_compiled   the same two, compiled
memory      what a forward of the layer keeps for its backward, and the most of both, beside closed forms. Bar: ≤ 1.10
train       a step of a model of four such layers with AdamW, beside four dense ones of 11,264. Bar: ≤ 1.6 × dense
train_compiled   the same, layers compiled
decode      milliseconds a step of generate(), bf16 weights, four such layers, batch 1 and 32, with transformers' two
            ways to run experts; beside the dense model of 5632. Bar: ≤ 1.30 × the dense step × the bytes touched over
            its own, where E(1 − (1 − k/E)^B) experts are touched by a batch of B
kernels     names of the device's kernels in one forward and backward of the layer, and whether `moe` or transformers
            went expert by expert

Contestants take turns; a figure is the median, with the slowest and fastest tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from fathom import FathomConfig, FathomForCausalLM
from fathom.decoding import loop
from fathom.feed_forward import moe
from fathom.feed_forward.base import NoOptions, TokenFacts
from fathom.feed_forward.dense import Dense
from fathom.models.registry import build_options, lookup
from fathom.report.provenance import provenance
from fathom.train.trainer import compile_layers
from fathom.writing import write_json

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FULL = {"hidden": 2048, "shared": 5632, "experts": 64, "active": 8, "width": 704, "slices": 8, "tokens": 16384}
TINY = {"hidden": 64, "shared": 176, "experts": 8, "active": 2, "width": 88, "slices": 2, "tokens": 64}
VOCABULARY = 32768
FLOPS, BYTES = 989e12, 4.8e12  # of an H200 in a second: bf16 products, and memory


def clock(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            if CUDA:
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if CUDA:
                torch.cuda.synchronize()
            found[name].append(1000 * (time.perf_counter() - start))
    tenths = {name: statistics.quantiles(values, n=10, method="inclusive") for name, values in found.items()}
    return {
        name: {"ms": statistics.median(values), "fastest_tenth": tenths[name][0], "slowest_tenth": tenths[name][-1]}
        for name, values in found.items()
    }


def mixture(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "name": "moe", "experts": sizes["experts"], "active": sizes["active"], "slices": sizes["slices"],
        "width": sizes["width"], "shared": sizes["shared"],
    }  # fmt: skip


def config(sizes: dict[str, int], feed_forward: dict[str, Any], layers: int, width: int | None = None) -> FathomConfig:
    return FathomConfig(
        backbone="llama", vocab_size=VOCABULARY if CUDA else 256, hidden_size=sizes["hidden"], num_hidden_layers=layers,
        intermediate_size=width or sizes["shared"], num_attention_heads=sizes["hidden"] // (128 if CUDA else 32),
        max_position_embeddings=1024, feed_forward=feed_forward,
    )  # fmt: skip


def layer(sizes: dict[str, int]) -> nn.Module:
    whole = config(sizes, mixture(sizes), 1)
    whole._experts_implementation = "grouped_mm"
    return lookup("feed_forward", "moe")(whole, build_options("feed_forward", whole.feed_forward))  # type: ignore[return-value]


def stock_block(sizes: dict[str, int], experts: str) -> nn.Module:
    made = Qwen2MoeConfig(
        hidden_size=sizes["hidden"], num_experts=sizes["experts"], num_experts_per_tok=sizes["active"],
        moe_intermediate_size=sizes["width"], shared_expert_intermediate_size=sizes["shared"], norm_topk_prob=True,
    )  # fmt: skip
    made._experts_implementation = experts
    return Qwen2MoeSparseMoeBlock(made)


def filled(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.02)
    return network.to(DEVICE)


def step_of(network: Any, x: torch.Tensor, parameters: list[nn.Parameter]) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            out = network(x)
        out, said = out if isinstance(out, tuple) else (out, {})
        losses = [value for name, value in said.items() if name.endswith("_loss")]
        torch.autograd.backward([out, *losses], [torch.ones_like(out), *map(torch.ones_like, losses)])
        for parameter in parameters:
            parameter.grad = None
        x.grad = None

    return step


def kernels(sizes: dict[str, int], x: torch.Tensor, network: nn.Module) -> dict[str, Any]:
    """Which kernels run in a forward and backward, and how often anything went expert by expert."""
    counts = {"one_by_one": 0, "grouped_mm": 0}
    ours, grouped = moe.one_by_one, torch.nn.functional.grouped_mm

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*given, **named)

        return run

    step = step_of(network, x, list(network.parameters()))
    step()
    moe.one_by_one = counted("one_by_one", ours)
    torch.nn.functional.grouped_mm = counted("grouped_mm", grouped)  # type: ignore[assignment]
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
    try:
        with torch.profiler.profile(activities=activities) as profile:
            step()
            if CUDA:
                torch.cuda.synchronize()
    finally:
        moe.one_by_one, torch.nn.functional.grouped_mm = ours, grouped
    events = profile.key_averages()
    device = {
        event.key: {"calls": event.count, "ms": round(event.self_device_time_total / 1000, 3)}
        for event in events
        if event.self_device_time_total > 0 and not event.key.startswith("aten::")
    }
    longest = dict(sorted(device.items(), key=lambda item: -item[1]["ms"])[:25])
    fallback = sum(event.count for event in events if "grouped_mm_fallback" in event.key)
    ran = {event.key: event.count for event in events if "grouped_mm" in event.key}
    implementation = network.experts.config._experts_implementation  # type: ignore[union-attr]
    return {
        "implementation": implementation,
        "calls": counts,
        "fallbacks": fallback,
        "operators": ran,
        "kernels": longest,
    }


def floor(sizes: dict[str, int]) -> dict[str, float]:
    """Milliseconds that no layer falls below: its products; its weights read, cast, multiplied with and given gradients
    (18 bytes each); and the rows of all pairs on the wide side, written and read four times."""
    hidden, pairs = sizes["hidden"], sizes["tokens"] * sizes["active"]
    active = 3 * hidden * (sizes["shared"] + sizes["active"] * sizes["width"])
    every = 3 * hidden * (sizes["shared"] + sizes["experts"] * sizes["width"])
    parts = {
        "products": 6 * sizes["tokens"] * active / FLOPS, "weights": 18 * every / BYTES,
        "rows": 4 * 2 * 2 * pairs * hidden / BYTES,
    }  # fmt: skip
    return {name: 1000 * seconds for name, seconds in {**parts, "all": sum(parts.values())}.items()}


def layers(sizes: dict[str, int], x: torch.Tensor, ours: nn.Module, repeats: int, compiled: bool) -> dict[str, Any]:
    """Milliseconds of a forward and backward, of each contestant."""
    wide = sizes["shared"] + sizes["active"] * sizes["width"]
    dense = filled(Dense(config(sizes, {"name": "dense"}, 1, wide), NoOptions(), width=wide))

    def with_statistics(x: torch.Tensor) -> Any:  # as in training
        return ours(x, TokenFacts(None, None))

    contestants: dict[str, Any] = {"moe": ours, "dense": dense, "moe_with_statistics": with_statistics}
    if compiled:
        contestants |= {f"{name}_compiled": torch.compile(network) for name, network in list(contestants.items())}
    else:
        contestants |= {
            "stock_grouped_bf16_weights": filled(stock_block(sizes, "grouped_mm")).to(torch.bfloat16),
            "stock_grouped": filled(stock_block(sizes, "grouped_mm")),
            "stock_loop": filled(stock_block(sizes, "eager")),
        }
    steps: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    for name, network in contestants.items():
        begin = x.detach()[None].to(torch.bfloat16 if "bf16" in name else x.dtype).requires_grad_()
        own = network if isinstance(network, nn.Module) else ours
        steps[name] = step_of(network, begin, list(own.parameters()))
        try:
            steps[name]()
            steps[name]()
        except Exception as error:  # what does not compile is left out, by name
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            del steps[name]
    return {"ms": clock(steps, repeats), "floor_ms": floor(sizes), "failed": failed}


def memory(sizes: dict[str, int], x: torch.Tensor, network: nn.Module) -> dict[str, Any]:
    """Bytes that a forward keeps for its backward, and the most that both hold, above the layer's weights.

    kept     bf16 copies of all weights; the input twice, as the shared network's two products read it; the rows of all
             pairs, and of each five times an expert's width (gate, up, silu, their product, the same times the gate);
             four times the shared width of each token; scores; places
    peak     kept, an fp32 gradient of every weight, and the gradient of the rows
    """
    tokens, hidden, width, shared = (sizes[name] for name in ("tokens", "hidden", "width", "shared"))
    pairs, weights = tokens * sizes["active"], 3 * hidden * (sizes["experts"] * width + shared)
    small = 8 * tokens * sizes["experts"] + 4 * 8 * pairs
    kept = 2 * weights + 4 * tokens * hidden + 2 * pairs * (hidden + 5 * width) + 8 * tokens * shared + small
    closed = {"kept": kept, "peak": kept + 4 * weights + 2 * pairs * hidden}
    largest = 0
    saved: dict[int, int] = {}
    begin = x.detach()[None].requires_grad_()
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own | {begin.untyped_storage().data_ptr()}:
            saved[storage.data_ptr()] = storage.nbytes()
            largest = max(largest, tensor.numel())
        return tensor

    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else 0
    saves = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saves, torch.autocast(DEVICE.type, torch.bfloat16):
        out = network(begin)
    out.backward(torch.ones_like(out))
    found = {"kept": sum(saved.values())}
    if CUDA:
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.max_memory_allocated() - before
    network.zero_grad()
    ratios = {name: value / closed[name] for name, value in found.items()}
    # nothing as large as every token in every expert
    every = tokens * sizes["experts"] * width
    return {"bytes": found, "closed_form": closed, "ratio": ratios, "largest_kept": largest, "every_pair": every}


def train(sizes: dict[str, int], compiled: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of an optimizer step of four layers under AdamW, and what it holds at most."""
    wide = sizes["shared"] + sizes["active"] * sizes["width"]
    length = 1024 if CUDA else 16
    ids = torch.randint(1, 200, (sizes["tokens"] // length, length), device=DEVICE)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, section, width in (("moe", mixture(sizes), sizes["shared"]), ("dense", {"name": "dense"}, wide)):
        with torch.device(DEVICE):
            model = FathomForCausalLM(config(sizes, section, 4, width)).train()
        if name == "moe":
            model.set_experts_implementation("grouped_mm")
        if compiled:
            compile_layers(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if CUDA else 0
        steps[name] = step
        for _ in range(3):
            step()
        number = sum(parameter.numel() for parameter in model.parameters())
        found[name] = {"parameters": number}
        if CUDA:  # weights were there before; gradients and AdamW's two states came
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before + 4 * number
    times = clock(steps, repeats)
    return {
        **{name: {**times[name], **found[name]} for name in steps},
        "ratio": times["moe"]["ms"] / times["dense"]["ms"],
    }


@torch.no_grad()
def decode(sizes: dict[str, int], layers: int, new: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a step of generate(), from a long answer less a short one, so that the prompt does not count."""
    models: dict[str, Any] = {}
    for name, section, width in (
        ("dense", {"name": "dense"}, sizes["shared"]),
        ("dense_equal_flops", {"name": "dense"}, sizes["shared"] + sizes["active"] * sizes["width"]),
        ("moe", mixture(sizes), sizes["shared"]),
    ):
        with torch.device(DEVICE):
            made: Any = FathomForCausalLM(config(sizes, section, layers, width))
        models[name] = made.to(torch.bfloat16).eval()
        if name == "moe":
            made.set_experts_implementation("grouped_mm")
    numbers = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    models["moe_grouped"] = models["moe"]
    found: dict[str, Any] = {}
    usual = loop.experts_for_steps
    for batch in (1, 32):
        prompt = torch.randint(1, 200, (batch, 16), device=DEVICE)
        functions: dict[str, Callable[[], Any]] = {}
        for name, model in models.items():
            for length in (new, new // 4):

                def run(name: str = name, model: Any = model, length: int = length, prompt: Any = prompt) -> None:
                    always = name == "moe_grouped"  # whatever suits so many rows
                    loop.experts_for_steps = (lambda *given: contextlib.nullcontext()) if always else usual
                    model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False)

                run()
                functions[f"{name}/{length}"] = run
        times = clock(functions, repeats)
        loop.experts_for_steps = usual
        row: dict[str, Any] = {
            name: (times[f"{name}/{new}"]["ms"] - times[f"{name}/{new // 4}"]["ms"]) / (new - new // 4)
            for name in models
        }
        touched = sizes["experts"] * (1 - (1 - sizes["active"] / sizes["experts"]) ** batch)
        idle = (sizes["experts"] - touched) * 3 * sizes["hidden"] * sizes["width"] * layers
        read = {"dense": numbers["dense"], "moe": numbers["moe"] - idle}
        found[str(batch)] = {
            "ms_a_step": row,
            "whole_ms": times,
            "parameters_touched": read,
            "bar_ms": 1.30 * row["dense"] * read["moe"] / read["dense"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", help="parts")
    parser.add_argument("--seconds", type=float, default=1e9, help="no part begins after so many")
    given = parser.parse_args()
    begun = time.perf_counter()
    tiny = given.tiny
    sizes = TINY if tiny else FULL
    torch.manual_seed(0)
    x = torch.randn(sizes["tokens"], sizes["hidden"], device=DEVICE, requires_grad=True)
    network = filled(layer(sizes))
    repeats = 3 if tiny else 10
    parts: dict[str, Callable[[], Any]] = {
        "layer": lambda: layers(sizes, x, network, repeats, compiled=False),
        "memory": lambda: memory(sizes, x, network),
        "layer_compiled": lambda: layers(sizes, x, network, repeats, compiled=True),
        "train": lambda: train(sizes, False, repeats),
        "decode": lambda: decode(sizes, 2 if tiny else 4, 8 if tiny else 64, 3),
        "train_compiled": lambda: train(sizes, True, repeats),
        "kernels": lambda: kernels(sizes, x, network),
    }
    results: dict[str, Any] = {"sizes": sizes, **provenance()}
    for name in given.only or parts:
        if time.perf_counter() - begun > given.seconds:
            results[name] = "not begun: no time"
            continue
        try:
            results[name] = parts[name]()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:500]
        results[f"{name}_seconds"] = round(time.perf_counter() - begun, 1)
        write_json(given.output, results)
        if CUDA:
            torch.cuda.empty_cache()
    print({name: value for name, value in results.items() if name != "kernels"})


if __name__ == "__main__":
    main()
