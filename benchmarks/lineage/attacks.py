"""The whole catalogue of attacks on trained models: does each child still count as related, disguised or not?

    python benchmarks/lineage/attacks.py OUT.json TEXT_DIR WEIGHTS.safetensors [… ] [--real NAME=PATH]

WEIGHTS: what zoo.py exports, TEXT_DIR: its tokenizers. Every exact attack, every inexact one, and every inexact one
with all exact ones on top (`NAME+all`, the hardest). --real: a GGUF file or folder besides. OUT.json is rewritten
after every model.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from fathom.lineage.attack import apply_exact
from fathom.lineage.errors import NoEvidenceError
from fathom.lineage.families import Family, geometry
from fathom.lineage.pairs import compare
from fathom.lineage.perturb import INEXACT
from fathom.lineage.reader import Checkpoint, open_checkpoint
from fathom.lineage.token_rows import normalise
from fathom.lineage.transforms import EXACT
from fathom.lineage.weights import MemoryStore, Weights


def zoo_models(file: Path, texts: Path) -> Iterator[tuple[str, Weights]]:
    """The first model of every group in a file."""
    with safe_open(file, "pt") as found:
        for group, text in found.metadata().items():
            config = json.loads(text)
            words = normalise(json.loads((texts / f"{config.pop('vocabulary')}.json").read_text()))
            prefix = f"{group}/0/"
            state = {n.removeprefix(prefix): found.get_tensor(n) for n in list(found.keys()) if n.startswith(prefix)}
            model = Checkpoint(f"{group}/0", MemoryStore(state), config, Family(), geometry(config, Family()), words)
            yield f"{group}/0", Weights.load(model)


def attacked(base: Weights) -> Iterator[tuple[str, Weights]]:
    """(name, child); attacks that this model does not admit are left out."""
    generator = torch.Generator
    for name in EXACT:
        try:
            yield name, apply_exact(base, name)
        except ValueError:
            continue
    for name, change in INEXACT.items():
        try:
            child = change(base, generator().manual_seed(0))
            yield name, child
            yield f"{name}+all", apply_exact(child, "all")
        except ValueError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("weights", type=Path, nargs="*")
    parser.add_argument("--real", action="append", default=[], help="NAME=PATH")
    args = parser.parse_args()
    about = {"torch": torch.__version__, "machine": platform.processor(), "threads": torch.get_num_threads()}
    found: dict[str, dict] = {}

    def models() -> Iterator[tuple[str, Weights]]:
        for file in args.weights:
            yield from zoo_models(file, args.texts)
        for entry in args.real:
            name, path = entry.split("=", 1)
            yield name, Weights.load(open_checkpoint(path))

    for label, base in models():
        parent, record = base.checkpoint(), {}
        for name, child in attacked(base):
            began = time.perf_counter()
            try:
                c = compare(parent, child.checkpoint())
                record[name] = {"verdict": c.verdict, "method": c.method, "score": round(c.score, 4),
                                "agreement": round(c.details[c.method]["judged"], 4), "p": c.p}  # fmt: skip
            except NoEvidenceError as error:
                record[name] = {"verdict": "abstained", "reason": str(error)}
            record[name]["seconds"] = round(time.perf_counter() - began, 2)
            if record[name]["verdict"] != "related":
                print(label, name, record[name], flush=True)
        found[label] = record
        print(
            label,
            len(record),
            "attacks,",
            sum(r["verdict"] == "related" for r in record.values()),
            "related",
            flush=True,
        )
        lines = [json.dumps(k) + ": {\n" + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in v.items()) + "}"
                 for k, v in found.items()]  # fmt: skip
        args.out.write_text(json.dumps(about)[:-1] + ', "models": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
