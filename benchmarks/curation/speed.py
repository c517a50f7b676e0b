"""`fathom curate` against datatrove's own pipeline with the same filters, and papers a second of the TEI parser.

    python benchmarks/curation/speed.py --text corpus --papers runs/moon/raw/papers -o speed.json
    python benchmarks/curation/speed.py --text corpus --parts 1 2 4 8 --workers 1 --repeats 1 -o size.json

datatrove's pipeline is the one of its documentation: read, filter, write; read, MinHash signatures; buckets; clusters;
read, leave copies out, write. It runs our filter classes, so what differs is reading, accounts, digests, MinHash and
writing. Its word tokenizer for English (spaCy) is left out for one that splits at spaces, which makes it faster. The
two take turns, each run in a process of its own: CPU seconds and the largest resident set are of it and what it forked.
On a machine that others use, too, CPU seconds tell more than the clock. `--parts` takes the first so many files of the
folder, for how both grow with the input.
datatrove's reader needs `pip install orjson`; its xxhash fails with xxhash 4.1, so it hashes by SHA-1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import datatrove.pipeline.dedup.minhash as minhash
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.logging import logger
from lxml import etree

from fathom.curation import Curation, curate
from fathom.curation.steps import filters
from fathom.curation.tei import read_tei


class Spaces:
    """A word tokenizer."""

    def __init__(self, language: str):
        self.language = language

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def ours(text: Path, folder: Path, workers: int) -> int:
    return curate(text, folder / "out", Curation(shard_bytes=shard(text, workers)), workers)["kept"]


def shard(text: Path, workers: int) -> int:
    files = list(text.glob("*.jsonl"))
    return max(file.stat().st_size for file in files) + 1 if len(files) >= workers else 10**9


def theirs(text: Path, folder: Path, workers: int) -> int:
    minhash.load_word_tokenizer = Spaces
    config = minhash.MinhashConfig(5, 16, 8, hash_config=HashConfig(precision=32, hash_fc="sha1"))
    tasks = len(list(text.glob("*.jsonl")))

    def run(name: str, steps: list[Any], count: int) -> None:
        LocalPipelineExecutor(
            steps, count, min(workers, count), str(folder / "logs" / name), start_method="fork"
        ).run()  # fmt: skip

    first, places = str(folder / "first"), {n: str(folder / n) for n in ("signatures", "buckets", "remove", "out")}
    plain = {"compression": None, "output_filename": "${rank}.jsonl"}
    rules = [one for _, one in filters(Curation())]
    run("filter", [JsonlReader(str(text)), *rules, JsonlWriter(first, **plain)], tasks)
    run("signatures", [JsonlReader(first), minhash.MinhashDedupSignature(places["signatures"], config)], tasks)
    run("buckets", [minhash.MinhashDedupBuckets(places["signatures"], places["buckets"], config=config)], 16)
    run("clusters", [minhash.MinhashDedupCluster(places["buckets"], places["remove"], config)], 1)
    keep = [JsonlReader(first), minhash.MinhashDedupFilter(places["remove"]), JsonlWriter(places["out"], **plain)]
    run("keep", keep, tasks)
    return sum(1 for file in Path(places["out"]).glob("*.jsonl") for _ in file.open())


def measure(run: Any, text: Path, workers: int) -> dict[str, float]:
    """Seconds, memory and counts of one run, in a process that is forked for it."""
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    child = os.fork()
    if not child:
        code = 1
        try:
            (folder / "kept").write_text(str(run(text, folder, workers)))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{run.__name__} failed on {text}")
    found = {"seconds": time.perf_counter() - began, "cpu_seconds": used.ru_utime + used.ru_stime}
    found |= {"peak_mib": used.ru_maxrss / 1024, "kept": int((folder / "kept").read_text())}
    shutil.rmtree(folder)
    return found


def part_of(text: Path, count: int, folder: Path) -> Path:
    """A folder with the first so many files."""
    folder.mkdir()
    for file in sorted(text.glob("*.jsonl"))[:count]:
        (folder / file.name).symlink_to(file.resolve())
    return folder


def papers_a_second(folder: Path) -> dict[str, float]:
    files = [file.read_bytes() for file in sorted(folder.glob("paper_*.xml"))]
    rates: dict[str, list[float]] = {"papers_a_second": [], "xml_parser_alone": []}
    for _ in range(5):
        for name, read in (("papers_a_second", lambda x: read_tei(x, "")), ("xml_parser_alone", etree.fromstring)):
            began = time.process_time()
            for xml in files:
                read(xml)
            rates[name].append(len(files) / (time.process_time() - began))
    size = sum(map(len, files)) / len(files)
    return {"papers": len(files), "bytes_a_paper": size} | {name: statistics.median(r) for name, r in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="folder of JSONL files, one for each process at least")
    parser.add_argument("--papers", type=Path)
    parser.add_argument("--parts", type=int, nargs="+", help="files of the folder, in turn; else all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    options = parser.parse_args()
    logger.remove()
    made: dict[str, Any] = {}
    if options.papers:
        made["tei"] = papers_a_second(options.papers)
    if options.text:
        made["text"] = []
        files = len(list(options.text.glob("*.jsonl")))
        for count in options.parts or [files]:
            with tempfile.TemporaryDirectory() as folder:
                text = part_of(options.text, count, Path(folder) / "raw")
                size = sum(file.stat().st_size for file in text.glob("*.jsonl"))
                both = {"fathom": ours, "datatrove": theirs}
                runs = [
                    {name: measure(run, text, options.workers) for name, run in both.items()}
                    for _ in range(options.repeats)
                ]
            ratios = {
                unit: statistics.median(run["datatrove"][unit] / run["fathom"][unit] for run in runs)
                for unit in ("seconds", "cpu_seconds")
            }
            row = {"bytes": size, "workers": options.workers, "runs": runs, "throughput_over_datatrove": ratios}
            made["text"].append(row)
            options.output.write_text(json.dumps(made, indent=2) + "\n")
    options.output.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main()
