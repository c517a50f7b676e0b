"""How long a lineage comparison takes: a pair of Llama-7B-shaped models with random weights, files in page cache.

    python benchmarks/lineage_speed.py OUT.json [--device cuda] [--tiny] [--folder DIR] [--repeats 3] [--slow]

Writes the two models (13.5 GB each, bfloat16, one shard a layer) into DIR unless they are there, reads them once
to warm the page
cache, and times end to end: open, align, score. `--slow` adds Procrustes and spectral power. `--related` makes B a
permuted copy
of A instead of an independent model. Seconds are medians of the repeats.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from fathom.lineage.awm import awm
from fathom.lineage.checkpoint import open_checkpoint
from fathom.lineage.huref import ics

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2000},
}  # fmt: skip


def write_model(folder: Path, shape: dict[str, int], seed: int, permute: bool, device: str) -> None:
    """Random Gaussian weights in shards; complete only when config.json is there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    d, f, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    kv = d // heads * shape["num_key_value_heads"]
    order = torch.randperm(d, generator=torch.Generator().manual_seed(7)).to(device) if permute else None
    weight_map: dict[str, str] = {}

    def normal(*size: int, axis: int = -1) -> torch.Tensor:
        tensor = torch.randn(*size, generator=generator, device=device) * 0.02
        if order is not None:
            tensor = tensor.index_select(axis, order)
        return tensor.bfloat16().cpu().contiguous()

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    shard("outer.safetensors", {"model.embed_tokens.weight": normal(shape["vocab_size"], d),
                                "lm_head.weight": normal(shape["vocab_size"], d),
                                "model.norm.weight": torch.ones(d, dtype=torch.bfloat16)})  # fmt: skip
    for layer in range(shape["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        sizes = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
                 "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}  # fmt: skip
        tensors = {
            f"{p}{n}.weight": normal(*s, axis=0 if n.endswith(("o_proj", "down_proj")) else -1)
            for n, s in sizes.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{norm}.weight"] = (
                1 + 0.1 * torch.randn(d, generator=torch.Generator().manual_seed(layer))
            ).bfloat16()
            if order is not None:
                tensors[f"{p}{norm}.weight"] = tensors[f"{p}{norm}.weight"][order.cpu()]
        shard(f"layer-{layer:02d}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "vocab.json").write_text(json.dumps({f"Ġ{i}": i for i in range(shape["vocab_size"])}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fathom-lineage-speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--related", action="store_true")
    args = parser.parse_args()

    size = "tiny" if args.tiny else "7b"
    paths = [args.folder / f"{size}-a", args.folder / (f"{size}-permuted" if args.related else f"{size}-b")]
    start = time.perf_counter()
    write_model(paths[0], SHAPES[size], 0, False, args.device)
    write_model(paths[1], SHAPES[size], 0 if args.related else 1, args.related, args.device)
    print(f"models ready after {time.perf_counter() - start:.0f} s", flush=True)
    for path in paths:  # warm the page cache
        for file in path.glob("*.safetensors"):
            with open(file, "rb", buffering=0) as handle:
                while handle.read(1 << 26):
                    pass

    runs = {
        "paper-lap": lambda a, b: awm(a, b, hardened=False).score,
        "hardened-lap": lambda a, b: awm(a, b, anchor="embedding").score,
        "hardened-lap, all anchors": lambda a, b: awm(a, b).score,
        "huref-ics": lambda a, b: ics(a, b).score,
    }
    if args.slow:
        runs["hardened-procrustes"] = lambda a, b: awm(a, b, alignment="procrustes", anchor="embedding").score
        runs["hardened-lap-p0.25"] = lambda a, b: awm(a, b, anchor="embedding", power=0.25).score
    results = {}
    for name, run in runs.items():
        seconds, value = [], 0.0
        for _ in range(1 if name in {"hardened-procrustes", "hardened-lap-p0.25"} else args.repeats):
            if args.device.startswith("cuda"):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            value = run(*(open_checkpoint(p, device=args.device) for p in paths))
            seconds.append(time.perf_counter() - start)
        results[name] = {"seconds": statistics.median(seconds), "all": seconds, "score": value}
        if args.device.startswith("cuda"):
            results[name]["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name:28} {results[name]['seconds']:8.2f} s  score {value:.5f}", flush=True)
    device = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {"results": results, "shape": SHAPES[size], "related": args.related, "device": device, "torch":
    torch.__version__,
              "threads": torch.get_num_threads(), "commit": commit,
              "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # fmt: skip
    work = args.out.with_suffix(".tmp")
    work.write_text(json.dumps(record, indent=1))
    os.replace(work, args.out)


if __name__ == "__main__":
    main()
