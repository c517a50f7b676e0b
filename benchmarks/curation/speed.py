"""`fathom curate` against datatrove's own pipeline with the same filters, and papers a second of the TEI parser.

    python benchmarks/curation/speed.py --text corpus --papers runs/moon/raw/papers -o speed.json
    python benchmarks/curation/speed.py --text corpus --parts 1 2 4 8 --workers 1 --repeats 1 -o size.json
    python benchmarks/curation/speed.py --sources DATA --fill 1e9 --text big --ours --workers 1 --repeats 1 -o big.json

datatrove's pipeline is the one of its documentation: read, filter, write; read, MinHash signatures; buckets; clusters;
read, leave copies out, write. It runs our filter classes, so what differs is reading, accounts, digests, MinHash and
writing. Its word tokenizer for English (spaCy) is left out for one that splits at spaces, which makes it faster. The
two take turns, each run in a process of its own: CPU seconds and the largest resident set are of it and what it forked.
On a machine that others use, too, CPU seconds tell more than the clock. `--parts` takes the first so many files of the
folder, for how both grow with the input; `--ours` leaves datatrove out. `--fill` first makes the folder of a given
size from fewer documents (`copies` says how).
datatrove's reader needs `pip install orjson`; its xxhash fails with xxhash 4.1, so it hashes by SHA-1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import os
import random
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
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


PIECE = 4000  # characters of a document, at most
FILE = 25e6  # bytes of a file, about


def fill(sources: Path, text: Path, size: float) -> None:
    """Fill a folder with so many bytes: files of FILE bytes with the lines of `copies`."""
    text.mkdir(parents=True)
    lines, made = copies(sources), 0
    for number in itertools.count():
        with (text / f"{number:05}.jsonl").open("wb") as out:
            while made < min(size, (number + 1) * FILE):
                made += out.write(next(lines))
        if made >= size:
            break


def copies(sources: Path) -> Iterator[bytes]:
    """Pieces of the sources' documents as rows, then those again and again with words exchanged.

    Of a document read again one word in six is another word of its own, so that a run of five words comes back with
    probability (5/6)^5 = 0.40 and a copy is no duplicate; of every twentieth one word in a hundred, so that it is one.
    """
    draw = random.Random(0)
    for turn in itertools.count():
        for place, piece in enumerate(pieces(sources)):
            words = piece.split(" ")
            count = len(words) // (100 if draw.random() < 0.05 else 6) if turn else 0
            for at in draw.sample(range(len(words)), count):
                words[at] = draw.choice(words)
            row = {"id": f"{turn}/{place}", "text": " ".join(words)}
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def pieces(sources: Path) -> Iterator[str]:
    """The documents of all files of a folder, a paragraph after the other in pieces of at most PIECE characters."""
    for file in sorted(sources.glob("*.jsonl.xz")):
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                piece = ""
                for paragraph in json.loads(line)["text"].split("\n"):
                    if piece and len(piece) + len(paragraph) > PIECE:
                        yield piece
                        piece = ""
                    piece += paragraph + "\n"
                yield piece


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
    parser.add_argument("--sources", type=Path, help="with --fill: a folder of .jsonl.xz files")
    parser.add_argument("--fill", type=float, help="bytes that --text, which must not exist, is filled with first")
    parser.add_argument("--ours", action="store_true", help="without datatrove's pipeline")
    parser.add_argument("--parts", type=int, nargs="+", help="files of the folder, in turn; else all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    options = parser.parse_args()
    logger.remove()
    made: dict[str, Any] = {}
    if options.fill:
        fill(options.sources, options.text, options.fill)
    if options.papers:
        made["tei"] = papers_a_second(options.papers)
    if options.text:
        made["text"] = []
        files = len(list(options.text.glob("*.jsonl")))
        for count in options.parts or [files]:
            with tempfile.TemporaryDirectory() as folder:
                text = part_of(options.text, count, Path(folder) / "raw")
                size = sum(file.stat().st_size for file in text.glob("*.jsonl"))
                both = {"fathom": ours} if options.ours else {"fathom": ours, "datatrove": theirs}
                runs = [
                    {name: measure(run, text, options.workers) for name, run in both.items()}
                    for _ in range(options.repeats)
                ]
            row: dict[str, Any] = {"bytes": size, "workers": options.workers, "runs": runs}
            if not options.ours:
                row["throughput_over_datatrove"] = {
                    unit: statistics.median(run["datatrove"][unit] / run["fathom"][unit] for run in runs)
                    for unit in ("seconds", "cpu_seconds")
                }
            made["text"].append(row)
            options.output.write_text(json.dumps(made, indent=2) + "\n")
    options.output.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made, indent=2))


if __name__ == "__main__":
    main()
