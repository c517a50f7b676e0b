"""From which optimiser does a small T5 form begin to read its source? T5's noise of a text, from scratch, on a CPU.

    python benchmarks/tables/base_start.py wiki-train-0.jsonl.xz OUT.json [--steps 400] [--only "NAME;…"]

128 wide, two layers each, 2,000 tokens of vocabulary, rows of 96 tokens with five spans of two to four, batches of 16.
Beside the loss of other rows stands their loss with the source of another row: where both are equal nothing of the
source is read. About a CPU minute for 400 steps.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

from fathom.data import train_bpe

LENGTH, BATCH, SPANS, SENTINELS = 96, 16, 5, 40
WAYS = {  # optimiser, learning rate, standard deviation of the embeddings over T5's
    "adamw 1e-3": ("adamw", 1e-3, 1.0), "adamw 1e-3, small embeddings": ("adamw", 1e-3, 0.05),
    "adamw 5e-3": ("adamw", 5e-3, 1.0), "adamw 1e-2": ("adamw", 1e-2, 1.0),
    "adafactor, scaled, 1e-2": ("adafactor", 1e-2, 1.0),
}  # fmt: skip


def batch(ids: list[int], vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    """Sources in which spans are sentinels, and targets of the sentinels, each before its span."""
    draw, pad = random.Random(seed), vocabulary - 20
    sources, targets = list[list[int]](), list[list[int]]()
    for _ in range(BATCH):
        at = draw.randrange(len(ids) - LENGTH)
        row, source, target, done = ids[at : at + LENGTH], list[int](), list[int](), 0
        for number, start in enumerate(sorted(draw.sample(range(0, LENGTH - 4, 5), SPANS))):
            stop = start + draw.choice((2, 3, 4))
            source += [*row[done:start], vocabulary - 1 - number]
            target += [vocabulary - 1 - number, *row[start:stop]]
            done = stop
        sources.append(source + row[done:])
        targets.append(target)
    wide, long = max(map(len, sources)), max(map(len, targets))
    return {
        "input_ids": torch.tensor([row + [pad] * (wide - len(row)) for row in sources]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in sources]),
        "labels": torch.tensor([row + [-100] * (long - len(row)) for row in targets]),
    }


def learn(way: str, ids: list[int], vocabulary: int, steps: int) -> dict[str, Any]:
    kind, rate, spread = WAYS[way]
    torch.manual_seed(1)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    model: Any = T5ForConditionalGeneration(
        T5Config(vocab_size=vocabulary, decoder_start_token_id=vocabulary - 20, pad_token_id=vocabulary - 20, **sizes)
    )
    model.shared.weight.data.mul_(spread)
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        if kind == "adamw"
        else Adafactor(model.parameters(), lr=rate, scale_parameter=True, relative_step=False)
    )
    seen, total, began = list[float](), 0.0, time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = model(**batch(ids, vocabulary, step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 100 == 0:
            seen.append(round(total / 100, 3))
            total = 0.0
    model.eval()
    own, other = 0.0, 0.0
    with torch.no_grad():
        for number in range(10):
            given = batch(ids, vocabulary, 10**6 + number)
            turned = given | {name: given[name].roll(1, 0) for name in ("input_ids", "attention_mask")}
            own, other = own + model(**given).loss.item() / 10, other + model(**turned).loss.item() / 10
    return {
        "way": way, "steps": steps, "losses": seen, "other_rows": round(own, 3),
        "with_the_source_of_another_row": round(other, 3), "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", default=";".join(WAYS), help="names parted by ;")
    args = parser.parse_args()
    torch.manual_seed(0)
    with lzma.open(args.texts, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(1500), strict=False)]
    tokenizer = train_bpe(texts[:300], 2000)
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    found = []
    for way in args.only.split(";"):
        found.append(learn(way, ids, len(tokenizer) + SENTINELS, args.steps))
        print(found[-1], flush=True)
        args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
