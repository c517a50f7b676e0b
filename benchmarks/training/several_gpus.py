"""Training steps on one and on several GPUs of a host: what `fathom cost --gpus` predicts, measured.

    torchrun --standalone --nproc-per-node 2 benchmarks/training/several_gpus.py --out plan.json    (100 s on two H200)
    torchrun --standalone --nproc-per-node 2 benchmarks/training/several_gpus.py --tiny --out /tmp/plan.json   (CPU)

Vanilla decoders of 110M and 1.1B, random tokens, bf16 autocast over fp32 weights, fused AdamW, layers compiled.
First every GPU trains a model of its own at the same time, then all train one: DDP for the small model, FSDP2 (bf16
parameters, fp32 reduction, as the Trainer has it) for the large one, with as many tokens a GPU. Between them the
collectives alone. Every finished part is written at once; a part that would begin after `--seconds` is left out.
This is a loop of its own, without the Trainer's data, logging and clipping.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402  importing is part of the time
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import fathom  # noqa: E402
from fathom import FathomConfig, FathomForCausalLM  # noqa: E402
from fathom.cost import parameter_counts, training_flops_per_token  # noqa: E402
from fathom.train.trainer import compile_layers  # noqa: E402

PEAK = 989e12  # dense bf16 FLOP/s of an H200 by its data sheet
VOCABULARY = 32768


def shape(width: int, inner: int, layers: int, heads: int, kv_heads: int, length: int, vocab: int) -> FathomConfig:
    return FathomConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=length, vocab_size=vocab,
    )  # fmt: skip


SHAPES = {  # config, sequences a GPU, tokens of a sequence
    "110M": (shape(896, 2432, 12, 14, 14, 1024, VOCABULARY), 64, 1024),
    "1.1B": (shape(2048, 5632, 22, 32, 4, 2048, VOCABULARY), 8, 2048),
}
TINY = {"110M": (shape(32, 64, 2, 4, 4, 32, 64), 2, 32), "1.1B": (shape(64, 128, 3, 4, 2, 32, 64), 2, 32)}


class Steps:
    """Optimiser steps of one model on fixed random tokens."""

    def __init__(self, name: str, shapes: dict[str, Any], device: torch.device, wrap: str, checkpointing: bool = False):
        self.config, self.sequences, self.length = shapes[name]
        self.device, self.wrap, self.checkpointing = device, wrap, checkpointing
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        model: Any = FathomForCausalLM(self.config).to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        compile_layers(model, backend="inductor" if device.type == "cuda" else "eager")
        if wrap == "ddp":
            model = DistributedDataParallel(model, broadcast_buffers=False)
        elif wrap == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, self.config.vocab_size, (self.sequences, self.length), device=device)

    def __call__(self, steps: int) -> float:
        for _ in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def measure(self, steps: int, blocks: int) -> dict[str, Any]:
        began = time.perf_counter()
        self(3)
        _wait(self.device)
        warm, times = time.perf_counter() - began, []
        for _ in range(blocks):
            if self.wrap != "alone":
                dist.barrier()
            start = time.perf_counter()
            loss = self(steps)
            _wait(self.device)
            times.append((time.perf_counter() - start) / steps)
        seconds, tokens = statistics.median(times), self.sequences * self.length
        flops = training_flops_per_token(self.config, self.length, False)
        return {
            "wrap": self.wrap, "checkpointing": self.checkpointing, "sequences": self.sequences, "length": self.length,
            "step_s": seconds, "steps_s": times, "warm_up_s": warm, "tokens_per_s_per_gpu": tokens / seconds,
            "flops_per_token": flops, "mfu": tokens / seconds * flops / PEAK, "last_loss": loss,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            "parameters": parameter_counts(self.config).total,
            "non_embedding": parameter_counts(self.config).non_embedding,
        }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def collectives(device: torch.device, numbers: int) -> list[dict[str, Any]]:
    """Seconds of the collectives that training uses, on `numbers` fp32 numbers a rank, and bus bandwidth: bytes that
    leave a GPU a second, (n−1)/n of the tensor for all-gather and reduce-scatter, twice that for all-reduce."""
    ranks, rows = dist.get_world_size(), []
    whole = torch.ones(numbers, device=device)
    part = torch.ones(numbers // ranks, device=device)
    calls = {
        "all_reduce": (lambda: dist.all_reduce(whole), 2),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), 1),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), 1),
    }
    for name, (call, times) in calls.items():
        if device.type == "cpu" and name == "reduce_scatter":
            continue  # gloo has none in every version
        for _ in range(3):
            call()
        _wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(10):
            call()
        _wait(device)
        seconds = (time.perf_counter() - start) / 10
        sent = times * (ranks - 1) / ranks * whole.numel() * whole.element_size()
        rows.append({"op": name, "bytes": whole.numel() * whole.element_size(), "seconds": seconds,
                     "bus_bytes_per_s": sent / seconds})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95.0, help="a part that would begin later is left out")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    args = parser.parse_args()
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available() and not args.tiny
    device = torch.device(f"cuda:{rank}") if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=90))
    shapes = TINY if args.tiny else SHAPES
    steps, blocks = (2, 2) if args.tiny else (5, 4)
    found: dict[str, Any] = {
        "environment": {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
            "devices": dist.get_world_size(), "torch": torch.__version__, "transformers": transformers.__version__,
            "fathom": fathom.__version__, "python": platform.python_version(), "commit": _commit(),
            "command": f"torchrun --standalone --nproc-per-node {dist.get_world_size()} {' '.join(sys.argv)}",
            "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
        },
        "peak_flops": PEAK, "rows": [], "failures": [],
    }  # fmt: skip

    def part(name: str, wrap: str, kernel: Any = None, checkpointing: bool = False) -> None:
        """One model measured by every rank; the rows of all of them are kept."""
        begin = torch.tensor([time.time() - STARTED], device=device)
        dist.all_reduce(begin, dist.ReduceOp.MAX)  # all begin, or none
        if begin.item() > args.seconds:
            found["failures"].append(f"{name} {wrap}: left out, {begin.item():.0f} s have passed")
            return
        row: dict[str, Any] = {"shape": name}
        try:
            with sdpa_kernel(kernel, set_priority=True) if kernel else contextlib.nullcontext():
                made = Steps(name, shapes, device, wrap, checkpointing)
                row |= made.measure(steps, blocks)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:500]
            if wrap != "alone":  # the others wait in a collective
                raise
        row["kernel"] = "default" if kernel is None else str(kernel[0]).split(".")[-1]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, row)
        kept = gathered if wrap == "alone" else gathered[:1]
        found["rows"] += [{**one, "rank": i, "at_s": round(time.time() - STARTED, 1)} for i, one in enumerate(kept)]
        save()
        made = None  # its memory is the next part's
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    def save() -> None:
        if dist.get_rank() == 0:
            partial = args.out.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(partial, args.out)
            print(f"{time.time() - STARTED:.0f} s: {len(found['rows'])} rows", flush=True)

    cudnn = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if cuda else None
    part("110M", "alone", cudnn if rank == 1 else None)
    part("110M", "ddp")
    torch._dynamo.reset()  # else the second shape would be compiled for sizes that change
    found["collectives"] = collectives(device, 64 << 20 if cuda else 1024)
    part("1.1B", "alone", checkpointing=rank == 1)
    part("1.1B", "fsdp2")
    by = {(r["shape"], r["wrap"], r["checkpointing"], r["kernel"]): r for r in found["rows"] if "failure" not in r}
    found["efficiency"] = {
        shape_name: by[shape_name, wrap, False, "default"]["tokens_per_s_per_gpu"]
        / by[shape_name, "alone", False, "default"]["tokens_per_s_per_gpu"]
        for shape_name, wrap in (("110M", "ddp"), ("1.1B", "fsdp2"))
        if (shape_name, wrap, False, "default") in by and (shape_name, "alone", False, "default") in by
    }
    save()
    dist.barrier()
    dist.destroy_process_group()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
