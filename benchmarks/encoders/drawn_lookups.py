"""Which encoder attention finds what stood before, on rows drawn as they are needed: minutes on one CPU core.

    python benchmarks/encoders/drawn_lookups.py -o OUT.json                                        32 tokens
    python benchmarks/encoders/drawn_lookups.py -o OUT.json --length 512 --block 16 --layers 2 --growing --steps 8000

A row has four capitals twice, each with a digit of four (a pair is one token), once before all questions and once
behind them with another digit. Six questions (q, capital), one token each; the target is "q digit capital" for each.
The digit before the question is right. A decoder of one layer that has all pairs knows both digits and is right half of
the time: the rest is what the encoder brings to the question's place. LongT5's form from scratch, all encoders with one
rate; the file is written after each. A batch has the same number of tokens at every length; with `--growing` lengths
double from 32 on, each for an equal share of the steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom import FathomLongT5Config
from fathom.models.seq2seq_longt5 import FathomLongT5ForConditionalGeneration
from fathom.writing import write_json

CAPITALS, DIGITS, QUESTIONS, FILLERS = 4, 4, 6, 8
PAIR = 2 + FILLERS  # first token of each kind; 0 is padding, 1 begins and ends
ASKED = PAIR + CAPITALS * DIGITS
NAME = ASKED + QUESTIONS * CAPITALS
DIGIT = NAME + QUESTIONS
CAPITAL = DIGIT + DIGITS
VOCABULARY = CAPITAL + CAPITALS
SHORTEST = 32
EDGES = (0, 8, 16, 32, 64, 128, 256, 512, 1 << 20)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENDS = float(os.environ.get("STOP", "inf"))  # unix seconds: no encoder begins later


def rows(count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources [B, N], targets [B, 3·questions] and how far each question is behind its pair [B, questions]."""
    source = torch.randint(2, PAIR, (count, length))
    digit = torch.randint(DIGITS, (count, CAPITALS))
    asked = torch.randint(CAPITALS, (count, QUESTIONS))
    other = (digit + torch.randint(1, DIGITS, (count, CAPITALS))) % DIGITS
    place = torch.rand(count, length).argsort(1)[:, : 2 * CAPITALS + QUESTIONS].sort(1).values
    parts = place.split((CAPITALS, QUESTIONS, CAPITALS), dim=1)
    before, middle, behind = (part.gather(1, torch.rand(part.shape).argsort(1)) for part in parts)
    first = PAIR + torch.arange(CAPITALS) * DIGITS
    source.scatter_(1, before, first + digit).scatter_(1, behind, first + other)
    source.scatter_(1, middle, ASKED + torch.arange(QUESTIONS) * CAPITALS + asked)
    names = (NAME + torch.arange(QUESTIONS)).expand(count, -1)
    target = torch.stack((names, DIGIT + digit.gather(1, asked), CAPITAL + asked), dim=2).flatten(1)
    return source.to(DEVICE), target.to(DEVICE), middle - before.gather(1, asked)


def encoder(name: str, block: int) -> dict[str, Any]:
    """Fields of LongT5's config."""
    longt5 = {"encoder": "full", "encoder_attention_type": name, "local_radius": block - 1, "global_block_size": block}
    options: dict[str, dict[str, Any]] = {
        "full": {"stop_level": 1}, "fovea": {}, "fovea-fill": {"boundary": "fill"},
        "fovea-two": {"steps": "two", "stop_level": 4},
    }  # fmt: skip
    return {"encoder": {"name": "fovea", "block_len": block, **options[name]}} if name in options else longt5


def found(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """Which digits the model says, each after the target's own beginning [B, questions]."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(input_ids=source, labels=target).logits
    return logits[:, 1::3].argmax(-1) == target[:, 1::3]


def learn(name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    width = args.width
    config = FathomLongT5Config(
        vocab_size=VOCABULARY, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=args.layers,
        num_decoder_layers=1, num_heads=4, dropout_rate=0.0, relative_attention_max_distance=32,
        decoder_start_token_id=1, pad_token_id=0, eos_token_id=1, embedding_std=1.0, **encoder(name, args.block),
    )  # fmt: skip
    model: Any = FathomLongT5ForConditionalGeneration(config)
    model.to(DEVICE)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
    lengths = [SHORTEST]
    while args.growing and lengths[-1] < args.length:
        lengths.append(2 * lengths[-1])
    lengths = lengths if args.growing else [args.length]
    began, losses = time.perf_counter(), []
    for step in range(args.steps):
        fall = (args.steps - step) / (0.4 * args.steps)  # constant, and down to a twentieth over the last two fifths
        rate = args.lr * min(1.0, (step + 1) / 50) * (1.0 if step < 0.6 * args.steps else max(0.05, fall))
        for group in optimiser.param_groups:
            group["lr"] = rate
        length = lengths[step * len(lengths) // args.steps]
        source, target, _ = rows(max(1, args.tokens // length), length)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(input_ids=source, labels=target).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 49:
            losses.append(round(loss.item(), 3))
    model.eval()
    hits, far = [], []
    with torch.no_grad():
        for _ in range(16):
            source, target, distance = rows(32, args.length)
            hits.append(found(model, source, target).float().cpu().flatten())
            far.append(distance.flatten())
    hit, away = torch.cat(hits), torch.cat(far)
    bins = []
    for low, high in itertools.pairwise(EDGES):
        inside = (away >= low) & (away < high)
        if inside.any():
            bins.append({"from": low, "questions": int(inside.sum()), "found": round(float(hit[inside].mean()), 4)})
    return {
        "found": round(float(hit.mean()), 4), "questions": len(hit), "by_distance": bins, "losses_every_50": losses,
        "seconds": round(time.perf_counter() - began),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", default=["full", "fovea", "local", "transient-global", "fovea-fill"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--length", type=int, default=SHORTEST)
    parser.add_argument("--growing", action="store_true")
    parser.add_argument("--block", type=int, default=4, help="tokens of a block, in local attention, too")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=1024, help="of a batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    setting = {key: value for key, value in vars(args).items() if key not in ("output", "encoders", "seeds")}
    done: dict[str, Any] = {}
    for seed in args.seeds:
        for name in args.encoders:
            if time.time() < ENDS:
                done[f"{name} {seed}"] = learn(name, args, seed)
                print(name, seed, done[f"{name} {seed}"]["found"], flush=True)
                write_json(args.output, {"setting": setting, "device": DEVICE, "runs": done})


if __name__ == "__main__":
    main()
