"""Trained models, trained on a little at a longer length under stretched angles: NTK, PI and YaRN.

    python benchmarks/positions/extend.py RUNS --factor 4 --tokens 4_096_000      RUNS: a folder of `fathom compare`

Every method of RUNS that has angles goes on from its first seed's checkpoint, on the same texts in longer rows, as one
`fathom compare` of its own (its recipe is kept beside its results). Read the results with
`python benchmarks/positions/length.py RUNS-* --stretch none`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ENDS = float(os.environ.get("STOP", "inf"))  # unix seconds: no run begins later


def rope(how: str, factor: float, trained: int, width: int) -> dict[str, Any]:
    """rope_parameters of the longer model."""
    if how == "ntk":
        return {"rope_type": "default", "rope_theta": 10000.0 * factor ** (width / (width - 2))}
    fields: dict[str, Any] = {"rope_type": how, "factor": factor, "rope_theta": 10000.0}
    return fields if how == "linear" else {**fields, "original_max_position_embeddings": trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/positions_far.yaml"))
    parser.add_argument("--methods", default="rotary,rope_pp")
    parser.add_argument("--how", default="ntk,linear,yarn")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=4_096_000)
    parser.add_argument("--lr", type=float, default=1.0e-3)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    base = yaml.safe_load(args.recipe.read_text())
    trained, width = base["data"]["block_size"], base["model"]["head_dim"]
    longer = int(args.factor * trained)
    waiting = []
    for how in args.how.split(","):
        for name in args.methods.split(","):
            found = sorted(args.runs.glob(f"{name}/*seed-{base['seeds'][0]}/model"))
            if not found:
                print(f"{args.runs}: no finished run of {name}", flush=True)
                continue
            entry = next(method for method in base["methods"] if method["name"] == name)
            fields = {key: value for key, value in entry.items() if key not in ("seeds",)}
            model = {"checkpoint": str(found[0]), "max_position_embeddings": longer}
            recipe = {
                "name": f"{args.runs.name}-{how}-{name}",
                "model": {**model, "rope_parameters": rope(how, args.factor, trained, width)},
                "methods": [{key: fields[key] for key in fields if key in ("name", "positions")}],
                "data": {k: v for k, v in base["data"].items() if k != "tokenizer"} | {"block_size": longer},
                "training": {
                    **base["training"], "tokens": args.tokens, "lr": args.lr,
                    "sequences": max(1, int(base["training"]["sequences"] / args.factor)),
                },
                "seeds": base["seeds"][:1],
                "budgets": ["tokens"],
            }  # fmt: skip
            path = args.runs.parent / f"{recipe['name']}.yaml"
            path.write_text(yaml.safe_dump(recipe))
            waiting.append(path)

    def run(path: Path) -> None:
        if time.time() < ENDS:
            output = ["--output", str(args.runs.parent)]
            subprocess.run([sys.executable, "-m", "fathom", "compare", str(path), *output], check=False)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, waiting))


if __name__ == "__main__":
    main()
