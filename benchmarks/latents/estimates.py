"""What heads make of a denoiser's own estimates of held-out text: rounding where it counts.

    python benchmarks/latents/estimates.py runs/codar_cpu/seed-0/decoder/model -o estimates.json

A text's vectors are noised at time t and estimated by the denoiser in two passes; every head is then asked for the
text, and for comparison what it makes of the noised vectors themselves. `codar` is the model's own contextual decoder,
the others are trained here, on noised vectors of t ≤ --t-max.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from fathom.data import DataConfig, prepare
from fathom.latents.heads import Contextual
from fathom.latents.model import load
from fathom.latents.recovery import RecoveryConfig, scored, trained_head
from fathom.report.provenance import provenance
from fathom.writing import write_json
from fathom_cli.latents import rows

NOISED = (0.05, 0.1, 0.15, 0.2, 0.3)  # times at which the noised vectors themselves are read, too
TIMES = (*NOISED, 0.4, 0.5, 0.6, 0.8, 1.0)


def estimates(
    model: Any, heads: dict[str, Any], held_out: Int[Tensor, "M L"], seed: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of `asked` with head and estimated; `keep` is given those so far after every time."""
    own = Contextual(model.config)
    own.decoder = model.decoder
    found: list[dict[str, Any]] = []
    for t in TIMES:
        for name, head in {"codar": own.to(model.device).eval(), **heads}.items():
            for estimated in (True, False) if t in NOISED else (True,):
                said = scored(model, head, held_out, t, seed, estimated)
                found.append({"head": name, "estimated": estimated, **said})
        keep(found)
        print(t, {(row["head"], row["estimated"]): round(row["nll"], 3) for row in found if row["t"] == t}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model both of whose stages are trained")
    parser.add_argument("--heads", nargs="+", default=["mlp", "factorised", "language"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--t-max", type=float, default=0.15)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, default=Path("estimates.json"))
    given = parser.parse_args()
    model, _ = load(given.model)
    data = prepare(
        DataConfig(tokenizer=str(given.model.resolve()), block_size=model.config.length, max_documents=given.documents,
                   max_tokens=600_000, max_validation_tokens=8192),
        given.output.parent / ".data",
    )  # fmt: skip
    config = RecoveryConfig(steps=given.steps, lr=4e-3, t_max=given.t_max, levels=(0.0,))
    heads = {name: trained_head(model, name, rows(data.train), config) for name in given.heads}
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}

    def keep(found: list[dict[str, Any]]) -> None:
        write_json(given.output, {"command": "benchmarks/latents/estimates.py", "arguments": arguments, "rows": found,
                                  **provenance(1)})  # fmt: skip

    estimates(model, heads, rows(data.validation)[: given.examples], 0, keep)


if __name__ == "__main__":
    main()
