"""Text of five sciences, a folder each: what recipes/growth_small.yaml trains on, and geology.

    python recipes/make_science.py CLONES corpus/science     # CLONES: a folder with `git clone`s of the books below
    python recipes/make_science.py CLONES corpus/science --only geology
    python recipes/make_science.py CLONES corpus/science --old  # astronomy and biology have books like geology's, too

Astronomy, biology, chemistry and physics are OpenStax's textbooks, each read at a commit whose LICENSE file is CC BY
4.0 (newer commits of most say CC BY-NC-SA); the script refuses another one. Attribution: OpenStax, Rice University,
https://openstax.org, CC BY 4.0. Geology is books published from 1795 to 1915, in the public domain, as the repositories
of github.com/GITenberg have them; Project Gutenberg's header and licence are left out. With `--old` and without a cap
four of the five have at least 1.5 million tokens (SmolLM2's) to train on; chemistry has 0.5.

Each tenth section of a book, or chapter, is held out, by its name's hash. A paragraph of which most runs of 13 words
stand elsewhere before is dropped, and one that shares such a run with a held-out section is not trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

BOOKS = {
    "astronomy": {"osbooks-astronomy": "63157f370b09c06a4cc12832384aaaf4de1ced3b"},
    "biology": {
        "osbooks-microbiology": "ecf34dad129d686703780e87ab5aa2e59c577a6a",
        "osbooks-anatomy-physiology": "b0058a743bdd2cc08196abaaa7d5469970c0d80c",
    },
    "chemistry": {"osbooks-chemistry-bundle": "32c719622fbb7a0ca729cd645c1df4cf4e7d5b3a"},
    "physics": {
        "osbooks-university-physics-bundle": "db44eb99e9aa1d918fd8cf182f82ccdece9c7b11",
        "osbooks-college-physics-bundle": "f98d7a792138a6133fe7267d17e70aa04e9ccbed",
        "osbooks-physics": "ff78c7a8150fdda5ed1f786ac59ac25cdd532ef0",
    },
}
OLD = {  # number of the book, which ends its repository's name -> commit
    "geology": {
        "33224": "4b6dea0ae31ffe94667dbeacfd35f14304622db3",  # Lyell, Principles of Geology, 9th edition, 1853
        "34350": "b289afb9575e3269ab0a7ee5f48044298f28fedd",  # Lyell, A Manual of Elementary Geology, 1852
        "3772": "eada2e75384042a65317efeaa6494193cd8259eb",  # Lyell, The Student's Elements of Geology, 1871
        "18562": "16e0acd4a2c1919caea39b4fd66ec9a1fe1ec947",  # Shaler, Outlines of the Earth's History, 1898
        "4204": "27b01e570bad8a05ab3c99e3f254258818c88f1e",  # Norton, The Elements of Geology, 1905
        "12861": "d9ebf639e8f83a5c6b8402df739ead76a3ec13c2",  # Hutton, Theory of the Earth, volume 1, 1795
        "14179": "c99a827a20aa0b51c9c66e219991fccaac7e0bc4",  # Hutton, volume 2, 1795
        "3620": "3012bb60854a6564622aead488d262194b71f8ee",  # Darwin, Geological Observations on South America, 1846
        "16614": "720f1625ffbc4c8bab6f2b8d01e8b6f0dcc51937",  # Joly, The Birth-Time of the World, 1915
    },
    "astronomy": {
        "27378": "c4e3086d18d4936113dc46908911559582edcffe",  # Ball, The Story of the Heavens, 1900
        "28247": "ae4ae1ec8a594d1c6e885868d1cdd0b07092a44f",  # Clerke, Popular History of Astronomy, 4th edition, 1908
        "28570": "6e36766e9357df1f80a7e0524548c346de6860c9",  # Dolmage, Astronomy of To-day, 1910
        "4065": "cb42588f1cdf65969a711f87f1b855120a281eff",  # Newcomb, Side-Lights on Astronomy, 1906
        "26556": "b7ee733bea53f48c4d0368193aa9c8c158e9f172",  # Proctor, Myths and Marvels of Astronomy, 1896
        "8172": "861dcf83d2e0f559b07d246cf220eb8119433c7a",  # Forbes, History of Astronomy, 1909
        "33337": "fa71ffa63311a4da7079cb957a7f735cafde8209",  # Turner, Astronomical Discovery, 1904
        "15620": "25fc26a0f3431c0e33c01dcdfeb338bca8f7e5f4",  # Warren, Recreations in Astronomy, 1879
        "25267": "1e66053c76552ce05063ab7f22876c8ac7634f2f",  # Flammarion, Astronomy for Amateurs, 1904
    },
    "biology": {
        "2009": "18d330348114cdebd6ea3ec2a4b09fa7a98b8c9b",  # Darwin, The Origin of Species, 6th edition, 1872
        "2300": "1e0099802adfbbbf181ee8859e4d21f4e455396f",  # Darwin, The Descent of Man, 2nd edition, 1874
    },
}
BEFORE_BOOK = re.compile(r"\*\*\* ?START OF[^*]*\*\*\*|\*END\*.*")
SENTENCE = re.compile(r"(?<!\d)[.!?;:'\"\])]+$")
BEHIND_BOOK = re.compile(r"\*\*\* ?END OF|End of (?:The |this )?Project Gutenberg", re.IGNORECASE)
SCIENCES = [*BOOKS, "geology"]
LICENCE = "Attribution 4.0 International"
RUN = 13  # words that two texts share by chance no more
TEXT = {"para", "item", "definition", "caption", "entry"}
SKIPPED = {"metadata", "annotation", "annotation-xml", "media"}


def git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *words], check=True, capture_output=True, text=True).stdout


def sections(clone: Path, commit: str) -> Iterator[tuple[str, list[str]]]:
    """(name, paragraphs) of every section of a book. Raises ValueError for a commit of another licence."""
    licence = git(clone, "show", f"{commit}:LICENSE").splitlines()[0].strip()
    if licence != LICENCE:
        raise ValueError(f"{clone}: at {commit} its licence is {licence!r}; this corpus takes {LICENCE!r}")
    for name in sorted(git(clone, "ls-tree", "--name-only", f"{commit}:modules").split()):
        root = ElementTree.fromstring(git(clone, "show", f"{commit}:modules/{name}/index.cnxml"))
        yield name, list(paragraphs(root))


def chapters(clones: Path, number: str, commit: str) -> Iterator[tuple[str, list[str]]]:
    """(name, paragraphs) of every chapter of a plain text, but those of contents and indexes, which end with a page."""
    (clone,) = clones.glob(f"*_{number}")
    names = git(clone, "ls-tree", "--name-only", commit).split()
    name = next(name for name in (f"{number}-8.txt", f"{number}.txt") if name in names)
    shown = subprocess.run(["git", "-C", str(clone), "show", f"{commit}:{name}"], check=True, capture_output=True)
    text = shown.stdout.decode("latin-1").replace("\r\n", "\n")
    begin = max((match.end() for match in BEFORE_BOOK.finditer(text)), default=0)
    end = next((match.start() for match in BEHIND_BOOK.finditer(text) if match.start() > begin), len(text))
    for place, chapter in enumerate(re.split(r"\n(?=\s*CHAPTER\b)", text[begin:end])):
        texts = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", chapter)]
        good = [part for part in texts if len(part) >= 60 and SENTENCE.search(part) and "www.pgdp.net" not in part]
        if good:
            yield f"{number}-{place}", good


def paragraphs(root: ElementTree.Element) -> Iterator[str]:
    """The texts of the outermost paragraphs, items, definitions, captions and cells, formulas as their symbols."""
    tag = root.tag.rpartition("}")[2]
    if tag in SKIPPED:
        return
    if tag in TEXT:
        text = re.sub(r"\s+", " ", "".join(spoken(root))).strip()
        if len(text) >= 60:
            yield text
        return
    for part in root:
        yield from paragraphs(part)


def spoken(element: ElementTree.Element) -> Iterator[str]:
    if element.tag.rpartition("}")[2] in SKIPPED:
        return
    yield element.text or ""
    for part in element:
        yield from spoken(part)
        yield part.tail or ""


def runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))}


def digest(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def first(rows: list[dict[str, str]], most: float) -> list[dict[str, str]]:
    """Rows of at most so many characters, drawn by their names' hashes and so from everywhere in the books."""
    size, kept = 0, set()
    for row in sorted(rows, key=lambda row: digest(row["id"][::-1])):
        if size + len(row["text"]) <= most:
            size += len(row["text"])
            kept.add(row["id"])
    return [row for row in rows if row["id"] in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clones", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=float, default=math.inf, help="megabytes of a science, a tenth of it held out")
    parser.add_argument("--only", nargs="+", choices=SCIENCES, default=SCIENCES)
    parser.add_argument("--old", action="store_true", help="astronomy and biology with books in the public domain, too")
    arguments = parser.parse_args()
    for science in arguments.only:
        read = [
            (book, name, texts)
            for book, commit in BOOKS.get(science, {}).items()
            for name, texts in sections(arguments.clones / book, commit)
        ]
        if science == "geology" or arguments.old:
            for book, commit in OLD.get(science, {}).items():
                read += [(book, name, texts) for name, texts in chapters(arguments.clones, book, commit)]
        out: dict[str, list[dict[str, str]]] = {"held-out": [], "train": []}
        held: set[str] = set()
        seen: set[str] = set()
        for part in out:  # the held-out sections first
            for book, name, texts in read:
                if (digest(name) % 10 == 0) != (part == "held-out"):
                    continue
                kept = []
                for text in texts:
                    mine = runs(text)
                    if len(mine & seen) > len(mine) / 2 or (part == "train" and mine & held):
                        continue
                    kept.append(text)
                    seen |= mine
                    if part == "held-out":
                        held |= mine
                if kept:
                    out[part].append({"id": f"{book}/{name}", "text": "\n\n".join(kept)})
        for part, rows in out.items():
            rows = first(rows, 1e6 * arguments.most * (0.1 if part == "held-out" else 0.9))
            folder = arguments.folder / part
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{science}.jsonl").write_text(lines, encoding="utf-8")
            print(f"{science} {part}: {len(rows)} sections, {sum(len(row['text']) for row in rows) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
