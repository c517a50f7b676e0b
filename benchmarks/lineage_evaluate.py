"""Every lineage method on every pair that can be made from the given models: AUC, pAUC, TPR at 1 % FPR, d', nulls.

    python benchmarks/lineage_evaluate.py OUT.json MODEL [MODEL …] [--related A:B …] [--derive N]

Negatives: all pairs of the given models, except those named by --related (positives) or --by-design A:B (same seed,
other data: listed apart). Positives: for the first N models (default 1) every exact and inexact attack. Models are
folders or GGUF files; name them LABEL=PATH. REEF compares hidden states on the same --texts passages (0 leaves
it out). OUT.json is rewritten after every pair; its
`summary` has AUC, pAUC, TPR, d' and the null of each method with the number of pairs behind it.
"""

import argparse
import json
import lzma
import math
import os
import platform
import subprocess
import time
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from fathom.lineage.attack import apply_exact
from fathom.lineage.awm import awm
from fathom.lineage.baselines import activations, pcs, reef, sigma_profile, token_ids
from fathom.lineage.checkpoint import Checkpoint, open_checkpoint
from fathom.lineage.detection import detection
from fathom.lineage.errors import NoAnchorError
from fathom.lineage.huref import PAPER, ics
from fathom.lineage.perturb import INEXACT, merge
from fathom.lineage.transforms import EXACT
from fathom.lineage.weights import Weights

METHODS = {
    "pcs": pcs,
    "sigma-profile": sigma_profile,
    "huref-paper": lambda a, b: ics(a, b, PAPER).score,
    "huref-ics": lambda a, b: ics(a, b).score,
    "paper-lap": lambda a, b: awm(a, b, hardened=False).score,
    "hardened-lap": lambda a, b: awm(a, b).score,
    "hardened-procrustes": lambda a, b: awm(a, b, alignment="procrustes").score,
    "hardened-procrustes-p0.25": lambda a, b: awm(a, b, alignment="procrustes", power=0.25).score,
}


def score(a: Checkpoint, b: Checkpoint, methods: list[str]) -> dict[str, float]:
    found = {}
    for name in methods:
        try:
            found[name] = METHODS[name](a, b)
        except NoAnchorError:
            found[name] = 0.0  # no anchor: the method sees no relation
        except (RuntimeError, ValueError) as error:
            print(f"  {name}: {error}", flush=True)
            found[name] = math.nan
    return found


def passages(count: int) -> list[str]:
    """`count` passages of 40 words, evenly spaced over the validation text that comes with Fathom."""
    file = files("fathom.data") / "corpus" / "validation.jsonl.xz"
    with lzma.open(str(file), "rt", encoding="utf-8") as lines:
        words = " ".join(json.loads(line)["text"] for line in lines).split()
    return [" ".join(words[i * len(words) // count :][:40]) for i in range(count)]


def states(model: Weights, texts: list[str]) -> torch.Tensor:
    if model.vocabulary is None:
        raise ValueError("REEF reads texts: every model needs its vocabulary")
    return activations(model, [token_ids(text, model.vocabulary) for text in texts])


def descendants(base: Weights, exact: list[str], inexact: list[str]):
    for name in exact:
        try:
            yield f"exact:{name}", apply_exact(base, name)
        except ValueError:
            continue
    made = {}
    for name in inexact:
        try:
            made[name] = INEXACT[name](base, torch.Generator().manual_seed(0))
        except ValueError:
            continue
        yield f"inexact:{name}", made[name]
    if {"noise", "lora"} <= made.keys():
        yield "inexact:merge_linear", merge([made["noise"], made["lora"]], [0.5, 0.5])
        yield "inexact:merge_ties", merge([base, made["noise"], made["lora"]], [1, 0.5, 0.5], "ties")
    if "prune_magnitude" in made:
        yield "inexact:prune+all", apply_exact(made["prune_magnitude"], "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", help="LABEL=PATH or PATH")
    parser.add_argument("--related", nargs="*", default=[], help="LABEL:LABEL pairs that are positives")
    parser.add_argument("--by-design", nargs="*", default=[], help="LABEL:LABEL pairs sharing an initialisation")
    parser.add_argument("--derive", type=int, default=1, help="derive attacks from the first N models")
    parser.add_argument("--exact", nargs="*", default=list(EXACT), help="exact transforms to derive")
    parser.add_argument("--inexact", nargs="*", default=list(INEXACT), help="inexact attacks to derive")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--texts", type=int, default=64, help="passages for REEF; 0 leaves it out")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    models = {}
    for item in args.models:
        label, _, path = item.rpartition("=")
        models[label or Path(path).name] = open_checkpoint(path, device=args.device)
    named = {tuple(sorted(p.split(":"))): "positive" for p in args.related}
    named |= {tuple(sorted(p.split(":"))): "by-design" for p in args.by_design}
    pairs, start = [], time.time()

    def add(kind: str, a: str, b: str, scores: dict[str, float]) -> None:
        pairs.append({"kind": kind, "a": a, "b": b, "scores": scores})
        print(
            f"{time.time() - start:6.0f}s {kind:9} {a} | {b} " + " ".join(f"{k} {v:.4f}" for k, v in scores.items()),
            flush=True,
        )
        write(args.out, args, pairs)

    texts = passages(args.texts)
    seen = {label: states(Weights.load(model), texts) for label, model in models.items()} if texts else {}
    for a, b in combinations(models, 2):
        found = score(models[a], models[b], args.methods)
        if texts:
            found["reef"] = reef(seen[a], seen[b])
        add(named.get(tuple(sorted((a, b))), "negative"), a, b, found)
    for label in list(models)[: args.derive]:
        base = Weights.load(models[label])
        own = base.checkpoint()
        own.source = label
        for name, child in descendants(base, args.exact, args.inexact):
            found = score(own, child.checkpoint(), args.methods)
            if texts:
                found["reef"] = reef(seen[label], states(child, texts))
            add("positive", label, f"{label}/{name}", found)
    for method, found in write(args.out, args, pairs).items():
        print(
            f"{method:26} AUC {found['auc']:.3f}  pAUC {found['pauc']:.3f}  TPR@1% {found['tpr_at_1pct_fpr']:.3f}  "
            f"d' {found['d_prime']:.1f}  gap {found['gap']:.3f}  null {found['null_mean']:.4f} ± "
            f"{found['null_std']:.4f} (max {found['null_max']:.4f}, n = {found['negatives']})"
        )


def write(out: Path, args: argparse.Namespace, pairs: list[dict]) -> dict[str, dict[str, float]]:
    summary = {}
    for method in sorted({m for p in pairs for m in p["scores"]}):
        values = {
            k: [p["scores"][method] for p in pairs if p["kind"] == k and method in p["scores"]]
            for k in ("positive", "negative")
        }
        values = {k: np.array([v for v in vs if math.isfinite(v)]) for k, vs in values.items()}
        if len(values["positive"]) and len(values["negative"]):
            summary[method] = detection(values["positive"], values["negative"])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {"summary": summary, "pairs": pairs, "torch": torch.__version__, "python": platform.python_version(),
              "device": args.device, "commit": commit, "seed": 0}  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_suffix(".tmp")
    work.write_text(json.dumps(record, indent=1))
    os.replace(work, out)
    return summary


if __name__ == "__main__":
    main()
