"""AWM in paper mode beside the authors' own code, on the same pairs: scores and seconds.

    python benchmarks/lineage/official.py OUT.json CHECKOUT MODEL [--other MODEL] [--random WIDTH …] [--repeats 3]
        [--threads 2]

CHECKOUT: a clone of https://github.com/LUMIA-Group/AWM, left as it is (it needs scikit-learn). Pairs, all written as
bfloat16 safetensors: MODEL and itself with Gaussian noise of half a standard deviation on every matrix, residual axes
permuted and their signs flipped; MODEL and the same cut to two thirds of its depth; with --other, MODEL and an
unrelated one; with --random, a Llama of 8 layers with random weights and 32,000 tokens, and itself with its
residual axes permuted. Medians of the repeats (the depth cut and --other are run once). Each run is a process of its
own. `seconds` is loading and scoring, imports excluded; `process` the whole process; `cpu` user and system time of
loading and scoring, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from speed import write_model

from fathom.lineage.attack import apply_exact
from fathom.lineage.perturb import INEXACT
from fathom.lineage.reader import open_checkpoint
from fathom.lineage.token_rows import spelled
from fathom.lineage.weights import Weights

# Both programs print one JSON line at the end. The authors' script only prints rounded percentages, so the function
# it calls is wrapped to see the full score.
_CLOCK = """
import contextlib, io, json, os, sys, time
def report(score, wall, cpu):
    times = os.times()
    print(json.dumps({"score": score, "seconds": time.perf_counter() - wall, "cpu": times[0] + times[1] - cpu}))
def now():
    return time.perf_counter(), sum(os.times()[:2])
"""
_OFFICIAL = (
    _CLOCK
    + """
sys.path.insert(0, sys.argv[1])
import main
seen, inner = [], main.calculate_attention_cka_similarities
main.calculate_attention_cka_similarities = lambda *a, **k: seen.append(inner(*a, **k)) or seen[-1]
start = now()
with contextlib.redirect_stdout(io.StringIO()):
    main.run_experiment(model1_path=sys.argv[2], model2_path=sys.argv[3], device="cpu")
report(seen[0]["averages"]["Wq_Wk_weights"], *start)
"""
)
_FATHOM = (
    _CLOCK
    + """
from fathom.lineage.awm import awm
from fathom.lineage.reader import open_checkpoint
start = now()
report(awm(open_checkpoint(sys.argv[2]), open_checkpoint(sys.argv[3]), hardened=False).score, *start)
"""
)


_ONCE = {"unrelated", "depth cut"}


def write(weights: Weights, folder: Path) -> Path:
    """A checkpoint that both read: bfloat16 safetensors, and tokenizer.json, the only JSON the authors' code reads."""
    weights.save(folder, torch.bfloat16)
    if not (folder / "tokenizer.json").is_file():
        vocab = {spelled(token): i for token, i in (weights.vocabulary or {}).items()}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    return folder


def random_pair(width: int, folder: Path) -> tuple[Path, Path]:
    shape = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": 8,
             "num_attention_heads": width // 64, "num_key_value_heads": width // 64, "vocab_size": 32000}  # fmt: skip
    pair = folder / f"{width}-a", folder / f"{width}-permuted"
    for path, permuted in zip(pair, (False, True)):
        write_model(path, shape, 0, permuted, "cpu")
        vocab = json.loads((path / "vocab.json").read_text())
        (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    return pair


def run(program: str, checkout: Path, pair: tuple[Path, Path], threads: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", program, str(checkout), *map(str, pair)]
    before = os.times()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"process": os.times().elapsed - before.elapsed}


def describe(args: argparse.Namespace) -> dict[str, Any]:
    def revision(folder: Path) -> str:
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {"results": {}, "model": Path(args.model).name, "other": args.other and Path(args.other).name,
            "threads": args.threads, "load_average": os.getloadavg(), "torch": torch.__version__,
            "commit": revision(Path(__file__).parent), "official_commit": revision(args.checkout)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model")
    parser.add_argument("--other")
    parser.add_argument("--random", type=int, nargs="*", default=[], metavar="WIDTH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    record = describe(args)
    with tempfile.TemporaryDirectory(prefix="fathom-awm-") as work:
        base = Weights.load(open_checkpoint(args.model))
        first = write(base, Path(work) / "model")
        noisy = INEXACT["noise"](base, torch.Generator().manual_seed(0))
        pairs = {
            "noise, permuted": (first, write(apply_exact(apply_exact(noisy, "permute"), "sign"), Path(work) / "noisy")),
        }
        pairs |= {f"random, width {width}": random_pair(width, Path(work)) for width in args.random}
        if args.other:
            other = Weights.load(open_checkpoint(args.other))
            pairs["unrelated"] = (first, write(other, Path(work) / "other"))
            del other
        pairs["depth cut"] = (first, write(INEXACT["prune_depth"](noisy, torch.Generator()), Path(work) / "short"))
        del noisy, base
        for name, pair in pairs.items():
            runs: dict[str, list[dict[str, float]]] = {"official": [], "fathom": []}
            for _ in range(
                1 if name in {"unrelated", "depth cut"} else args.repeats
            ):  # in turn: both meet the same load
                runs["official"].append(run(_OFFICIAL, args.checkout.resolve(), pair, args.threads))
                runs["fathom"].append(run(_FATHOM, args.checkout.resolve(), pair, args.threads))
            median = {who: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for who, rs in runs.items()}
            ratio = {k: median["official"][k] / median["fathom"][k] for k in ("seconds", "cpu", "process")}
            difference = abs(median["official"]["score"] - median["fathom"]["score"])
            record["results"][name] = {**median, "difference": difference, "speedup": ratio, "runs": runs}
            print(name, f"difference {difference:.1e}", json.dumps(median), json.dumps(ratio), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
