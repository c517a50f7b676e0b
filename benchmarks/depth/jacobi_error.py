"""How fast Jacobi sweeps approach sequential decoding, on a trained PonderLM-2 or PonderLM-3 checkpoint.

    python benchmarks/depth/jacobi_error.py runs/…/model --out docs/results/jacobi_error_ponderlm2

Writes OUT.json and OUT.png: the RMSE of the predicting states after J = 0, 1, … sweeps against token-by-token decoding,
relative to the latter's RMS, over all tokens and over thirds of the window; the loss after J sweeps; the factor a
sweep, fitted while the error is between a tenth of its first value and ten times its floor (the papers: 0.345 for
PonderLM-2, 0.433 for PonderLM-3); and, of sweeping until the thoughts have settled, how many sweeps that takes, what
error is left, and its time over that of three sweeps. The weights run in float64 on a CPU and in fp32 on a GPU, unless
--dtype says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from speed import environment

from fathom.data.sources import Source
from fathom.evaluate.load_model import load_checkpoint
from fathom.report.style import COLOURS

PAPER = {"ponderlm2": 0.345, "ponderlm3": 0.433}


def windows(text: Source, tokenizer: Any, count: int, length: int) -> torch.Tensor:
    """The first `count` windows of `length` tokens of the text."""
    ids: list[int] = []
    for document in text.documents():
        ids += tokenizer(document, add_special_tokens=False).input_ids
        if len(ids) >= count * length:
            return torch.tensor(ids[: count * length]).view(count, length)
    raise ValueError(f"--windows {count} × --length {length}: the text has only {len(ids)} tokens")


@torch.no_grad()
def outcome(model: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, float]:
    """What the depth method returns, and the mean loss, under changed options of it."""
    trained, seen = model.depth.options, []
    model.depth.options = dataclasses.replace(trained, tolerance=None, **options)
    hook = model.depth.register_forward_hook(lambda module, inputs, out: seen.append(out))
    try:
        loss = model(ids, labels=ids, use_cache=False).loss.item()
    finally:
        hook.remove()
        model.depth.options = trained
    return seen[0], loss


def rmse(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual - exact).square().mean() / exact.square().mean()).sqrt().item()


def factor(errors: list[float]) -> float | None:
    """exp of the slope of log error by least squares, past the first steps and above the floor of rounding."""
    floor = 10 * min(errors)
    points = [(j, math.log(e)) for j, e in enumerate(errors) if floor < e <= errors[0] / 10]
    if len(points) < 2:
        points = [(j, math.log(e)) for j, e in enumerate(errors) if e > floor]
    if len(points) < 2:
        return None
    mean_j = sum(j for j, _ in points) / len(points)
    slope = sum((j - mean_j) * e for j, e in points) / sum((j - mean_j) ** 2 for j, _ in points)
    return math.exp(slope)


def measure(model: Any, ids: torch.Tensor, sweeps: int) -> dict[str, Any]:
    found, exact_loss = outcome(model, ids, prefill="sequential")
    exact = found.hidden_states
    third = ids.shape[1] // 3
    rows = []
    for j in range(sweeps + 1):
        found, loss = outcome(model, ids, prefill="jacobi", sweeps=j)
        states = found.hidden_states
        parts = [rmse(states[:, i * third : (i + 1) * third], exact[:, i * third : (i + 1) * third]) for i in range(3)]
        rows.append({"sweeps": j, "relative_rmse": rmse(states, exact), "by_third": parts, "loss": loss})
        print(f"J = {j:2}: relative RMSE {rows[-1]['relative_rmse']:.3e}  loss {loss:.5f}", flush=True)
    errors = [row["relative_rmse"] for row in rows]
    return {
        "sequential_loss": exact_loss,
        "factor": factor(errors),
        "settled": settled(model, ids, exact),
        "rows": rows,
    }


def settled(model: Any, ids: torch.Tensor, exact: torch.Tensor, repeats: int = 5) -> dict[str, Any]:
    """Errors and times of sweeping until thoughts have settled; times are the best of several, in turns with three
    sweeps.
    """
    seconds: dict[int | None, float] = {}
    for sweeps in (None, 3) * repeats:
        if ids.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        out, loss = outcome(model, ids, prefill="jacobi", sweeps=sweeps)
        seconds[sweeps] = min(time.perf_counter() - start, seconds.get(sweeps, math.inf))
        if sweeps is None:
            found = {
                "sweeps": out.trace["sweeps"].max().item(),
                "relative_rmse": rmse(out.hidden_states, exact),
                "loss": loss,
            }
    found |= {"seconds": seconds[None], "times_three_sweeps": seconds[None] / seconds[3]}
    print("settled: {sweeps} sweeps, {relative_rmse:.3e}, {times_three_sweeps:.2f} x J = 3".format(**found), flush=True)
    return found


def draw(found: dict[str, Any], name: str, path: Path) -> None:
    figure = Figure(figsize=(5.5, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    js, errors = zip(*((row["sweeps"], row["relative_rmse"]) for row in found["rows"]))
    measured = f"{name}, × {found['factor']:.3f} a sweep" if found["factor"] else name
    axes.semilogy(js, errors, marker="o", color=COLOURS[0][0], label=measured)
    axes.semilogy(
        js, [errors[0] * PAPER[name] ** j for j in js], "--", color=COLOURS[5][0], label=f"paper, × {PAPER[name]}"
    )
    axes.set_ylim(min(errors) / 3, errors[0] * 3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("Jacobi sweeps J")
    axes.set_ylabel("RMSE of the states / their RMS")
    axes.grid(color="#e3e7ec")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", required=True, type=Path, help="without ending")
    parser.add_argument("--text", default="embedded", help="held-out text: a file or folder, or the embedded corpus")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, help="tokens of a window; default: as trained")
    parser.add_argument("--sweeps", type=int, default=16)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"))
    args = parser.parse_args()
    model, tokenizer = load_checkpoint(args.checkpoint)
    name = model.config.depth["name"] if hasattr(model.config, "depth") else "another model"
    if name not in PAPER:
        raise SystemExit(f"{args.checkpoint}: depth={name!r} has no Jacobi sweeps; give one of {', '.join(PAPER)}")
    device = model.device.type
    dtype = args.dtype or ("float64" if device == "cpu" else "float32")
    model = model.to(getattr(torch, dtype))
    length = args.length or model.config.max_position_embeddings
    ids = windows(Source(args.text, argument="validation"), tokenizer, args.windows, length).to(model.device)
    found = measure(model, ids, args.sweeps)
    setting = {"depth": model.config.depth, "windows": args.windows, "length": length, "dtype": dtype}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(
        json.dumps({"environment": environment(device), **setting, **found}, indent=1) + "\n"
    )
    draw(found, name, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
