"""What `generate()` gives on one GPU: the same tokens as transformers' loop, and milliseconds a step beside the floor.

    python benchmarks/decoding/generate.py OUT.json --minutes 6      one GPU
    python benchmarks/decoding/generate.py OUT.json --tiny           CPU, seconds: all lines run, times mean nothing

Everything is measured through `generate()`. A logits processor of ours notes a CUDA event at every token and waits for
nothing; a step is the median time between two of them. `floor_ms` is the time that the bytes of a step (all weights but
the embedding table, and the cache) take at the card's measured copy bandwidth. Paths:

    stock      transformers' own loop (`fathom.decoding.switch.FAST = False`)
    loop       Fathom's loop, kernel by kernel
    graphs     Fathom's loop with recorded steps: what `generate()` does on a CUDA device
    compiled   the same with `compile_config`: layers under the recording are compiled, in the first call
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import fathom
from fathom import FathomConfig, FathomForCausalLM
from fathom.caches import (
    H2O,
    KIVI,
    TOVA,
    VQKV,
    FourierAttention,
    FreqKV,
    Full,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    TreeKV,
    WeightedKV,
    cache_shape,
    compress,
)
from fathom.decoding import fixed, graphs, switch
from fathom.models.hf_versions import CACHE_NAME

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 135168,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
MIDDLE = {  # 1024x24 parameters
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
EXACT = {**TINY, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
PATHS: dict[str, dict[str, bool]] = {
    "stock": {"FAST": False, "GRAPHS": False},
    "loop": {"FAST": True, "GRAPHS": False},
    "graphs": {"FAST": True, "GRAPHS": True},
    "compiled": {"FAST": True, "GRAPHS": True},
}


@contextmanager
def path(name: str) -> Iterator[None]:
    before = switch.FAST, switch.GRAPHS
    switch.FAST, switch.GRAPHS = PATHS[name]["FAST"], PATHS[name]["GRAPHS"]
    try:
        yield
    finally:
        switch.FAST, switch.GRAPHS = before


class Clock(LogitsProcessor):
    """Notes when every token's logits are there."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mark: Any = torch.cuda.Event(enable_timing=True) if CUDA else time.perf_counter()
        if CUDA:
            mark.record()
        self.marks.append(mark)
        return scores

    def steps(self) -> list[float]:
        """Milliseconds from token to token."""
        if CUDA:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1000 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


class Recordings:
    """Counts recorded steps and how long each took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        record = fixed.FixedStep.record

        def timed(step: Any) -> Any:
            if CUDA:
                torch.cuda.synchronize()
            start = time.perf_counter()
            replay = record(step)
            if CUDA:
                torch.cuda.synchronize()
            if replay is not None:
                self.seconds.append(time.perf_counter() - start)
            return replay

        fixed.FixedStep.record = timed  # type: ignore[method-assign]


RECORDINGS = Recordings()


def llama(sizes: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(default)


def ours(sizes: dict[str, Any], dtype: torch.dtype, **sections: Any) -> FathomForCausalLM:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = FathomForCausalLM(FathomConfig(**sizes, family="llama", **sections))
    return model.to(dtype).eval()


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def prompt(rows: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def asked(which: str) -> dict[str, Any]:
    """What a path needs of `generate()`'s options."""
    return {"compile_config": CompileConfig()} if which == "compiled" else {}


OPTIONS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}


# -- the same tokens


def vqkv(model: Any) -> VQKV:
    """With codebooks of a few codewords, made on random text."""
    file = Path(tempfile.mkdtemp()) / "codebooks.safetensors"
    sizes = {"key_stages": 4, "key_entries": 32, "value_stages": 3, "value_entries": 32, "steps": 5, "batch": 256}
    VQKV.calibrate(model, prompt(4, 256, EXACT["vocab_size"]), **sizes).save(file)
    return VQKV(codebooks=str(file), n_sink=2, n_local=16, flush_every=5)


