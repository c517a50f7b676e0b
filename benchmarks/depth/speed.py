"""Speed of the decoder against transformers' Llama: compiled training step and generate(), on the same shapes.

    python benchmarks/depth/speed.py --out docs/results/speed_h100.json           (GPU, bf16, about 9 minutes)
    python benchmarks/depth/speed.py --tiny --out /tmp/speed.json  (CPU, seconds: a dry run of the script)

Ratios come from one process: the contestants take turns, block by block, and the median of the blocks is reported with
its spread (minimum and maximum). Both sides hold fp32 master weights and run under bf16 autocast with fused AdamW, as
`Trainer(bf16=True)` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import fathom
from fathom import FathomConfig, FathomForCausalLM


def shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES = {"768x12-mha": shape(768, 2064, 12, 12, 12), "1024x24-gqa": shape(1024, 2752, 24, 16, 4)}
TINY = {"32x2": shape(32, 64, 2, 4, 2)}


def make_fathom(sizes: dict[str, int], vocab: int, length: int, **sections: Any) -> FathomForCausalLM:
    return FathomForCausalLM(
        FathomConfig(vocab_size=vocab, max_position_embeddings=length, init="hf", **sizes, **sections)
    )


def make_llama(sizes: dict[str, int], vocab: int, length: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=length, rms_norm_eps=1e-5, **sizes))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds of one call, the mean of `repeats` in a row, the device waited for."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


class TrainingStep:
    """One optimiser step of a compiled model on fixed random tokens."""

    def __init__(self, build: Callable[[], torch.nn.Module], vocab: int, batch: int, length: int, device: str):
        torch.manual_seed(0)
        self.device = device
        others = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.tokens = torch.randint(0, vocab, (batch, length), device=device)
        self.model = build().to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.compiled = torch.compile(self.model)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self(3)
        synchronize(device)
        # of this contestant alone: weights, gradients, optimiser state and activations of its first steps
        self.peak = torch.cuda.max_memory_allocated() - others if device == "cuda" else None

    def __call__(self, steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.compiled(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def time(self, steps: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self(steps)
        synchronize(self.device)
        return (time.perf_counter() - start) / steps


def take_turns(contestants: dict[str, Callable[[], float]], blocks: int) -> dict[str, dict[str, Any]]:
    """Every contestant's time per block, in turn; median, minimum and maximum of each, and every block.

    Contestants of one turn share the state of the machine: the spread of their ratios says how sure a ratio is.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(blocks):
        for name, run in contestants.items():
            times[name].append(run())
    return {
        name: {"median_s": statistics.median(ts), "min_s": min(ts), "max_s": max(ts), "blocks": len(ts), "turns_s": ts}
        for name, ts in times.items()
    }


def write_profile(run: Callable[[], Any], device: str, path: str) -> None:
    """What a call spends its time on: kernels by their time on the device, then operators by the CPU's."""
    with torch.profiler.profile() as profile:
        run()
        synchronize(device)
    with open(path, "w") as file:
        for by in ("self_device_time_total", "self_cpu_time_total"):
            file.write(profile.key_averages().table(sort_by=by, row_limit=80, max_name_column_width=160) + "\n")


