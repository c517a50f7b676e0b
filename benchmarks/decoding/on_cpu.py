"""What `generate()` gives on one CPU thread: beside transformers' loop, and with drafts of fewer passes.

    python benchmarks/decoding/on_cpu.py OUT.json [MODEL …]

`loops`: 64 tokens after 32, one row, 256 × 6, random weights: a stock Llama in transformers' loop, and a vanilla model
of ours in theirs and in ours, taking turns. `drafts`: every looped or pondering MODEL (a folder) with fewer passes, 2
and 4 tokens at a time, greedy and sampled. Times are of the process, not of the clock, so that others on the machine
count less.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.decoding import switch
from fathom.report.provenance import provenance

SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
PROMPTS = ("The old man", "Once upon a time", "She looked at")
OPTIONS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}


def spent(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[float, torch.Tensor]:
    """Milliseconds of CPU a token, and the text."""
    start = time.process_time()
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **OPTIONS, **options)
    return 1000 * (time.process_time() - start) / new, text


def loops(turns: int = 10) -> dict[str, float]:
    torch.manual_seed(0)
    stock, ours = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), FathomForCausalLM(FathomConfig(**SIZES)).eval()
    ids = torch.randint(3, 4096, (1, 32))
    found: dict[str, list[float]] = {"llama, theirs": [], "vanilla, theirs": [], "vanilla, ours": []}
    for turn in range(turns + 1):
        for name, times in found.items():
            switch.FAST = name.endswith("ours")
            took, _ = spent(ours if name.startswith("vanilla") else stock, ids, 64, do_sample=False)
            if turn:
                times.append(took)
    switch.FAST = True
    return {name: statistics.median(times) for name, times in found.items()}


def drafts(folder: str, new: int = 60) -> list[dict[str, Any]]:
    model, tokenizer = FathomForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for sampled in (False, True):
        for passes in range(1, model.depth.options.passes):
            for tokens in (2, 4):
                counts, times = {"drafted": 0, "accepted": 0, "forwards": 0}, [0.0, 0.0]
                for seed, prompt in enumerate(PROMPTS):
                    ids, texts = tokenizer(prompt, return_tensors="pt").input_ids, []
                    for drafted in (0, 1):
                        torch.manual_seed(seed)
                        options = {"draft_passes": passes, "draft_tokens": tokens} if drafted else {}
                        took, text = spent(model, ids, new, do_sample=sampled, **options)
                        times[drafted] += took
                        texts.append(text)
                    assert sampled or torch.equal(*texts)
                    for name in counts:
                        counts[name] += getattr(model.speculation, name)
                row: dict[str, Any] = {"model": model.config.depth, "sampled": sampled, "draft_passes": passes}
                row |= {"draft_tokens": tokens, **counts, "rate": counts["accepted"] / counts["drafted"]}
                row["tokens_a_full_forward"] = new * len(PROMPTS) / counts["forwards"]
                row["speed"] = times[0] / times[1]
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    output, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, Any] = {"command": "python benchmarks/decoding/on_cpu.py", **provenance(0)}
    found["loops"] = loops()
    print(json.dumps(found["loops"]), flush=True)
    found["drafts"] = [row for folder in folders for row in drafts(folder)]
    Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
