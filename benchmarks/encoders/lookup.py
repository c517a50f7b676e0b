"""How far an encoder's tokens see: answers found by the distance between a question and its pair.

    python benchmarks/encoders/lookup.py RUNS --rows runs/lookup/held-out.jsonl -o OUT.json

Every `model` folder below RUNS (of recipes/encoders_lookup.yaml) gets the target's own beginning and says the
likeliest next token. Counted are the digits, each asked for at a distance of its own. Of `--glued` rows a quarter is
right by chance, and half by knowing the two digits of the capital that is asked for; of other rows a tenth is right by
chance. The file is written after every model.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fathom  # noqa: F401  registers the Auto classes
from fathom.writing import write_json

EDGES = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 20)
CUDA = torch.cuda.is_available()


@torch.no_grad()
def answers(folder: Path, rows: list[dict[str, Any]], batch: int) -> list[tuple[int, bool]]:
    """(distance, found) of every question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to("cuda" if CUDA else "cpu").eval()
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")), device=model.device)
    found: list[tuple[int, bool]] = []
    for at in range(0, len(rows), batch):
        some = rows[at : at + batch]
        given = tokenizer([row["source"] for row in some], add_special_tokens=False, padding=True, return_tensors="pt")
        asked = tokenizer([row["target"] for row in some], add_special_tokens=False, padding=True, return_tensors="pt")
        labels = asked.input_ids.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=CUDA):
            logits = model(
                input_ids=given.input_ids.to(model.device), attention_mask=given.attention_mask.to(model.device),
                labels=labels,
            ).logits  # fmt: skip
        right, answer = logits.argmax(-1) == labels, torch.isin(labels, digits)  # of "q7Cr3A…" every digit is one
        for row, said, here in zip(some, right, answer, strict=True):
            found += [(abs(far), hit) for far, hit in zip(row["distances"], said[here].tolist(), strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000, help="rows")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.open(encoding="utf-8")][: args.count]
    done: dict[str, Any] = json.loads(args.output.read_text())["models"] if args.output.exists() else {}
    for folder in sorted(found for found in args.runs.glob("**/model") if (found / "config.json").exists()):
        key = "/".join(folder.parts[-3:-1])
        if key in done:
            continue
        said = answers(folder, rows, args.batch)
        bins = []
        for low, high in itertools.pairwise(EDGES):
            hits = [hit for far, hit in said if low <= far < high]
            bins.append({"from": low, "questions": len(hits), "found": sum(hits) / max(1, len(hits))})
        done[key] = {"found": sum(hit for _, hit in said) / len(said), "by_distance": bins}
        print(key, round(done[key]["found"], 3), [round(cell["found"], 3) for cell in bins], flush=True)
        write_json(args.output, {"rows": len(rows), "edges": list(EDGES[:-1]), "models": done})


if __name__ == "__main__":
    main()