def exactness(keep: Callable[[dict[str, Any]], None], spent: Callable[[], bool], wanted: str = "") -> None:
    """Tokens and logits beside transformers' own loop: every section, several caches, padding, sampling.

    fp32: equal tokens, logits to 1e-5. bf16: logits to 2 %, up to the first token that a tie decides otherwise.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    new = 24 if CUDA else 6
    padded = prompt(3, 50, EXACT["vocab_size"])
    mask = torch.ones_like(padded)
    mask[0, :17] = 0
    padded[0, :17] = 0
    calls: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "one row": ({"input_ids": prompt(1, 20, EXACT["vocab_size"])}, {}),
        "padded": ({"input_ids": padded, "attention_mask": mask}, {}),
        "sampled": (
            {"input_ids": prompt(2, 33, EXACT["vocab_size"])},
            {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        ),
        "grows": ({"input_ids": prompt(2, 60, EXACT["vocab_size"])}, {"max_new_tokens": 140 if CUDA else 8}),
    }
    sections: dict[str, dict[str, Any]] = {
        "vanilla": {},
        "loop": {"depth": {"name": "loop", "passes": 2}},
        "pondering": {"depth": {"name": "pondering", "steps": 1}},
        "depth_attention": {"mixer": {"name": "depth_attention"}},
        "resformer": {"mixer": {"name": "resformer"}},
        "attnres": {"residual": {"name": "attnres"}},
        "mhc": {"residual": {"name": "mhc"}},
        "rope_pp": {"positions": {"name": "rope_pp"}},
        "alibi": {"positions": {"name": "alibi"}},
        "moe": {"feed_forward": {"name": "moe"}},
        "adaponderlm": {"depth": {"name": "adaponderlm"}},
        "ponderlm2": {"depth": {"name": "ponderlm2"}},
        "pause": {"depth": {"name": "pause"}},
    }
    methods: dict[str, Any] = {
        "full": Full(), "treekv": TreeKV(budget=32, n_sink=2, n_recent=12, block=3), "h2o": H2O(budget=32),
        "streaming": StreamingLLM(budget=32), "tova": TOVA(budget=32), "weightedkv": WeightedKV(budget=32),
        "snapkv": SnapKV(budget=32, n_recent=8), "kivi": KIVI(group=16, residual=16), "freqkv": FreqKV(budget=32),
        "pyramidkv": PyramidKV(budget=32, n_recent=8), "kivi of a short text": KIVI(group=16, residual=64),
        "fourier": FourierAttention(n_sink=2, n_local=8, frequencies=4, headroom=256), "vqkv": vqkv,
    }  # fmt: skip
    cases: list[tuple[str, Callable[[], Any], Any]] = [("llama", lambda: llama(EXACT, torch.float32), None)]
    cases += [(f"llama, {name}", lambda: llama(EXACT, torch.float32), method) for name, method in methods.items()]
    for name, fields in sections.items():
        cases.append((name, lambda fields=fields: ours(EXACT, torch.float32, **fields), None))
    mixed = {"mixer": {"name": "depth_attention"}}
    cases.append(("depth_attention, treekv", lambda: ours(EXACT, torch.float32, **mixed), methods["treekv"]))
    cases.append(("compiled vanilla", lambda: ours(EXACT, torch.float32), None))
    cases.append(("compiled loop", lambda: ours(EXACT, torch.float32, **sections["loop"]), None))
    cases.append(("bf16 vanilla", lambda: ours(EXACT, torch.bfloat16), None))
    cases += [
        (f"bf16 llama, {name}", lambda: llama(EXACT, torch.bfloat16), methods[name])
        for name in ("full", "treekv", "freqkv", "kivi")
    ]
    for name, build, method in cases:
        if wanted not in name:
            continue
        if spent():
            keep({"case": name, "skipped": "out of time"})
            continue
        try:
            model = build()
            method = method(model) if callable(method) else method
        except Exception as error:
            keep({"case": name, "error": f"{type(error).__name__}: {error}"})
            continue
        for kind, (batch, options) in calls.items():
            if kind == "grows" and name not in (
                "llama", "llama, full", "llama, snapkv", "llama, freqkv", "llama, kivi", "llama, pyramidkv",
                "llama, vqkv", "llama, fourier", "vanilla", "loop", "pause", "compiled vanilla",
            ):  # fmt: skip
                continue
            row: dict[str, Any] = {"case": name, "call": kind}
            try:
                found = {}
                for which in ("stock", "compiled" if name.startswith("compiled") else "graphs"):
                    before = len(RECORDINGS.seconds)
                    torch.manual_seed(1)
                    with path(which), nullcontext() if method is None else compress(model, method):
                        out = model.generate(
                            **batch, **{"max_new_tokens": new, **OPTIONS, **asked(which), **options},
                            return_dict_in_generate=True, output_logits=True,
                        )  # fmt: skip
                    found["stock" if which == "stock" else "ours"] = out.sequences, torch.stack(out.logits)
                    row["recorded"] = len(RECORDINGS.seconds) - before
                    del out
                (a, x), (b, y) = found["stock"], found["ours"]
                row["tokens_equal"] = a.shape == b.shape and bool((a == b).all())
                start = batch["input_ids"].shape[1]
                differ = (a[:, start:] != b[:, start:]).any(0) if a.shape == b.shape else torch.ones(1)
                same = int(differ.int().argmax()) + 1 if bool(differ.any()) else len(x)  # logits over equal texts
                row["compared"], row["logits_off"] = same, float((x - y)[:same].abs().max() / x.abs().max())
                close = row["logits_off"] < (2e-2 if "bf16" in name else 1e-5)
                row["right"] = close and (row["tokens_equal"] or "bf16" in name)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            keep(row)
        del model
        free()


# -- the speed


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes together."""
    x = torch.empty(2**30 if CUDA else 2**24, dtype=torch.uint8, device=DEVICE)
    y, clock = torch.empty_like(x), Clock()
    for _ in range(12):
        y.copy_(x)
        clock(x, x)
    return 2 * x.numel() / (statistics.median(clock.steps()) / 1000)


