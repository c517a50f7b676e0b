"""What the Trainer loop costs a small model: steps per second of `fathom train` beside the bare step, and device waits.

    python benchmarks/depth/trainer_overhead.py --out trainer_overhead.json  (GPU: the shape of depth_attention_small)
    python benchmarks/depth/trainer_overhead.py --tiny                          (CPU, seconds: a dry run of the script)

`trainer` is train_run without saving and evaluation, `bare` the same compiled model, batches in memory, AdamW and
clipping in a plain loop; both in one process, medians over blocks of 10 steps. On a GPU PyTorch reports every call that
waits for the device; `waits` counts them by source line over the measured steps of the Trainer.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fathom import FathomForCausalLM
from fathom.data import DataConfig, collate, prepare
from fathom.train import MethodConfig, Recipe, Training, model_config, train_run

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16, "num_attention_heads": 8}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCK = 10  # steps a timing; the recipe logs as often, and a log waits for the device
WARM_UP = 3  # blocks not timed: compilation, allocator
METHOD = MethodConfig("vanilla", {"depth": {"name": "vanilla"}})


class Clock(TrainerCallback):
    """Seconds of every block of steps; from the first timed block on, PyTorch warns of every wait."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % BLOCK == 0:
            synchronize()
            self.marks.append(time.perf_counter())
            if torch.cuda.is_available() and len(self.marks) == WARM_UP:
                torch.cuda.set_sync_debug_mode("warn")


def synchronize() -> None:
    if torch.cuda.is_available():
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)


def milliseconds_a_step(marks: list[float]) -> dict[str, float]:
    times = [1000 * (end - start) / BLOCK for start, end in itertools.pairwise(marks[WARM_UP - 1 :])]
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def bare(recipe: Recipe, data: Any, steps: int) -> list[float]:
    """The same optimiser step without a Trainer, a loader or logs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: Any = FathomForCausalLM(model_config(recipe, METHOD, data.tokenizer)).to(device).train()
    step = torch.compile(model) if recipe.training.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = recipe.training.sequences
    batches = [collate([data.train[i] for i in range(j * size, (j + 1) * size)]) for j in range(4)]
    batches = [{name: column.to(device) for name, column in batch.items()} for batch in batches]
    marks = []
    for number in range(1, steps + 1):
        with torch.autocast(device, torch.bfloat16, enabled=recipe.training.precision == "bf16"):
            step(**batches[number % len(batches)]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % BLOCK == 0:
            synchronize()
            marks.append(time.perf_counter())
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--blocks", type=int, default=20, help="timed blocks of 10 steps")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tiny = arguments.tiny
    sequences, length = (4, 32) if tiny else (64, 1024)
    steps = BLOCK * (WARM_UP + arguments.blocks)
    recipe = Recipe(
        "trainer-overhead",
        Training(
            tokens=steps * sequences * length,
            sequences=sequences,
            precision="fp32" if tiny else "bf16",
            compile=not tiny,
            log_every=BLOCK,
            save_every=None,
        ),
        model={"backbone": "qwen3", **(TINY if tiny else {**SHAPE, "num_key_value_heads": 2})},
        data=DataConfig("embedded", validation=None, tokenizer={"bpe": 300 if tiny else 16384}, block_size=length),
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = prepare(recipe.data, folder)
        clock = Clock()
        train_run(recipe, METHOD, seed=0, folder=Path(folder, "run"), data=data, lr=1e-4, callbacks=[clock])
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        waits = collections.Counter(
            f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message).lower()
        )
        results = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "trainer_ms": milliseconds_a_step(clock.marks),
            "bare_ms": milliseconds_a_step(bare(recipe, data, steps)),
            "timed_steps": BLOCK * arguments.blocks,
            "waits": dict(waits.most_common()),
        }
    results["ratio"] = results["trainer_ms"]["median"] / results["bare_ms"]["median"]
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
