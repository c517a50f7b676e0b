"""What an outside model says of sampled texts: perplexity of the continuation after its prompt.

    perplexity = exp(Σ −log p(continuation | prompt) / Σ its tokens),  in the judge's own tokens

A text of few different words wins at it: compare writers at equal entropy (`at_entropy` of fathom.latents.writers).

python benchmarks/diffusion/judge.py samples.jsonl --judge SmolLM2-135M -o judged.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fathom.writing import write_json


@torch.no_grad()
def nats(model: Any, tokenizer: Any, texts: list[list[str]], batch: int = 64) -> list[tuple[float, int]]:
    """−log p of each continuation in nats, and its tokens."""
    found = []
    for at in range(0, len(texts), batch):
        pairs = [
            [tokenizer(part, add_special_tokens=False)["input_ids"] for part in pair] for pair in texts[at : at + batch]
        ]
        start = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
        rows = [start + prompt + new for prompt, new in pairs]
        size = max(map(len, rows))
        ids = torch.tensor([row + [0] * (size - len(row)) for row in rows], device=model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (size - len(row)) for row in rows], device=model.device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses = losses.view(len(rows), -1).double()
        for loss, (prompt, new) in zip(losses, pairs, strict=True):
            found.append((float(loss[len(prompt) : len(prompt) + len(new)].sum()), len(new)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--judge", required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("judged.json"))
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(given.judge, dtype=torch.bfloat16 if cuda else torch.float32)
    model = model.to("cuda" if cuda else "cpu").eval()
    tokenizer = AutoTokenizer.from_pretrained(given.judge)
    rows = []
    for line in given.samples.open(encoding="utf-8"):
        row = json.loads(line)
        found = nats(model, tokenizer, row.pop("texts"))
        total, tokens = sum(n for n, _ in found), sum(count for _, count in found)
        means = torch.tensor([n / max(1, count) for n, count in found], dtype=torch.float64)
        row |= {"perplexity": math.exp(total / tokens), "log_error": float(means.std() / len(means) ** 0.5)}
        rows.append(row)
    write_json(given.output, rows)


if __name__ == "__main__":
    main()
