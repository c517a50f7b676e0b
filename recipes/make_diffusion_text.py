"""What the diffusion recipes read: prose, and texts whose right answer is known. Ours, Apache-2.0, made from seeds.

    python recipes/make_diffusion_text.py corpus-en corpus        # a folder of *-train-*.jsonl.xz and *-valid.jsonl.xz

    corpus/text         the prose to train on, as it is
    corpus/passkey      rows of just --length tokens, EOS included: a pass key said three to eight times within prose.
                        With --length as block_size every block holds one key
    corpus/addition     sums of three digits, one after the other
    corpus/validation   prose to be scored on
    corpus/tokenizer    a BPE learned from all of it

Both tasks are what a masked model may fill in any order: the digits of a key come from afar, those of a sum from their
neighbours. Without such texts a small model never learns to look back.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

DIGITS = 8  # of a key
SAYS = " The pass key is"


def spaced(number: str) -> str:
    """4 8 2: every digit is a token."""
    return "".join(f" {digit}" for digit in number)


def key(draw: random.Random) -> str:
    return spaced("".join(draw.choices("0123456789", k=DIGITS)))


def equation(draw: random.Random) -> tuple[str, str]:
    """A sum of three digits without its answer, and the answer, four digits."""
    a, b = draw.randrange(1000), draw.randrange(1000)
    return f"{spaced(f'{a:03}')} +{spaced(f'{b:03}')} =", spaced(f"{a + b:04}")


def equations(draw: random.Random, count: int) -> str:
    return "".join(f"{question}{answer} ;" for question, answer in (equation(draw) for _ in range(count)))


def documents(files: list[Path]) -> Iterator[str]:
    for file in files:
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def said_often(draw: random.Random, words: list[str], sizes: list[int], length: int) -> str:
    """Prose of `length` tokens in which one key is said three to eight times; half of the texts end with the last.

    words: of prose, each with the space before it.   sizes: their tokens.
    """
    said, times = f"{SAYS}{key(draw)}.", draw.randint(3, 8)
    room = length - times * (len(SAYS.split()) + DIGITS + 1)
    start = draw.randrange(len(words) - length)
    kept: list[str] = []
    for word, size in zip(words[start:], sizes[start:], strict=False):
        if size > room:
            break
        kept.append(word)
        room -= size
    kept += [" and"] * room
    places = sorted(draw.choices(range(len(kept)), k=times))
    if draw.random() < 0.5:
        places[-1] = len(kept)
    for place in reversed(places):
        kept.insert(place, said)
    return "".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prose", type=Path)
    parser.add_argument("output", type=Path)
    for name, default in (("length", 512), ("passkeys", 30_000), ("sums", 1_150_000), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--documents", type=int, help="of the prose: read only so many of a file")
    given = parser.parse_args()

    from fathom.data.tokenizer import train_bpe

    def write(name: str, rows: Iterator[str] | list[str]) -> None:
        (given.output / name).mkdir(parents=True, exist_ok=True)
        with (given.output / name / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": row}) + "\n" for row in rows)

    train = sorted(given.prose.glob("*-train-*.jsonl.xz"))
    if not train:
        raise SystemExit(f"{given.prose}: no *-train-*.jsonl.xz in it; name the folder of the prose")
    for name, files in (("text", train), ("validation", sorted(given.prose.glob("*-valid.jsonl.xz")))):
        (given.output / name).mkdir(parents=True, exist_ok=True)
        if given.documents is None:
            for file in files:
                shutil.copyfile(file, given.output / name / file.name)
        else:
            write(name, [text for file in files for text in islice(documents([file]), given.documents)])

    draw = random.Random(0)
    samples = [text[:40_000] for file in train for text in islice(documents([file]), 60)]
    sums = [equations(draw, 1000) for _ in range(given.sums // 1000)]
    tokenizer: Any = train_bpe([*samples, *sums[:20], *(f"{SAYS}{key(draw)}." for _ in range(5000))], given.vocabulary)
    tokenizer.save_pretrained(given.output / "tokenizer")
    write("addition", sums)

    words = [f" {word}" for text in samples[::4] for word in text.split()]
    sizes = [len(ids) for ids in tokenizer(words, add_special_tokens=False)["input_ids"]]
    write("passkey", [said_often(draw, words, sizes, given.length - 1) for _ in range(given.passkeys)])


if __name__ == "__main__":
    main()
