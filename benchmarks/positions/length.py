"""How models see past the length they were trained at: nats by position on whole books, and retrieval by length.

    python benchmarks/positions/length.py RUNS --text books.jsonl -o OUT.json     RUNS: folders of `fathom compare`
    python benchmarks/positions/length.py RUNS --text books.jsonl -o OUT.json --tiny     CPU: all lines run

Every `model` folder below RUNS is read as it is, and again with its angles stretched, without more training
(`--stretch`):

    none     as trained
    ntk      rope_theta · factor^(d / (d − 2))           (base changed as NTK-aware scaling does)
    linear   positions divided by the factor             (PI)

`nats` are means over windows of a book, by bucket of the position in the window: one row a book, so that intervals can
be taken over books. Retrieval is `fathom.evaluate.evaluate_long`, with book text as filler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fathom  # noqa: F401  registers the Auto classes
from fathom.data.packing import encode
from fathom.evaluate import evaluate_long, read_documents
from fathom.writing import write_json


def stretched(config: Any, how: str, factor: float) -> Any:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if how == "ntk":
        rope["rope_theta"] = rope["rope_theta"] * factor ** (config.head_dim / (config.head_dim - 2))
    elif how == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    config.rope_parameters = rope
    return config


@torch.no_grad()
def nats_by_position(model: Any, books: list[torch.Tensor], edges: list[int], windows: int) -> list[list[float]]:
    """Mean −log p of each bucket [edges[i], edges[i + 1]) of a window's positions: one row a book."""
    length, rows = edges[-1], []
    for ids in books:
        starts = [round(i * (len(ids) - length - 1) / max(windows - 1, 1)) for i in range(windows)]
        total = torch.zeros(length, dtype=torch.float64)
        for start in starts:
            piece = ids[start : start + length + 1].to(model.device)
            logits = model(piece[None, :-1], use_cache=False).logits[0]
            total += F.cross_entropy(logits.float(), piece[1:], reduction="none").double().cpu()
        mean = total / len(starts)
        rows.append([float(mean[a:b].mean()) for a, b in itertools.pairwise(edges)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="books: JSON lines with `text`, each long enough")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=1024, help="tokens of a training row")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--stretch", default="none,ntk,linear")
    parser.add_argument("--tasks", default="passkey,niah_single")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--windows", type=int, default=4, help="of each book")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiny:
        args.longest, args.samples, args.windows = 2 * args.trained, 2, 1
    edges = [0, args.trained // 4, args.trained // 2]
    while edges[-1] < args.longest:
        edges.append(2 * edges[-1])
    texts = read_documents(args.text)
    done: dict[str, Any] = json.loads(args.output.read_text())["models"] if args.output.exists() else {}
    folders = sorted(
        {found for runs in args.runs for found in runs.glob("**/model") if (found / "config.json").exists()}
    )
    for folder in folders:
        key = "/".join(folder.parts[-3:-1])
        if key in done:
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        books = [torch.tensor(ids) for ids in encode(texts, tokenizer)]
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
                folder, config=stretched(config, how, factor), dtype=torch.bfloat16
            )
            model = model.to(device).eval()
            lengths = [n for n in edges if n >= args.trained // 2]
            found = evaluate_long(
                model, tokenizer, args.tasks.split(","), lengths, texts[0][:400_000], count=args.samples, batch_size=10
            )
            row[how] = {"nats": nats_by_position(model, books, edges, args.windows), "retrieval": found["tasks"]}
            print(key, how, [round(sum(c) / len(books), 3) for c in zip(*row[how]["nats"])], flush=True)
            print(
                "   ", {t: [s["score"] for s in v["generation"]["lengths"].values()] for t, v in found["tasks"].items()}
            )
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
