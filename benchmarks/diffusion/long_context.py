"""How far does a masked model read? LongLLaDA and other rotary scalings beside its autoregressive twin.

    perplexity   of the 64 tokens after a prefix of so many, nothing after them; of the masked model a bound
    passkey      digits of a key said once at some depth of a text, right, by length

python benchmarks/diffusion/long_context.py --masked … --ar … --books books-test-long.jsonl.xz -o long
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "recipes")]
from forced import load, summary
from make_diffusion_text import DIGITS, documents

from caches import keyed
from fathom.diffusion import LongLLaDA
from fathom.diffusion.base import is_diffusion
from fathom.diffusion.likelihood import bound
from fathom.writing import write_json

ANSWER, DRAWS = 64, 8
ROOM = 65_536  # tokens of a batch


def ways(trained: int, base: float) -> dict[str, Any]:
    """Name → what to do to a model: rope_parameters over its own, or LongLLaDA. By value."""
    return {
        "none": {},
        "longllada_4T": LongLLaDA(target=4 * trained),
        "longllada_2T": LongLLaDA(target=2 * trained),
        "longllada_8T": LongLLaDA(target=8 * trained),
        "longllada_4T_bidirectional": LongLLaDA(target=4 * trained, span="bidirectional"),
        "linear_4": {"rope_type": "linear", "factor": 4.0},
        "dynamic_ntk": {"rope_type": "dynamic", "factor": 1.0},
        "yarn_4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained},
        "linear_8": {"rope_type": "linear", "factor": 8.0},
        "yarn_8": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": trained},
    }


def changed(folder: Path, way: Any) -> tuple[Any, float]:
    """The model under a way, and LongLLaDA's λ (1 for the others)."""
    if isinstance(way, LongLLaDA):
        model = load(folder)
        return model, way.apply(model)
    if not way:
        return load(folder), 1.0
    plain = load(folder)
    rope = {**plain.config.rope_parameters, **way}
    return load(folder, rope_parameters=rope), 1.0


@torch.no_grad()
def next_tokens(model: Any, rows: torch.Tensor, prefix: int) -> list[float]:
    """Nats per token of the `ANSWER` tokens after the prefix, by row."""
    rows = rows[:, : prefix + ANSWER]
    found: list[float] = []
    for some in rows.split(max(1, ROOM // rows.shape[1])):
        if is_diffusion(model):
            answer = torch.zeros_like(some, dtype=torch.bool)
            answer[:, prefix:] = True
            own = model.diffusion
            nats, _ = bound(model, some, answer, DRAWS, mask_token_id=own.mask_token_id, shift=own.shift)
            found += (nats / ANSWER).tolist()
        else:
            logits = model(input_ids=some, use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
            found += (-logits.log_softmax(-1).gather(2, some[:, prefix:, None])[..., 0]).double().mean(1).tolist()
    return found


@torch.no_grad()
def digits(model: Any, rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Whether each digit of the key is right, [rows, DIGITS]."""
    found = []
    for some in rows.split(max(1, ROOM // rows.shape[1])):
        prompts = some[:, :-DIGITS]
        if is_diffusion(model):
            out = model.generate(prompts, max_new_tokens=DIGITS, block_length=DIGITS, steps=steps)
        else:
            out = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                min_new_tokens=DIGITS, max_new_tokens=DIGITS,
            )  # fmt: skip
        found.append(out[:, -DIGITS:] == some[:, -DIGITS:])
    return torch.cat(found).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masked", type=Path, required=True)
    parser.add_argument("--ar", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=512)
    parser.add_argument("--rows", type=int, default=24, help="texts of each length, and of each depth")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="unix seconds after which nothing begins")
    parser.add_argument("-o", "--output", type=Path, default=Path("long"))
    given = parser.parse_args()
    trained = given.trained
    tokenizer: Any = AutoTokenizer.from_pretrained(given.masked)
    books = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in islice(documents([given.books]), 10)]
    longest = 8 * trained
    given.output.mkdir(parents=True, exist_ok=True)
    prefixes = [
        n * trained // 8 - ANSWER for n in (2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64) if n * trained // 8 > ANSWER
    ]
    per_book = -(-2 * given.rows // len(books))
    rows = [
        ids[start : start + longest]
        for ids in books
        for start in [round(i * (len(ids) - longest) / per_book) for i in range(per_book)]
    ]
    texts = torch.tensor(rows)
    words = [token for ids in books[:3] for token in ids[:60_000]]
    curves: list[dict[str, Any]] = []
    grids: list[dict[str, Any]] = []
    own = load(given.masked).config
    base = own.rope_parameters["rope_theta"]
    order = [("masked", way) for way in ways(trained, base)]
    order[1:1] = [("autoregressive", "none")]
    order[4:4] = [("autoregressive", "longllada_4T"), ("autoregressive", "longllada_8T")]
    for name, way in order:
        if time.time() > given.deadline:
            break
        model, factor = changed(given.masked if name == "masked" else given.ar, ways(trained, base)[way])
        about = {"model": name, "way": way, "lambda": factor, "base": base}
        ids = texts.to(model.device)
        points = []
        for prefix in prefixes:
            nats = next_tokens(model, ids, prefix)
            points.append({"prefix": prefix, "nats_per_token": summary(nats)})
        curves.append({**about, "points": points})
        write_json(given.output / "perplexity.json", curves)
        cells = []
        for length in [trained, 2 * trained, 3 * trained, 4 * trained, 6 * trained, 8 * trained]:
            for depth in range(6):
                asked = keyed(tokenizer, words, length, depth / 5, given.rows, 100 * depth + length).to(model.device)
                right = digits(model, asked, 4)
                cells.append({
                    "length": length, "depth": depth / 5, "digits": float(right.mean()),
                    "keys": float(right.min(1).values.mean()), "rows": len(asked),
                })  # fmt: skip
        grids.append({**about, "steps": 4, "cells": cells})
        write_json(given.output / "passkey.json", grids)
        if (name, way) == ("masked", "longllada_4T"):
            by_steps = []
            asked = torch.cat([keyed(tokenizer, words, 4 * trained, d / 5, given.rows, d) for d in range(6)])
            for steps in (1, 2, 4, 8):
                right = digits(model, asked.to(model.device), steps)
                by_steps.append({"steps": steps, "digits": summary(right.mean(1).tolist()),
                                 "keys": summary(right.min(1).values.tolist())})  # fmt: skip
            write_json(given.output / "passkey_steps.json", {**about, "length": 4 * trained, "rows": by_steps})


if __name__ == "__main__":
    main()
