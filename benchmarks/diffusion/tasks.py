"""Tasks whose right answer is known (recipes/make_diffusion_tasks.py): policies at equal passes, and keys from afar.

    chains     digits right by policy and number of passes, beside the autoregressive twin; in which order they came
    walks      the same of walks
    countdown  problems solved, by any right answer
    passkey    digits of a key right, by length and depth of a text, under rotary scalings

python benchmarks/diffusion/tasks.py chains --masked runs/…/model --ar runs/…/model -o chains.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "recipes")]
from forced import ORDERS, compared, load, summary
from long_context import changed
from make_diffusion_tasks import DIGITS, KEYS, NUMBERS, chain, countdown, depths, distances, passkey, solves, walk

from fathom.diffusion import POLICIES, Fourier, LongLLaDA
from fathom.diffusion.base import is_diffusion, own_blocks
from fathom.report.provenance import provenance
from fathom.writing import write_json

WAYS: dict[str, Any] = {
    **ORDERS,
    "fourier_history1": Fourier(history_size=1),  # β is the largest in every step
    "fourier_constant": Fourier(beta_min=0.5, beta_max=0.5),
    "threshold_0.9": POLICIES["threshold"](threshold=0.9),
    "entropy_bounded_0.1": POLICIES["entropy_bounded"](bound=0.1),
}


@torch.no_grad()
def written(model: Any, prompts: torch.Tensor, length: int, batch: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """The answers' tokens [rows, length], and of a diffusion model (revealing steps, passes a row)."""
    found, steps, passes = [], [], 0.0
    for some in prompts.split(batch):
        if is_diffusion(model):
            room = -(-length // (own_blocks(model) or length)) * (own_blocks(model) or length)
            options = {"block_length": own_blocks(model) or length, **options}
            out = model.generate(some, max_new_tokens=room, return_dict_in_generate=True, **options)
            found.append(out.sequences[:, prompts.shape[1] :][:, :length])
            steps.append(out.revealed[:, prompts.shape[1] :][:, :length])
            passes += sum(out.nfe.values()) * len(some) / len(prompts)
        else:
            out = model.generate(
                some, attention_mask=torch.ones_like(some), do_sample=False, min_new_tokens=length,
                max_new_tokens=length,
            )  # fmt: skip
            found.append(out[:, prompts.shape[1] :])
    return torch.cat(found), (torch.cat(steps), passes) if steps else None


def policies(given: Any, tokenizer: Any, late: Any) -> None:
    make, sums = {"chains": (chain, depths), "walks": (walk, distances)}[given.task]
    draw = random.Random(99)
    pairs = [make(draw, given.variables) for _ in range(given.rows)]
    asked = torch.tensor([tokenizer(prompt)["input_ids"] for prompt, _ in pairs])
    answers = torch.tensor([tokenizer(answer)["input_ids"] for _, answer in pairs])
    deep = torch.tensor([sums(prompt) for prompt, _ in pairs])
    size, found = given.variables, []
    for name, folder in models(given):
        model = load(folder)
        prompts, truth = asked.to(model.device), answers.to(model.device)
        ways: list[tuple[str, int]] = [("", size)]
        if is_diffusion(model):
            tries = sorted({max(1, size // n) for n in (1, 2, 4, 8)}, reverse=True)
            ways = [
                (policy, steps)
                for steps in tries
                for policy in given.orders
                if steps == size or "bounded" not in policy
            ]
            if own_blocks(model):
                ways = [(policy, size) for policy in ("low_confidence", "random", "left_to_right")]
        base: dict[int, list[float]] = {}
        for policy, steps in ways:
            if late():
                return
            options = {"policy": WAYS[policy], "steps": steps} if policy else {}
            out, about = written(model, prompts, size, 512, **options)
            right = (out == truth).double()
            each = right.mean(1).tolist()
            base.setdefault(steps, each)
            row: dict[str, Any] = {"model": name, "policy": policy, "steps": steps, "digits": summary(each)}
            row |= {"all": summary(right.min(1).values.tolist()), "over_first": compared(each, base[steps], 1)}
            reached = range(int(deep.max()) + 1)
            row["digits_by_depth"] = [float(right.cpu()[deep == depth].mean()) for depth in reached]
            if about is not None:
                steps_of = about[0].cpu().double()
                row |= {"nfe": about[1], "mean_step_by_depth": [float(steps_of[deep == d].mean()) for d in reached]}
            found.append(row)
            write_json(given.output, {"rows": len(asked), "variables": size, "found": found})


def problems(given: Any, tokenizer: Any, late: Any) -> None:
    """Held-out problems of countdown."""
    draw = random.Random(99)
    prompts = [countdown(draw, held_out=True)[0] for _ in range(given.rows)]
    asked, size = torch.tensor(tokenizer(prompts)["input_ids"]), 4 * (NUMBERS - 1)
    found: list[dict[str, Any]] = []
    for name, folder in models(given):
        model = load(folder)
        ways = [("", size)]
        if is_diffusion(model):
            ways = [
                (policy, size // n) for n in (1, 2, 4) for policy in given.orders if n == 1 or "bounded" not in policy
            ]
        base: dict[int, list[float]] = {}
        for policy, steps in ways:
            if late():
                return
            options = {"policy": WAYS[policy], "steps": steps} if policy else {}
            out, about = written(model, asked.to(model.device), size, 512, **options)
            right = [float(solves(prompt, tokenizer.decode(row))) for prompt, row in zip(prompts, out, strict=True)]
            base.setdefault(steps, right)
            row = {"model": name, "policy": policy, "steps": steps, "solved": summary(right)}
            row["over_first"] = compared(right, base[steps])
            if about is not None:
                row |= {"nfe": about[1], "mean_step": about[0].double().mean(0).tolist()}
            found.append(row)
            write_json(given.output, {"rows": len(prompts), "found": found, **provenance(1)})


def keys(given: Any, tokenizer: Any, late: Any) -> None:
    trained, found = given.trained, []
    ways: dict[str, Any] = {
        "none": {},
        "longllada_2T": LongLLaDA(target=2 * trained),
        "longllada_4T": LongLLaDA(target=4 * trained),
        "longllada_8T": LongLLaDA(target=8 * trained),
        "longllada_4T_bidirectional": LongLLaDA(target=4 * trained, span="bidirectional"),
        "linear_4": {"rope_type": "linear", "factor": 4.0},
        "yarn_4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained},
        "dynamic_ntk": {"rope_type": "dynamic", "factor": 1.0},
    }
    asked = {}
    for length in [trained * n // 2 for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= 2 * given.longest]:
        for eighth in range(8):
            draw = random.Random(1000 * length + eighth)
            rows = [passkey(draw, length, given.keys, 1, eighth / 7, given.key_digits) for _ in range(given.rows)]
            asked[length, eighth / 7] = [torch.tensor(tokenizer([row[i] for row in rows])["input_ids"]) for i in (0, 1)]
    for way, name, folder in [(way, name, folder) for way in ways for name, folder in models(given)]:
        if late():
            return
        model, factor = changed(folder, ways[way])
        cells = []
        for (length, depth), pair in asked.items():
            prompts, truth = (x.to(model.device) for x in pair)
            right = (written(model, prompts, given.key_digits, max(1, 65_536 // length))[0] == truth).double()
            cells.append({
                "length": length, "depth": depth, "digits": summary(right.mean(1).tolist()),
                "keys": summary(right.min(1).values.tolist()),
            })  # fmt: skip
        found.append({"model": name, "way": way, "lambda": factor, "cells": cells})
        write_json(given.output, {"rows": given.rows, "trained": trained, "keys": given.keys, "found": found})


def models(given: Any) -> list[tuple[str, Path]]:
    named = (("masked", given.masked), ("autoregressive", given.ar), ("block", given.block))
    return [(f"{name}-{i}" if len(folders) > 1 else name, folder)
            for name, folders in named for i, folder in enumerate(folders)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["chains", "walks", "countdown", "passkey"])
    for name in ("masked", "ar", "block"):
        parser.add_argument(f"--{name}", type=Path, nargs="*", default=[], help="trained models, one a seed")
    parser.add_argument("--rows", type=int, default=1024, help="rows, or texts of each length and depth")
    parser.add_argument("--variables", type=int, default=16)
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--key-digits", type=int, default=DIGITS)
    parser.add_argument("--longest", type=int, default=8, help="texts of at most so many times the trained length")
    parser.add_argument("--orders", nargs="+", choices=list(WAYS), default=list(WAYS), help="policies to compare")
    parser.add_argument("--trained", type=int, default=512)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="unix seconds after which nothing begins")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained((given.masked + given.ar + given.block)[0])
    late = lambda: time.time() > given.deadline  # noqa: E731
    {"passkey": keys, "countdown": problems}.get(given.task, policies)(given, tokenizer, late)


if __name__ == "__main__":
    main()
