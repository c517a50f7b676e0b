"""How the score of unrelated models depends on width, where no trained models are at hand: random Llamas.

    python benchmarks/lineage/null.py OUT.json [--widths 256 512 1024 2048] [--models 4] [--vocab 16000]

All pairs of --models Gaussian Llamas of two layers with one shared vocabulary. What training adds to the null (common
word frequencies, low rank) is missing: these are floors, no calibration. `d_times_mean` and `d_times_std` show the
scaling: both constant means that the null falls as 1/d.
"""

import argparse
import json
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from fathom.lineage.awm import awm
from fathom.lineage.families import Family
from fathom.lineage.huref import ics
from fathom.lineage.weights import Weights

METHODS = {
    "paper-lap": lambda a, b: awm(a, b, hardened=False).score,
    "hardened-lap": lambda a, b: awm(a, b, anchor="embedding").score,
    "hardened-procrustes": lambda a, b: awm(a, b, alignment="procrustes", anchor="embedding").score,
    "huref-ics": lambda a, b: ics(a, b).score,
}


def random_llama(width: int, vocab: int, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    heads, feed = width // 64, width * 8 // 3 // 32 * 32
    kv = max(1, heads // 4) * 64
    sizes = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width), "gate": (feed, width),
             "up": (feed, width), "down": (width, feed)}  # fmt: skip
    tensors = {"embed": torch.randn(vocab, width, generator=generator), "final_norm": torch.ones(width)}
    for layer in range(2):
        for role, (rows, columns) in sizes.items():
            tensors[f"layers.{layer}.{role}"] = torch.randn(rows, columns, generator=generator) / width**0.5
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"layers.{layer}.{norm}"] = 1 + 0.1 * torch.randn(width, generator=generator)
    config = {"model_type": "llama", "hidden_size": width, "intermediate_size": feed, "num_hidden_layers": 2,
              "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": 64,
              "tie_word_embeddings": True}  # fmt: skip
    return Weights(config, Family(), tensors, {f" {i}".encode(): i for i in range(vocab)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16000)
    args = parser.parse_args()

    record = {"models": args.models, "vocab": args.vocab, "torch": torch.__version__, "widths": {}}
    for width in args.widths:
        start, scores = time.perf_counter(), {name: [] for name in METHODS}
        for i, j in combinations(range(args.models), 2):
            a, b = (random_llama(width, args.vocab, seed).checkpoint() for seed in (i, j))
            for name, method in METHODS.items():
                scores[name].append(method(a, b))
        record["widths"][width] = {
            name: {"n": len(s), "mean": np.mean(s), "std": np.std(s, ddof=1), "max": max(s), "scores": s,
                   "d_times_mean": width * np.mean(s), "d_times_std": width * np.std(s, ddof=1)}
            for name, s in scores.items()
        }  # fmt: skip
        shown = {k: f"{v['mean']:.5f} ± {v['std']:.5f} (max {v['max']:.5f}, n {v['n']})" for k, v in
                 record["widths"][width].items()}  # fmt: skip
        print(width, f"{time.perf_counter() - start:.0f} s", shown, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
