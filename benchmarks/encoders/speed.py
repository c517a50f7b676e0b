"""What cheaper encoders save on one GPU: forwards of LongT5 under Fovea, and of BART under the Fourier filter.

    python benchmarks/encoders/speed.py OUT.json      one GPU, about half a minute
    python benchmarks/encoders/speed.py OUT.json --tiny      CPU: all lines run, times mean nothing

bf16, random weights, one row, contestants in turn, medians. `call` is the public call of the encoder, kernel by kernel;
`graph` its layers recorded as a CUDA graph: the time of the device alone.

    fovea    LongT5 (768 × 12, 12 heads), against the same encoder under full flash attention without a bias, under
             transient-global and local attention, and under Fovea's gathered form
    fourier  BART (1024 × 12, 16 heads, filter before the third layer) against itself in full, at T and at K tokens

The floor of `fourier` is the layers' own time: 2/12 of the full encoder at T tokens and 10/12 of it at K.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention

from fathom import FathomBartConfig, FathomLongT5Config
from fathom.decoding.graphs import warm_and_record
from fathom.models.seq2seq_bart import FathomBartEncoder
from fathom.models.seq2seq_longt5 import FathomLongT5Encoder
from fathom.ops import kernels
from fathom.writing import write_json

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float32
ENDS = float(os.environ.get("STOP", "inf"))  # unix seconds: no row begins later


class Flash(LongT5LocalAttention):
    """Full attention by a flash kernel, which adds no bias: the floor of what full attention costs."""

    def forward(self, hidden_states, mask=None, position_bias=None, output_attentions=False):
        heads = (*hidden_states.shape[:2], self.n_heads, self.key_value_proj_dim)
        query, key, value = (part(hidden_states).view(heads).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2)), 0


def longt5(name: str, tiny: bool) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12, "d_ff": 2048}
    if tiny:
        sizes = {"d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 2, "d_ff": 64}
    kind = name if name in ("local", "transient-global") else "transient-global"
    method = "fovea" if name in ("fovea", "fovea, gathered") else "full"
    config = FathomLongT5Config(
        vocab_size=1000, feed_forward_proj="gated-gelu", dropout_rate=0.0, encoder_attention_type=kind,
        encoder={"name": method}, is_encoder_decoder=False, use_cache=False, **sizes,
    )  # fmt: skip
    with torch.device(DEVICE):
        encoder = FathomLongT5Encoder(config)
        encoder.set_input_embeddings(torch.nn.Embedding(1000, config.d_model))
        if name == "flash":
            for number, block in enumerate(encoder.block):
                block.layer[0].TransientGlobalSelfAttention = Flash(config, number == 0)
    return encoder.to(HALF).eval()


def bart(ratio: float, longest: int, tiny: bool) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 1024, "encoder_layers": 12, "encoder_attention_heads": 16}
    sizes["encoder_ffn_dim"] = 4096
    if tiny:
        sizes = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    section = {"name": "full"} if ratio == 1 else {"name": "fourier", "ratio": ratio, "filter_layers": [2]}
    config = FathomBartConfig(
        vocab_size=1000, max_position_embeddings=longest, dropout=0.0, encoder=section, attn_implementation="sdpa",
        **sizes,
    )  # fmt: skip
    with torch.device(DEVICE):
        return FathomBartEncoder(config).to(HALF).eval()


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    if not CUDA:
        began = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / repeats


def in_turn(runs: dict[str, Callable[[], Any]], turns: int, about_ms: float) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum of the milliseconds of every contestant, one after the other in every turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(milliseconds(run, max(1, round(10 / about_ms))))
    return {
        name: {"median_ms": statistics.median(found), "min_ms": min(found), "max_ms": max(found)}
        for name, found in times.items()
    }


def peak(run: Callable[[], Any]) -> int:
    """Bytes that a call holds at most beside what was there."""
    if not CUDA:
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def layers(encoder: Any, x: torch.Tensor) -> torch.Tensor:
    """LongT5's layers on embedded tokens, all real."""
    bias = None
    for block in encoder.block:
        x, bias = block(x, None, bias)[:2]
    return x


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    return warm_and_record(run) if CUDA else run


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def fovea(length: int, tiny: bool, names: tuple[str, ...], backward: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "fovea", "length": length}
    encoders = {name: longt5(name, tiny) for name in names}
    ids = torch.randint(1, 1000, (1, length), device=DEVICE)
    x = encoders["flash"].embed_tokens(ids).detach()

    def switched(name: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            kernels.TRITON = name != "fovea, gathered"
            run()
            kernels.TRITON = True

        return call

    calls = {name: switched(name, lambda e=encoder: e(input_ids=ids)) for name, encoder in encoders.items()}
    with torch.no_grad():
        row["peak_bytes"] = {name: peak(run) for name, run in calls.items()}
        about = milliseconds(calls["flash"], 1)
        row["call"] = in_turn(calls, 5, about)
        try:
            graphs = {name: recorded(lambda e=encoders[name]: layers(e, x)) for name in ("fovea", "flash", "local")}
            row["graph"] = in_turn(graphs, 5, about)
            del graphs
        except Exception as error:
            row["graph_error"] = f"{type(error).__name__}: {error}"[:300]
    if backward:

        def both(encoder: Any) -> None:
            encoder(inputs_embeds=x).last_hidden_state.sum().backward()
            encoder.zero_grad(set_to_none=True)

        encoders.pop("fovea, gathered", None)
        tables = [p for e in encoders.values() for n, p in e.named_parameters() if "relative_attention_bias" in n]
        for kind in ("with", "without"):
            for table in tables:
                table.requires_grad_(kind == "with")
            trained = {name: lambda e=encoder: both(e) for name, encoder in encoders.items()}
            for run in trained.values():
                run()
            row[f"backward, {kind} the bias"] = in_turn(trained, 3, 3 * about)
    for part in ("call", "graph", "backward, with the bias", "backward, without the bias"):
        if part in row:
            row[f"{part}: fovea over"] = {
                name: row[part]["fovea"]["median_ms"] / row[part][name]["median_ms"] for name in row[part]
            }
    return row


def fourier(length: int, tiny: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "fourier", "length": length}
    ids = torch.randint(1, 1000, (1, length), device=DEVICE)
    full, runs = bart(1.0, length, tiny), {}
    deep = len(full.layers)
    runs["full"] = lambda: full(input_ids=ids)
    for ratio in (0.5, 0.3, 0.2):
        kept = -(-length * round(10 * ratio) // 10)
        encoder = bart(ratio, length, tiny)
        runs[f"fourier {ratio}"] = lambda e=encoder: e(input_ids=ids)
        runs[f"full at {ratio}"] = lambda k=kept: full(input_ids=ids[:, :k])
        row.setdefault("filter_ms", {})
        y = torch.randn(1, length, full.config.d_model, device=DEVICE, dtype=HALF)
        with torch.no_grad():
            from fathom.ops.dct import low_pass

            low_pass(y, kept)
            row["filter_ms"][str(ratio)] = milliseconds(lambda y=y, k=kept: low_pass(y, k), 5)
    with torch.no_grad():
        row["peak_bytes"] = {name: peak(run) for name, run in runs.items()}
        about = milliseconds(runs["full"], 1)
        row["call"] = in_turn(runs, 5, about)
    for ratio in (0.5, 0.3, 0.2):
        own, at = (row["call"][f"{kind} {ratio}"]["median_ms"] for kind in ("fourier", "full at"))
        floor = (2 * row["call"]["full"]["median_ms"] + (deep - 2) * at) / deep
        row[f"fourier {ratio}"] = {
            "over_floor": own / floor, "over_full": own / row["call"]["full"]["median_ms"],
            "filter_share": row["filter_ms"][str(ratio)] / own,
        }  # fmt: skip
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    everyone = ("fovea", "flash", "transient-global", "local", "fovea, gathered")
    jobs: list[Callable[[], dict[str, Any]]]
    if args.tiny:
        jobs = [lambda: fovea(384, True, everyone, True), lambda: fourier(64, True)]
    else:
        jobs = [
            lambda: fovea(16384, False, everyone, True), lambda: fovea(4096, False, everyone, False),
            lambda: fovea(65536, False, everyone[:-1], False), lambda: fourier(4096, False),
            lambda: fourier(16384, False),
        ]  # fmt: skip
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__, "rows": []
    }  # fmt: skip
    for job in jobs:
        if time.time() > ENDS - 4:
            print("out of time", flush=True)
            break
        began = time.perf_counter()
        try:
            row = job()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        row["seconds"] = round(time.perf_counter() - began, 1)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_json(args.output, result)
        free()


if __name__ == "__main__":
    main()
