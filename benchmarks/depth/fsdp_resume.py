"""FSDP2: train on several GPUs, interrupt, resume, and compare every loss and weight with the uninterrupted run.

    python benchmarks/depth/fsdp_resume.py docs/results/fsdp2.json --processes 2        (GPUs, about 5 minutes)
    python benchmarks/depth/fsdp_resume.py /tmp/fsdp.json --processes 1 --plain         (CPU: a dry run of the script)

Vanilla is stopped by Ctrl-C, a looped Depth-Attention model by kill -9, both a second after checkpoint 100 appears.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from speed import environment

from fathom import FathomForCausalLM
from fathom.train.metrics import read_metrics

RECIPE = """name: fsdp
model: {hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2}
methods: [vanilla, {name: loop, depth: {name: loop, passes: 2}, mixer: {name: depth_attention}}]
data: {block_size: 256, tokenizer: {bpe: 2048}}
training: {tokens: 1638400, sequences: 16, precision: bf16, save_every: 50, log_every: 1}
"""
FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]


def train(launch: list[str], recipe: Path, method: str, output: Path, stop: signal.Signals | None = None) -> Path:
    """One `fathom train`, stopped with `stop` after step 100 if given; the run's folder."""
    command = [*launch, "-m", "fathom", "train", str(recipe), "--method", method, "--output", str(output)]
    process = subprocess.Popen(command, start_new_session=True)
    run = output / "fsdp" / f"{method}-seed0"
    if stop is not None:
        while process.poll() is None and not (run / "checkpoint-100").exists():
            time.sleep(0.05)
        time.sleep(1)
        if process.poll() is None:
            os.killpg(process.pid, stop)
    process.wait()
    return run


def compare(launch: list[str], folder: Path, method: str, stop: signal.Signals) -> dict[str, Any]:
    """The largest differences between a run that was stopped and resumed, and one that was not."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    train(launch, recipe, method, folder / "cut", stop)
    assert not (folder / "cut" / "fsdp" / f"{method}-seed0" / "result.json").exists(), "ended before it was stopped"
    runs = [train(launch, recipe, method, folder / name) for name in ("cut", "whole")]
    resumed, whole = ({row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row} for run in runs)
    models = [FathomForCausalLM.from_pretrained(run / "model") for run in runs]
    gaps = [(a - b).abs().max().item() for a, b in zip(*(m.parameters() for m in models), strict=True)]
    return {
        "signal": stop.name,
        "steps": max(whole),
        "same_steps": resumed.keys() == whole.keys(),
        "max_loss_gap": max(abs(resumed[step] - whole[step]) for step in whole),
        "max_weight_gap": max(gaps),
        "file_bytes": (runs[0] / "model" / "model.safetensors").stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="without FSDP")
    args = parser.parse_args()
    launch = [sys.executable]
    if not args.plain:
        launch += ["-m", "accelerate.commands.launch", "--num_processes", str(args.processes), *FSDP]
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            method: compare(launch, Path(folder), method, stop)
            for method, stop in (("vanilla", signal.SIGINT), ("loop", signal.SIGKILL))
        }
    about = environment("cpu" if args.plain else "cuda")
    args.out.write_text(json.dumps({"environment": about, "processes": args.processes, "runs": runs}, indent=1))
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
