"""How models see past the length they were trained at: nats by position on whole books, and retrieval by length.

    python benchmarks/positions/length.py RUNS --text books.jsonl -o OUT.json     RUNS: folders of `fathom compare`
    python benchmarks/positions/length.py RUNS --text books.jsonl -o OUT.json --tiny     CPU: all lines run

Every `model` folder below RUNS is read as it is, and again with its angles stretched, without more training
(`--stretch`):

    none     as trained
    ntk      rope_theta · factor^(d / (d − 2))           (base changed as NTK-aware scaling does)
    linear   positions divided by the factor             (PI)
    yarn     transformers' YaRN

`nats` are means over windows of a book, by bucket of the position in the window: one row a book, so that intervals can
be taken over books. `keys` are the questions of recipes/make_retrieval.py over texts of just so many tokens: the share
of numbers that are right by the likeliest tokens, and their nats. With `--noise`, RoPE++ once more at the trained
length, with Gaussian noise on the rotated queries of its real heads, and of its imaginary ones. `--tasks` adds those of
`fathom.evaluate.evaluate_long`, with book text as filler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fathom  # noqa: F401  registers the Auto classes
from fathom.data.packing import encode
from fathom.evaluate import evaluate_long, nats_by_position, read_documents
from fathom.inspect.head_map import noisy
from fathom.writing import write_json

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from make_retrieval import BETWEEN, KEYS, question, statement


def stretched(config: Any, how: str, factor: float, trained: int) -> Any:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if how == "ntk":
        rope["rope_theta"] = rope["rope_theta"] * factor ** (config.head_dim / (config.head_dim - 2))
    elif how == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif how == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    config.rope_parameters = rope
    return config


def asked(tokenizer: Any, length: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Ids of four statements in a text of small talk that ends with a question, `length` tokens, and its number."""
    numbers = {key: str(draw.randrange(1000, 10000)) for key in draw.sample(KEYS, 4)}
    facts = [tokenizer(" " + statement(key, n), add_special_tokens=False).input_ids for key, n in numbers.items()]
    key = draw.choice(list(numbers))
    end = tokenizer(" " + question(key), add_special_tokens=False).input_ids
    talk = [tokenizer(" " + sentence, add_special_tokens=False).input_ids for sentence in BETWEEN]
    room = length - sum(map(len, facts)) - len(end)
    parts: list[list[int]] = []
    while room > 0:
        parts.append(draw.choice(talk)[:room])
        room -= len(parts[-1])
    for fact in facts:
        parts.insert(draw.randint(0, len(parts)), fact)
    answer = tokenizer(" " + numbers[key], add_special_tokens=False).input_ids
    return [*itertools.chain(*parts), *end], answer


@torch.no_grad()
def keys_by_length(model: Any, tokenizer: Any, lengths: list[int], count: int) -> dict[str, dict[str, float]]:
    """Share of the numbers that are right, and nats of a number, in texts of each length."""
    found = {}
    for length in lengths:
        right, nats = 0, 0.0
        for number in range(count):
            ids, answer = asked(tokenizer, length, random.Random(f"{length} {number}"))
            row = torch.tensor([ids + answer], device=model.device)
            logits = model(row[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0].float()
            right += int((logits.argmax(-1) == row[0, -len(answer) :]).all())
            nats += float(F.cross_entropy(logits, row[0, -len(answer) :], reduction="sum"))
        found[str(length)] = {"right": right / count, "nats": nats / count, "count": count}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="books: JSON lines with `text`, each long enough")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=1024, help="tokens of a training row")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--stretch", default="none,ntk,linear")
    parser.add_argument("--tasks", default="", help="such as passkey,niah_single")
    parser.add_argument("--samples", type=int, default=100, help="of every task and length")
    parser.add_argument("--noise", default="", help="standard deviations, such as 0.5,1")
    parser.add_argument("--windows", type=int, default=4, help="of each book")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiny:
        args.longest, args.samples, args.windows = 2 * args.trained, 2, 1
    edges = [0, args.trained // 4, args.trained // 2]
    while edges[-1] < args.longest:
        edges.append(2 * edges[-1])
    texts = read_documents(args.text)[: 2 if args.tiny else None]
    done: dict[str, Any] = json.loads(args.output.read_text())["models"] if args.output.exists() else {}
    folders = sorted(
        {found for runs in args.runs for found in runs.glob("**/model") if (found / "config.json").exists()}
    )
    for folder in folders:
        key = "/".join(folder.parts[-4:-1])
        if key in done:
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        books = encode(texts, tokenizer)
        books = [ids for ids in books if len(ids) > args.longest]
        if not books:
            raise SystemExit(f"{args.text}: no text of more than {args.longest} tokens; use a smaller --longest")
        row: dict[str, Any] = {}
        for how in args.stretch.split(","):
            began, config = time.perf_counter(), AutoConfig.from_pretrained(folder)
            if how != "none" and config.positions["name"] in ("alibi", "learned", "fope"):
                continue  # no angles to stretch, or angles that are learned weights
            factor = args.longest / args.trained
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=stretched(config, how, factor, args.trained), dtype=torch.bfloat16
            )
            model = model.to(device).eval()
            lengths = [n for n in edges if n >= args.trained // 2]
            row[how] = {
                "nats": nats_by_position(model, books, edges, args.windows),
                "keys": keys_by_length(model, tokenizer, lengths, args.samples),
            }
            print(key, how, [round(sum(c) / len(books), 3) for c in zip(*row[how]["nats"])], flush=True)
            print("   ", {n: cell["right"] for n, cell in row[how]["keys"].items()}, flush=True)
            if args.tasks:
                names, filler = args.tasks.split(","), texts[0][:400_000]
                found = evaluate_long(model, tokenizer, names, lengths, filler, count=args.samples, batch_size=10)
                row[how]["retrieval"] = found["tasks"]
            if args.noise and how == "none" and config.positions["name"] == "rope_pp":
                row["noise"] = {}
                for heads, scale in itertools.product(("real", "imaginary"), map(float, args.noise.split(","))):
                    with noisy(model, heads, scale):
                        torch.manual_seed(0)
                        near = nats_by_position(model, books, [e for e in edges if e <= args.trained], args.windows)
                        told = keys_by_length(model, tokenizer, [args.trained], args.samples)
                    row["noise"][f"{heads} {scale}"] = {"nats": near, "keys": told}
                    print("    noise", heads, scale, [sum(c) / len(books) for c in zip(*near)], told, flush=True)
            row[how]["seconds"] = round(time.perf_counter() - began, 1)
        done[key] = row
        where = {"trained": args.trained, "edges": edges, "books": len(books), "windows": args.windows}
        where |= {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        write_json(args.output, {"setting": where, "models": done})


if __name__ == "__main__":
    main()