def free(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def training(
    shapes, vocab: int, batch: int, length: int, device: str, blocks: int, steps: int, extra: dict
) -> list[dict]:
    """Compiled training step: every method against transformers' Llama (and vanilla) on each shape."""
    rows = []
    for shape_name, sizes in shapes.items():
        builders: dict[str, Callable[[], torch.nn.Module]] = {
            "llama (transformers)": lambda s=sizes: make_llama(s, vocab, length),
            "vanilla": lambda s=sizes: make_fathom(s, vocab, length),
        }
        for name, sections in extra.get(shape_name, extra.get("*", {})).items():
            builders[name] = lambda s=sizes, k=sections: make_fathom(s, vocab, length, **k)
        runs = {}
        for name, build in builders.items():
            start = time.perf_counter()
            runs[name] = TrainingStep(build, vocab, batch, length, device)
            print(f"  {shape_name} {name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
        timed = take_turns({name: lambda r=run: r.time(steps) for name, run in runs.items()}, blocks)
        for name, figures in timed.items():
            row = {
                "kind": "training", "shape": shape_name, "contestant": name, "batch": batch,
                "length": length, "vocab": vocab,
                **figures, "tokens_per_s": batch * length / figures["median_s"],
                "speed_vs_llama": timed["llama (transformers)"]["median_s"] / figures["median_s"],
                "time_vs_vanilla": figures["median_s"] / timed["vanilla"]["median_s"],
                "peak_bytes": runs[name].peak,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{shape_name:12} {name:24} {row['tokens_per_s']:10.0f} tok/s  {row['speed_vs_llama']:.3f} x llama  "
                f"{row['time_vs_vanilla']:.3f} x vanilla time",
                flush=True,
            )
        del runs
        free(device)
    return rows


def decoding(
    shapes, vocab: int, batches: tuple[int, ...], prompt: int, new: int, device: str, blocks: int
) -> list[dict]:
    """generate() with a dynamic cache, greedy, on the same weights."""
    rows = []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape_name, sizes in shapes.items():
        torch.manual_seed(0)
        llama = make_llama(sizes, vocab, prompt + new)
        ours = make_fathom(sizes, vocab, prompt + new)
        ours.load_state_dict(llama.state_dict())
        models = {"llama (transformers)": llama, "vanilla": ours}
        for model in models.values():
            model.to(device, dtype).eval()
            model.generation_config.eos_token_id = None
        for batch in batches:
            tokens = torch.randint(0, vocab, (batch, prompt), device=device)
            mask = torch.ones_like(tokens)

            def run(model) -> float:
                synchronize(device)
                start = time.perf_counter()
                model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)  # noqa: B023
                synchronize(device)
                return time.perf_counter() - start

            for model in models.values():
                run(model)
            timed = take_turns({name: lambda m=model: run(m) for name, model in models.items()}, blocks)
            for name, figures in timed.items():
                row = {
                    "kind": "decode", "shape": shape_name, "contestant": name, "batch": batch,
                    "prompt": prompt, "new": new,
                    **figures, "tokens_per_s": batch * new / figures["median_s"],
                    "speed_vs_llama": timed["llama (transformers)"]["median_s"] / figures["median_s"],
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{shape_name:12} decode batch {batch:3} {name:24} {row['tokens_per_s']:9.1f} tok/s  "
                    f"{row['speed_vs_llama']:.3f} x llama",
                    flush=True,
                )
        del models, llama, ours
        free(device)
    return rows


def agreement(sizes: dict[str, int], vocab: int, device: str) -> dict[str, float]:
    """Largest logit difference from transformers' Llama on the same weights, fp32, over the largest logit."""
    torch.manual_seed(0)
    llama = make_llama(sizes, vocab, 256).to(device).eval()
    ours = make_fathom(sizes, vocab, 256).to(device).eval()
    ours.load_state_dict(llama.state_dict())
    tokens = torch.randint(0, vocab, (2, 256), device=device)
    with torch.no_grad():
        theirs, mine = llama(tokens).logits, ours(tokens).logits
    return {"max_difference": (theirs - mine).abs().max().item(), "max_logit": theirs.abs().max().item()}


def environment(device: str) -> dict[str, Any]:
    # a benchmark machine may hold a bare copy of the tree, inside another checkout: FATHOM_COMMIT then says which it is
    head = subprocess.run(["git", "rev-parse", "--verify", "HEAD^{commit}"], capture_output=True, text=True)
    commit = os.environ.get("FATHOM_COMMIT") or (head.stdout.strip() if head.returncode == 0 else "unknown")
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__, "fathom": fathom.__version__,
        "python": platform.python_version(), "commit": commit,
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]), "cpu_threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file for the figures")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--only", choices=("training", "decode"), help="run one part")
    parser.add_argument("--shape", choices=SHAPES, help="one shape only")
    parser.add_argument("--ponder", action="store_true", help="also time pondering on the first shape")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    shapes = TINY if args.tiny else {k: v for k, v in SHAPES.items() if args.shape in (None, k)}
    vocab, batch, length = (97, 2, 64) if args.tiny else (50304, 8, 2048)
    blocks, steps = (2, 2) if args.tiny else (7, 8)
    ponder = {}
    if args.ponder:
        first = next(iter(shapes))
        ponder = {first: {f"pondering s={s}": {"depth": {"name": "pondering", "steps": s}} for s in (1, 3)}}
    results: dict[str, Any] = {"environment": environment(device), "agreement": agreement(TINY["32x2"], 97, device)}
    print(results["agreement"], flush=True)
    rows: list[dict] = []
    if args.only != "training":
        rows += decoding(
            shapes,
            vocab,
            (1, 4) if args.tiny else (1, 32),
            16 if args.tiny else 128,
            8 if args.tiny else 96,
            device,
            3 if args.tiny else 5,
        )
    if args.only != "decode":
        rows += training(shapes, vocab, batch, length, device, blocks, steps, ponder)
    results["rows"] = rows
    with open(args.out, "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