def floor(model: Any, cache_bytes: int) -> int:
    inner = model
    embedding = inner.get_input_embeddings().weight
    tied = inner.get_output_embeddings().weight is embedding
    return cache_bytes + sum(p.numel() * p.element_size() for p in inner.parameters() if tied or p is not embedding)


def measure(model: Any, which: str, rows: int, length: int, new: int, method: Any, repeats: int = 1) -> dict[str, Any]:
    vocab = model.config.vocab_size
    best: dict[str, Any] = {}
    for turn in range(repeats + 1 if length * rows <= 2**14 else repeats):  # short calls: one to warm up
        clock, before = Clock(), len(RECORDINGS.seconds)
        ids = prompt(rows, length, vocab, seed=turn)
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with path(which):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **OPTIONS, **asked(which),
                logits_processor=LogitsProcessorList([clock]), return_dict_in_generate=True,
            )  # fmt: skip
        if CUDA:
            torch.cuda.synchronize()
        whole = time.perf_counter() - start
        steps = clock.steps()
        cache = out[CACHE_NAME]
        held_bytes = cache.nbytes() if hasattr(cache, "nbytes") else None
        best = {
            "step_ms": statistics.median(steps), "mean_step_ms": sum(steps) / len(steps), "first_steps_ms": steps[:4],
            "first_token_s": whole - sum(steps) / 1000, "whole_s": whole,
            "recorded": len(RECORDINGS.seconds) - before, "capture_s": sum(RECORDINGS.seconds[before:]),
            "cache_bytes_held": held_bytes,
        }  # fmt: skip
        if CUDA:
            best["peak_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
        del out, cache
        free()
    return best


def speed(
    keep: Callable[[dict[str, Any]], None], spent: Callable[[], bool], copied: float, tiny: bool, wanted: list[str]
) -> None:
    """Rows whose model, batch, prompt and cache, so written, are among the wanted: of none all."""

    def one(model: Any, label: str, which: str, batch: int, length: int, new: int, method: Any, repeats: int) -> None:
        row: dict[str, Any] = {"model": label, "path": which, "batch": batch, "prompt": length, "new": new}
        row["cache"] = "dynamic" if method is None else method.name
        if wanted and f"{label}, {batch} x {length}, {row['cache']}" not in wanted:
            return
        if spent():
            keep({**row, "skipped": "out of time"})
            return
        try:
            shape = cache_shape(model, batch)
            kept = (Full() if method is None else method).cache_bytes(shape, length, new // 2)
            passes = getattr(getattr(model, "depth", None), "passes", 1) if method is None else 1
            floor_bytes = floor(model, kept * passes)
            with nullcontext() if method is None else compress(model, method):
                row |= measure(model, which, batch, length, new, method, repeats)
            row["floor_ms"] = 1000 * floor_bytes / copied
            row["over_floor"] = row["step_ms"] / row["floor_ms"]
            row["tokens_s"] = batch * 1000 / row["step_ms"]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            free()
        keep(row)

    half = torch.bfloat16 if CUDA else torch.float32
    size = TINY if tiny else MIDDLE
    new = 8 if tiny else 64
    models = {
        "1024x24 Llama": lambda: llama(size, half),
        "1024x24 vanilla": lambda: ours(size, half),
        "1024x24 depth_attention": lambda: ours(size, half, mixer={"name": "depth_attention"}),
        "1024x24 loop x2": lambda: ours(size, half, depth={"name": "loop", "passes": 2}),
        "1024x24 pause": lambda: ours(size, half, depth={"name": "pause"}),
        "1024x24 ponderlm2": lambda: ours(size, half, depth={"name": "ponderlm2"}),
    }
    for label, build in models.items():
        if wanted and not any(each.startswith(label) for each in wanted):
            continue
        model = build()
        with torch.inference_mode():
            for batch in (1, 32):
                stock = label == "1024x24 Llama"
                compilable = label in ("1024x24 vanilla", "1024x24 loop x2")
                for which in ("stock",) if stock else ("loop", "graphs") + ("compiled",) * compilable:
                    one(model, label, which, batch, 16 if tiny else 128, new, None, 3)
                if stock:
                    one(model, label, "graphs", batch, 16 if tiny else 128, new, Full(), 3)
        del model
        free()
    if wanted and not any(each.startswith("8B") for each in wanted):
        return
    size = TINY if tiny else LLAMA_8B
    model, long, short = llama(size, half), 64 if tiny else 32768, 32 if tiny else 2048
    budget = 16 if tiny else 1024
    tree = TreeKV(budget=budget, n_sink=4, n_recent=budget // 4)
    kivi = KIVI(group=16, residual=32) if tiny else KIVI()
    fourier = FourierAttention(n_local=budget // 4, frequencies=budget // 4, headroom=1024)
    with torch.no_grad():
        budgeted = [kind(budget=budget) for kind in (StreamingLLM, SnapKV, WeightedKV)]
        for batch, length, cases in (
            (1, short, (Full(), tree)),
            (1, long, (None, Full(), tree, budgeted[0], kivi, FreqKV(budget=budget), fourier)),
            (8, long, (tree, None, Full(), *budgeted, kivi, FreqKV(budget=budget))),
        ):
            for method in cases:
                which = "stock" if method is None else "graphs"
                one(model, "8B Llama", which, batch, length, new, method, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("exact", "speed"))
    parser.add_argument("--cases", default="", help="of the exact ones those with this in their names")
    parser.add_argument("--rows", nargs="*", default=[], help="of speed: '8B Llama, 1 x 32768, kivi'")
    args = parser.parse_args()
    start, rows, copied = time.perf_counter(), {"exact": [], "speed": []}, bandwidth()

    def spent() -> bool:
        return time.perf_counter() - start > args.minutes * 60

    def save() -> None:
        found = {
            "command": "python benchmarks/decoding/generate.py", "fathom": fathom.__version__,
            "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if CUDA else f"CPU, {os.cpu_count()} cores",
            "copy_bytes_s": copied, "graphs": graphs.CudaGraphs.__name__, "rows": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def keep(kind: str) -> Callable[[dict[str, Any]], None]:
        def one(row: dict[str, Any]) -> None:
            rows[kind].append(row)
            print(json.dumps(row), flush=True)
            save()

        return one

    if args.only != "speed":
        exactness(keep("exact"), spent, args.cases)
    if args.only != "exact":
        speed(keep("speed"), spent, copied, args.tiny, args.rows)
    wrong = [row for row in rows["exact"] if "skipped" not in row and not row.get("right")]
    print(f"{len(rows['exact'])} exactness rows, {len(wrong)} wrong; {len(rows['speed'])} speed rows")
    for row in wrong:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
