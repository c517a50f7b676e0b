"""How long a lineage comparison takes: a pair of Llama-7B-shaped models with random weights, files in page cache.

    python benchmarks/lineage/speed.py OUT.json [--device cuda] [--folder DIR] [--repeats 3] [--minutes 8]
        [--rows paper-lap …] [--related] [--tiny]

Writes the two models (13.5 GB each, bfloat16, one shard a layer) into DIR unless they are there (DIR on a RAM disk such
as /dev/shm is page cache by itself), reads them once to warm the page cache, and times end to end: open, align, score.
--related makes B a permuted copy of A instead of an independent model. Seconds are medians of the repeats; Procrustes
and spectral power run once, last. `peak_anonymous_gib` is the largest RssAnon (what the process allocated; mapped file
pages are not in it), seen every 20 ms; `peak_resident_gib` counts the mapped pages too. OUT.json is rewritten after
every row; a row that fails is recorded as its error.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from fathom.lineage.awm import awm
from fathom.lineage.huref import ics
from fathom.lineage.reader import open_checkpoint

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2000},
}  # fmt: skip


def write_model(folder: Path, shape: dict[str, int], seed: int, permute: bool, device: str) -> None:
    """Random Gaussian weights in shards, each from a seed of its own; complete only when config.json is there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    d, f, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    kv, vocab = d // heads * shape["num_key_value_heads"], shape["vocab_size"]
    order = torch.randperm(d, generator=torch.Generator().manual_seed(7)).to(device) if permute else None
    outer = {"model.embed_tokens": (vocab, d), "lm_head": (vocab, d), "model.norm": (d,)}
    layer = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
             "self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
             "input_layernorm": (d,), "post_attention_layernorm": (d,)}  # fmt: skip
    shards = [outer] + [
        {f"model.layers.{i}.{name}": size for name, size in layer.items()} for i in range(shape["num_hidden_layers"])
    ]

    def write(index: int) -> None:
        generator = torch.Generator(device).manual_seed(1000 * seed + index)
        tensors = {}
        for name, size in shards[index].items():
            tensor = torch.randn(size, generator=generator, device=device)
            tensor = tensor * 0.02 if len(size) == 2 else 1 + 0.1 * tensor
            if order is not None:  # writers of the residual stream have its axes first, all others last
                tensor = tensor.index_select(0 if name.endswith(("o_proj", "down_proj")) else -1, order)
            tensors[f"{name}.weight"] = tensor.bfloat16().cpu().contiguous()
        save_file(tensors, folder / f"shard-{index:02d}.safetensors")

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, range(len(shards))))
    weight_map = {f"{name}.weight": f"shard-{i:02d}.safetensors" for i, names in enumerate(shards) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "vocab.json").write_text(json.dumps({f"Ġ{i}": i for i in range(vocab)}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))


class PeakMemory:
    """The largest RssAnon and VmRSS of this process, in GiB, while the block runs."""

    def __enter__(self) -> "PeakMemory":
        self.anonymous = self.resident = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            kib = {words[0]: int(words[1]) for words in lines if words[0] in {"RssAnon:", "VmRSS:"}}
            self.anonymous = max(self.anonymous, kib["RssAnon:"] / 2**20)
            self.resident = max(self.resident, kib["VmRSS:"] / 2**20)
            if self._ended.wait(0.02):
                return


ROWS = {
    "paper-lap": lambda a, b: awm(a, b, hardened=False).score,
    "hardened-lap": lambda a, b: awm(a, b, anchor="embedding").score,
    "huref-ics": lambda a, b: ics(a, b).score,
    "hardened-lap, all anchors": lambda a, b: awm(a, b).score,
    "hardened-procrustes": lambda a, b: awm(a, b, alignment="procrustes", anchor="embedding").score,
    "hardened-lap-p0.25": lambda a, b: awm(a, b, anchor="embedding", power=0.25).score,
}
ONCE = {"hardened-procrustes", "hardened-lap-p0.25"}


def time_row(name: str, paths: list[Path], device: str, repeats: int) -> dict[str, float | list[float]]:
    cuda = device.startswith("cuda")
    seconds, cpu, value = [], [], 0.0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as memory:
        for _ in range(1 if name in ONCE else repeats):
            start, start_cpu = time.perf_counter(), time.process_time()
            value = ROWS[name](*(open_checkpoint(p, device=device) for p in paths))
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    found = {"seconds": statistics.median(seconds), "all": seconds, "cpu_seconds": statistics.median(cpu),
             "score": value, "peak_anonymous_gib": memory.anonymous, "peak_resident_gib": memory.resident,
             "load_average": os.getloadavg()[0]}  # fmt: skip
    return found | ({"peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fathom-lineage-speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no row after this time")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--related", action="store_true")
    args = parser.parse_args()

    start = time.perf_counter()
    size = "tiny" if args.tiny else "7b"
    paths = [args.folder / f"{size}-a", args.folder / (f"{size}-permuted" if args.related else f"{size}-b")]
    write_model(paths[0], SHAPES[size], 0, False, args.device)
    write_model(paths[1], SHAPES[size], 0 if args.related else 1, args.related, args.device)
    print(f"{time.perf_counter() - start:6.0f}s models written", flush=True)
    for path in paths:  # warm the page cache
        for file in path.glob("*.safetensors"):
            with open(file, "rb", buffering=0) as handle:
                while handle.read(1 << 26):
                    pass
    print(f"{time.perf_counter() - start:6.0f}s models read", flush=True)

    cuda = args.device.startswith("cuda")
    processor = platform.processor() or platform.machine()
    commit = (
        os.environ.get("FATHOM_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    results: dict[str, dict] = {}
    record = {"results": results, "shape": SHAPES[size], "related": args.related, "torch": torch.__version__,
              "device": torch.cuda.get_device_name() if cuda else processor, "threads": torch.get_num_threads(),
              "commit": commit}  # fmt: skip
    for name in args.rows:
        if time.perf_counter() - start > 60 * args.minutes:
            print(f"--minutes {args.minutes:g} are over; not run: {name}", flush=True)
            continue
        try:
            found = results[name] = time_row(name, paths, args.device, args.repeats)
            line = f"{found['seconds']:.2f} s, score {found['score']:.5f}, {found['peak_anonymous_gib']:.2f} GiB"
        except Exception as error:  # the rows after it are worth having
            results[name] = {"error": repr(error)}
            line = repr(error)
        print(f"{time.perf_counter() - start:6.0f}s {name}: {line}", flush=True)
        work = args.out.with_suffix(".tmp")
        work.write_text(json.dumps(record, indent=1))
        os.replace(work, args.out)


if __name__ == "__main__":
    main()
