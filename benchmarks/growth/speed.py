"""What a mixture's layer and its decoding cost beside dense networks and transformers' own layer, in one process.

    python benchmarks/growth/speed.py -o speed.json                  one GPU, about a minute
    python benchmarks/growth/speed.py -o speed.json --tiny           CPU, seconds: all lines run, times mean nothing
    python benchmarks/growth/speed.py -o kernels.json --only kernels

kernels     names of the device's kernels in one forward and backward of the layer, and whether `moe` or transformers
            went expert by expert
layer       forward and backward of Innovator's layer, fp32 weights under bf16 autocast: 16,384 tokens, H 2048, a shared
            network of 5632 and 64 of 704, 8 active; beside a dense SwiGLU of 11,264 (as many FLOPs), transformers'
            Qwen2-MoE block with grouped products and with its loop. Bars: ≤ 1.40 × dense; never slower than the grouped
            block; ≥ 3 × its loop
decode      milliseconds a step of generate(), bf16 weights, four such layers, batch 1 and 32, with transformers' two
            ways to run experts; beside the dense model of 5632. Bar: ≤ 1.30 × the dense step × the bytes touched over
            its own, where E(1 − (1 − k/E)^B) experts are touched by a batch of B

Contestants take turns; a figure is the median, with the slowest and fastest tenth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2MoeConfig
from transformers.integrations import moe as stock_experts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from fathom import FathomConfig, FathomForCausalLM
from fathom.feed_forward import moe
from fathom.feed_forward.base import NoOptions, TokenFacts
from fathom.feed_forward.dense import Dense
from fathom.models.registry import build_options, lookup
from fathom.report.provenance import provenance
from fathom.writing import write_json

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FULL = {"hidden": 2048, "shared": 5632, "experts": 64, "active": 8, "width": 704, "slices": 8, "tokens": 16384}
TINY = {"hidden": 64, "shared": 176, "experts": 8, "active": 2, "width": 88, "slices": 2, "tokens": 64}
VOCABULARY = 32768


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


def layers(sizes: dict[str, int], x: torch.Tensor, ours: nn.Module, repeats: int, compiled: bool) -> dict[str, Any]:
    """Milliseconds of a forward and backward, of each contestant."""
    wide = sizes["shared"] + sizes["active"] * sizes["width"]
    dense = filled(Dense(config(sizes, {"name": "dense"}, 1, wide), NoOptions(), width=wide))
    contestants: dict[str, Any] = {"moe": ours, "dense": dense}
    if compiled:
        contestants |= {f"{name}_compiled": torch.compile(network) for name, network in list(contestants.items())}
    else:
        contestants |= {
            "moe_with_statistics": lambda x: ours(x, TokenFacts(None, None)),  # as in training
            "stock_grouped": filled(stock_block(sizes, "grouped_mm")),
            "stock_grouped_bf16_weights": filled(stock_block(sizes, "grouped_mm")).to(torch.bfloat16),
            "stock_loop": filled(stock_block(sizes, "eager")),
            "stock_loop_bf16_weights": filled(stock_block(sizes, "eager")).to(torch.bfloat16),
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
    return {"ms": clock(steps, repeats), "failed": failed}


@torch.no_grad()
def decode(sizes: dict[str, int], layers: int, new: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a step of generate(), from a long answer less a short one, so that the prompt does not count."""
    stock_experts.ALL_EXPERTS_FUNCTIONS["always_grouped"] = stock_experts.grouped_mm_experts_forward
    models: dict[str, Any] = {}
    for name, section, width, experts in (
        ("dense", {"name": "dense"}, sizes["shared"], None),
        ("dense_equal_flops", {"name": "dense"}, sizes["shared"] + sizes["active"] * sizes["width"], None),
        ("moe", mixture(sizes), sizes["shared"], "grouped_mm"),  # for which transformers puts batched_mm in decoding
        ("moe_always_grouped", mixture(sizes), sizes["shared"], "always_grouped"),
    ):
        torch.manual_seed(0)
        made: Any = FathomForCausalLM(config(sizes, section, layers, width))
        models[name] = made.to(DEVICE, torch.bfloat16).eval()
        if experts:
            models[name].set_experts_implementation(experts)
    numbers = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    found: dict[str, Any] = {}
    for batch in (1, 32):
        prompt = torch.randint(1, 200, (batch, 16), device=DEVICE)
        functions: dict[str, Callable[[], Any]] = {}
        for name, model in models.items():
            for length in (new, new // 4):

                def run(model: Any = model, length: int = length, prompt: torch.Tensor = prompt) -> None:
                    model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False)

                run()
                functions[f"{name}/{length}"] = run
        times = clock(functions, repeats)
        row: dict[str, Any] = {
            name: (times[f"{name}/{new}"]["ms"] - times[f"{name}/{new // 4}"]["ms"]) / (new - new // 4)
            for name in models
        }
        touched = sizes["experts"] * (1 - (1 - sizes["active"] / sizes["experts"]) ** batch)
        idle = (sizes["experts"] - touched) * 3 * sizes["hidden"] * sizes["width"] * layers
        read = {"dense": numbers["dense"], "moe": numbers["moe"] - idle}
        found[str(batch)] = {
            "ms_a_step": row,
            "parameters_touched": read,
            "bar_ms": 1.30 * row["dense"] * read["moe"] / read["dense"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=["kernels"])
    parser.add_argument("--seconds", type=float, default=1e9, help="no part begins after so many")
    given = parser.parse_args()
    begun = time.perf_counter()
    sizes = TINY if given.tiny else FULL
    torch.manual_seed(0)
    x = torch.randn(sizes["tokens"], sizes["hidden"], device=DEVICE, requires_grad=True)
    network = filled(layer(sizes))
    parts: dict[str, Callable[[], Any]] = {"kernels": lambda: kernels(sizes, x, network)}
    if given.only is None:
        parts |= {
            "layer": lambda: layers(sizes, x, network, 3 if given.tiny else 10, compiled=False),
            "decode": lambda: decode(sizes, 2 if given.tiny else 4, 8 if given.tiny else 64, 3),
            "layer_compiled": lambda: layers(sizes, x, network, 3 if given.tiny else 10, compiled=True),
        }
    results: dict[str, Any] = {"sizes": sizes, **provenance()}
    for name, part in parts.items():
        if time.perf_counter() - begun > given.seconds:
            results[name] = "not begun: no time"
            continue
        try:
            results[name] = part()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:500]
        results[f"{name}_seconds"] = round(time.perf_counter() - begun, 1)
        write_json(given.output, results)
    print({name: value for name, value in results.items() if name != "kernels"})


if __name__ == "__main__":
    main()
