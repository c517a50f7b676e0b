"""Wall-clock time of tokens that stop on their own against the same method with all its steps.

    python benchmarks/adaptive_speed.py --out docs/results/adaptive_speed.json       (GPU, bf16; --only chooses parts)
    python benchmarks/adaptive_speed.py --tiny --out /tmp/adaptive.json              (CPU: a dry run of the script)

Every row has the measured mean S of executed slots of at most K + 1, the time relative to the fixed-K model, and that
over S/(K+1): 1 where every slot saved is time saved; the aim is at most 1.10. Routers and gates have random weights and
a threshold found by bisection for each S, so the real decisions are made and timed. Fixed-K and adaptive models share
weights and take turns, block by block; medians with their spread.

Training: adaptive_latent_cot, forward, backward and AdamW; "mixture" and "step" are its `correctness_from` (the heads
of "step" come on top). AdaPonderLM trains densely by definition. Decoding: generate() at batch 1 and 32, where rows
wait for the slowest, and staggered (fathom.models.staggered), where they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fathom.models.staggered import generate_staggered
from speed import environment, free, make_fathom, seconds_of, shape, take_turns

SHAPES = {"1024x24-gqa": shape(1024, 2752, 24, 16, 4), "768x12-mha": shape(768, 2064, 12, 12, 12)}
TINY = {"32x2": shape(32, 64, 2, 4, 2)}
STEPS = 3
COT = {"name": "adaptive_latent_cot", "steps": STEPS, "correctness_from": "mixture", "threshold": 0.5}
ADA = {"name": "adaponderlm", "steps": STEPS, "threshold": 0.5}


class Watched:
    """A model that notes the steps its tokens run."""

    def __init__(self, sizes: dict[str, int], vocab: int, length: int, depth: dict[str, Any], device: str, dtype: Any):
        torch.manual_seed(0)
        self.model = make_fathom(sizes, vocab, length, depth=depth)
        for name, parameter in self.model.depth.named_parameters():
            if name.endswith("weight") and parameter.ndim == 1:  # routers and gates start at 0
                torch.nn.init.normal_(parameter, std=2.0 / parameter.numel() ** 0.5)
            elif name.endswith("bias") and parameter.numel() == 1:
                torch.nn.init.constant_(parameter, 0.5)
        self.model.to(device, dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.passes: list[torch.Tensor] = []
        self.model.depth.register_forward_hook(
            lambda module, arguments, output: self.passes.append(output.trace["passes"].detach())
        )

    def mean(self) -> float:
        """Mean steps of the tokens since the last call."""
        every = torch.cat([passes.flatten() for passes in self.passes])
        self.passes.clear()
        return every.double().mean().item()

    def set_threshold(self, value: float) -> None:
        object.__setattr__(self.model.depth.options, "threshold", value)

    def calibrate(self, tokens: torch.Tensor, mean: float) -> None:
        """The threshold at which these tokens run `mean` steps."""
        low, high = 0.0, 1.0
        with torch.no_grad():
            for _ in range(12):
                self.set_threshold((low + high) / 2)
                self.passes.clear()
                self.model(tokens, use_cache=False, logits_to_keep=1)
                low, high = ((low + high) / 2, high) if self.mean() > mean else (low, (low + high) / 2)


def without_router(depth: dict[str, Any]) -> dict[str, Any]:
    return {"name": depth["name"], "steps": depth["steps"], "halting": "fixed"}


def report(kind: str, depth: dict[str, Any], mean: float, figures: dict, fixed: dict, **facts: Any) -> dict[str, Any]:
    ratio = figures["median_s"] / fixed["median_s"]
    row = {
        "kind": kind, "method": depth["name"], "mean_steps": mean, "most_steps": STEPS + 1, **facts, **figures,
        "fixed_median_s": fixed["median_s"], "time_vs_fixed": ratio, "over_ideal": ratio / (mean / (STEPS + 1)),
    }  # fmt: skip
    extra = " ".join(f"{k}={v}" for k, v in facts.items())
    print(
        f"{kind:9} {depth['name']:20} S={mean:.2f}/{STEPS + 1} {ratio:.3f} x fixed, {row['over_ideal']:.3f} x ideal",
        extra,
        flush=True,
    )
    return row


def prefill(args, sizes, vocab, device, dtype, means, batch, length, blocks) -> list[dict]:
    rows = []
    tokens = torch.randint(0, vocab, (batch, length), device=device)
    for depth in (COT, ADA):
        fixed = Watched(sizes, vocab, length, without_router(depth), device, dtype)
        adaptive = Watched(sizes, vocab, length, depth, device, dtype)
        forward = {"fixed": fixed.model, "adaptive": adaptive.model}
        if args.compile:
            forward = {name: torch.compile(model) for name, model in forward.items()}

        @torch.no_grad()
        def run(name):
            forward[name](tokens, use_cache=True, logits_to_keep=1)  # noqa: B023

        for mean in means:
            adaptive.calibrate(tokens, mean)
            for name in forward:
                run(name), run(name)
            adaptive.passes.clear()
            figures = take_turns({n: lambda n=n: seconds_of(lambda: run(n), device, 3) for n in forward}, blocks)
            facts = {"batch": batch, "length": length, "compile": args.compile}
            rows.append(report("prefill", depth, adaptive.mean(), figures["adaptive"], figures["fixed"], **facts))
        del fixed, adaptive, forward
        free(device)
    return rows


def training(args, sizes, vocab, device, means, batch, length, blocks) -> list[dict]:
    rows = []
    tokens = torch.randint(0, vocab, (batch, length), device=device)
    contestants = {
        "fixed": without_router(COT),
        "mixture": COT,
        "step": {**COT, "correctness_from": "step"},
    }
    for mean in means:
        models, steps = {}, {}
        for name, depth in contestants.items():
            watched = models[name] = Watched(sizes, vocab, length, depth, device, torch.float32)
            watched.model.train()
            optimizer = torch.optim.AdamW(watched.model.parameters(), lr=0.0, fused=True)  # thresholds stay calibrated
            compiled = torch.compile(watched.model) if args.compile else watched.model
            precision = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

            def step(compiled=compiled, optimizer=optimizer, precision=precision):
                with precision:
                    loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            if name != "fixed":
                with precision:
                    watched.calibrate(tokens, mean)
            steps[name] = step
            step(), step()
            watched.passes.clear()
        figures = take_turns({n: lambda s=s: seconds_of(s, device, 2) for n, s in steps.items()}, blocks)
        for name in ("mixture", "step"):
            facts = {"batch": batch, "length": length, "compile": args.compile, "correctness_from": name}
            rows.append(report("training", COT, models[name].mean(), figures[name], figures["fixed"], **facts))
        del models, steps
        free(device)
    return rows


def decoding(args, sizes, vocab, device, dtype, means, batches, prompt, new, blocks) -> list[dict]:
    rows = []
    for depth in (COT, ADA):
        fixed = Watched(sizes, vocab, prompt + new, without_router(depth), device, dtype)
        adaptive = Watched(sizes, vocab, prompt + new, depth, device, dtype)
        for batch in batches:
            tokens = torch.randint(0, vocab, (batch, prompt), device=device)
            mask = torch.ones_like(tokens)

            def generate(watched):
                options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
                return watched.model.generate(tokens, attention_mask=mask, **options)  # noqa: B023

            for mean in means:
                adaptive.calibrate(tokens, mean)
                runs = {
                    "fixed": lambda model=fixed: generate(model),
                    "lockstep": lambda model=adaptive: generate(model),
                    "staggered": lambda model=adaptive.model, ids=tokens: generate_staggered(model, ids, new),
                }
                agree = bool((generate(adaptive)[:, prompt:] == runs["staggered"]()).all())
                generate(fixed)
                adaptive.passes.clear()
                generate(adaptive)
                steps = torch.cat(adaptive.passes[1:], dim=1).double()
                facts = {
                    "batch": batch, "prompt": prompt, "new": new, "staggered_equals_generate": agree,
                    "mean_of_slowest_row": steps.amax(0).mean().item(),
                }  # fmt: skip
                figures = take_turns({n: lambda r=r: seconds_of(r, device, 1) for n, r in runs.items()}, blocks)
                for name in ("lockstep", "staggered"):
                    mean_steps = steps.mean().item()
                    rows.append(
                        report("decode", depth, mean_steps, figures[name], figures["fixed"], schedule=name, **facts)
                    )
        del fixed, adaptive
        free(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file for the figures")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--only", choices=("prefill", "training", "decode"), help="run one part")
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument("--batch", type=int, default=16, help="of prefill and training")
    parser.add_argument("--length", type=int, default=1024, help="of prefill and training")
    parser.add_argument("--compile", action="store_true", help="torch.compile for prefill and training")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    sizes = TINY["32x2"] if args.tiny else SHAPES[args.shape]
    vocab, batch, length = (97, 2, 96) if args.tiny else (50304, args.batch, args.length)
    means, blocks = ((2.5,), 2) if args.tiny else ((1.5, 2.0, 2.5, 3.0, 3.5), 7)
    results: dict[str, Any] = {"environment": environment(device), "shape": args.shape, "rows": []}
    if args.only in (None, "prefill"):
        results["rows"] += prefill(args, sizes, vocab, device, dtype, means, batch, length, blocks)
    if args.only in (None, "training"):
        results["rows"] += training(args, sizes, vocab, device, means[1::2] or means, batch, length, blocks)
    if args.only in (None, "decode"):
        batches, prompt, new = ((1, 3), 16, 8) if args.tiny else ((1, 32), 512, 96)
        results["rows"] += decoding(
            args, sizes, vocab, device, dtype, means[1::2] or means, batches, prompt, new, min(blocks, 5)
        )
    with open(args.out, "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
