"""Every lineage method on every pair that can be made from the given models: AUC, pAUC, TPR at 1 % FPR, d', nulls.

    python benchmarks/lineage/evaluate.py OUT.json MODEL [MODEL …] [--related A:B …] [--derive N] [--processes 16]
        [--minutes 5]

Negatives: all pairs of the given models, except those named by --related (positives) or --by-design A:B (same seed,
other data: listed apart). Positives: for the first N models (default 1) every exact and inexact attack. Models are
folders or GGUF files; name them LABEL=PATH. REEF compares hidden states on the same --texts passages (0 leaves it
out). OUT.json is rewritten after every pair, a pair that fails is printed and left out; its `summary` has AUC, pAUC,
TPR, d' and the null of each method with the number of pairs behind it.
"""

import argparse
import json
import lzma
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from fathom.lineage.attack import apply_exact
from fathom.lineage.awm import awm
from fathom.lineage.baselines import activations, pcs, reef, sigma_profile, token_ids
from fathom.lineage.detection import detection
from fathom.lineage.errors import NoAnchorError
from fathom.lineage.huref import PAPER, ics
from fathom.lineage.perturb import INEXACT, merge
from fathom.lineage.reader import Checkpoint, open_checkpoint
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


MERGES = ("merge_linear", "merge_ties", "prune+all")


def attacked(base: Weights, attack: str) -> Weights:
    """One descendant: `exact:NAME`, `inexact:NAME`. Raises ValueError where it does not apply to this model."""
    kind, name = attack.split(":")

    def inexact(name: str) -> Weights:
        return INEXACT[name](base, torch.Generator().manual_seed(0))

    if kind == "exact":
        return apply_exact(base, name)
    if name == "merge_linear":
        return merge([inexact("noise"), inexact("lora")], [0.5, 0.5])
    if name == "merge_ties":
        return merge([base, inexact("noise"), inexact("lora")], [1, 0.5, 0.5], "ties")
    return apply_exact(inexact("prune_magnitude"), "all") if name == "prune+all" else inexact(name)


@dataclass(eq=False)
class Worker:
    """Scores one job: a pair of models, or a model and an attack on it. What it reads it keeps for the next job."""

    paths: dict[str, str]
    methods: list[str]
    texts: int
    device: str

    @cache  # noqa: B019 — a worker lives as long as its process
    def model(self, label: str) -> Checkpoint:
        return open_checkpoint(self.paths[label], device=self.device)

    @cache  # noqa: B019
    def weights(self, label: str) -> Weights:
        return Weights.load(self.model(label))

    @cache  # noqa: B019
    def states(self, label: str) -> torch.Tensor:
        return states(self.weights(label), passages(self.texts))

    def __call__(self, a: str, b: str) -> dict[str, float]:
        if b in self.paths:
            first, second = self.model(a), self.model(b)
            other = self.states(b) if self.texts else None
        else:
            child = attacked(self.weights(a), b.removeprefix(f"{a}/"))
            first, second = self.weights(a).checkpoint(), child.checkpoint()
            other = states(child, passages(self.texts)) if self.texts else None
        found = score(first, second, self.methods)
        return found if other is None else found | {"reef": reef(self.states(a), other)}


_worker: Worker


def _begin(paths: dict[str, str], methods: list[str], texts: int, device: str) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = Worker(paths, methods, texts, device)


def _work(a: str, b: str) -> dict[str, float] | str:
    try:
        return _worker(a, b)
    except ValueError as error:  # the attack does not apply to this model
        return str(error)


def outcomes(jobs: list[tuple[str, str]], processes: int, *setup) -> Iterator[tuple[int, dict[str, float] | str]]:
    """(number of the job, its scores or why there are none), as they come."""
    if processes < 2:
        global _worker
        _worker = Worker(*setup)
        yield from ((i, _work(*job)) for i, job in enumerate(jobs))
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, setup)
    try:
        futures = {pool.submit(_work, *job): i for i, job in enumerate(jobs)}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except Exception as error:  # the other pairs are worth having
                yield futures[future], repr(error)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
    parser.add_argument("--processes", type=int, default=1, help="pairs scored at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time with what there is")
    args = parser.parse_args()

    paths = {}
    for item in args.models:
        label, _, path = item.rpartition("=")
        paths[label or Path(path).name] = path
    named = {tuple(sorted(p.split(":"))): "positive" for p in args.related}
    named |= {tuple(sorted(p.split(":"))): "by-design" for p in args.by_design}
    attacks = [f"exact:{name}" for name in args.exact] + [f"inexact:{name}" for name in args.inexact]
    if {"noise", "lora", "prune_magnitude"} <= set(args.inexact):
        attacks += [f"inexact:{name}" for name in MERGES]
    jobs = list(combinations(paths, 2))
    jobs += [(label, f"{label}/{attack}") for label in list(paths)[: args.derive] for attack in attacks]
    pairs: dict[int, dict] = {}
    start = time.time()
    for job, found in outcomes(jobs, args.processes, paths, args.methods, args.texts, args.device):
        a, b = jobs[job]
        if isinstance(found, str):
            print(f"{time.time() - start:6.0f}s left out: {a} | {b}: {found}", flush=True)
            continue
        kind = named.get(tuple(sorted((a, b))), "negative") if b in paths else "positive"
        pairs[job] = {"kind": kind, "a": a, "b": b, "scores": found}
        values = " ".join(f"{k} {v:.4f}" for k, v in found.items())
        print(f"{time.time() - start:6.0f}s {kind:9} {a} | {b} {values}", flush=True)
        write(args.out, args, [pairs[i] for i in sorted(pairs)])
        if time.time() - start > 60 * args.minutes:
            print(f"--minutes {args.minutes:g} are over: {len(pairs)} of {len(jobs)} pairs done", flush=True)
            break
    for method, found in write(args.out, args, [pairs[i] for i in sorted(pairs)]).items():
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
    commit = (
        os.environ.get("FATHOM_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    record = {"summary": summary, "pairs": pairs, "torch": torch.__version__, "python": platform.python_version(),
              "device": args.device, "commit": commit, "seed": 0}  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_suffix(".tmp")
    work.write_text(json.dumps(record, indent=1))
    os.replace(work, out)
    return summary


if __name__ == "__main__":
    main()
