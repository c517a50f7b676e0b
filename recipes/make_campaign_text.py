"""The folders that recipes/depth_campaign_20m.yaml reads, of files of JSON lines (`text`), compressed (`.xz`) or not.

    python recipes/make_campaign_text.py corpus --train books.jsonl.xz wiki.jsonl.xz --held-out novels.jsonl pages.jsonl

Training files are copied. Held-out texts become documents of alike size, so that drawing documents anew says something
of a difference: a book is cut into passages at the ends of its paragraphs. The files take turns, so that any beginning
of the text has all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

PASSAGE = 4000  # characters, or to the end of the paragraph after them


def content(path: Path) -> bytes:
    return lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()


def passages(text: str) -> Iterator[str]:
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        found.append(paragraph)
        if sum(map(len, found)) >= PASSAGE:
            yield "\n\n".join(found)
            found = []
    if "".join(found).strip():
        yield "\n\n".join(found)


def main(folder: Path, train: list[Path], held_out: list[Path]) -> None:
    for part in ("train", "validation"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for path in train:
        (folder / "train" / path.name.removesuffix(".xz")).write_bytes(content(path))
    texts = [[json.loads(line)["text"] for line in content(path).splitlines()] for path in held_out]
    cut = [[passage for text in of_file for passage in passages(text)] for of_file in texts]
    with (folder / "validation" / "passages.jsonl").open("w", encoding="utf-8") as file:
        for passage in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*cut))):
            file.write(json.dumps({"text": passage}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    main(given.folder, given.train, given.held_out)
