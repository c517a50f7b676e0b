"""Rows for recipes/encoders_classes.yaml, encoders_listops.yaml and encoders_lookup.yaml. Ours, Apache-2.0, one seed.

    python recipes/make_encoder_tasks.py authors books-train-*.jsonl -o runs/authors    # JSON lines: text, author
    python recipes/make_encoder_tasks.py listops -o runs/listops
    python recipes/make_encoder_tasks.py lookup -o runs/lookup                          # source, target, distances

authors: excerpts of 2,000 characters, and who wrote them. Authors with at least three books; one book of each, the
shortest, is held out, so that no name of a story gives the answer away.
listops: nested MAX, MIN, MED (median) and SM (sum modulo 10) of digits, by the grammar of arXiv 1804.06028, at most
five arguments and `--depth` deep, 20 to `--longest` symbols.
lookup: pairs of a capital and a digit, one of every capital, in a text of small letters, and in it questions "qC": the
digit of C is the answer to q. The target is "q7C…": after q one layer of a decoder finds the question, and not by it
the pair, so the encoder must bring the two together, over whatever distance. (C comes last, and teaches the decoder to
find questions.) Half of the training rows are shorter, from 64 characters on; held-out rows all have `--longest`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

EXCERPT = 2000
BOOKS = 3  # an author has at least as many
MOST = 1500  # training excerpts of an author
OPERATORS = {"MAX": max, "MIN": min, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}
CAPITALS = "ABCDEF"
FILLER, QUESTIONS = "abcdefghijklmnop", "qrstuvwx"
SHORTEST = 64  # characters of a lookup
DIGIT = 0.75  # chance that an argument is a digit, as in the published generator


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{folder / name}.jsonl: {len(rows)} rows")


def authors(files: list[Path], folder: Path, draw: random.Random) -> None:
    books = defaultdict(list)
    for file in files:
        for line in file.open(encoding="utf-8"):
            row = json.loads(line)
            if row.get("author") not in (None, "Anonymous"):
                books[row["author"]].append(row["text"])
    chosen = sorted(name for name, texts in books.items() if len(texts) >= BOOKS)
    train, held_out = [], []
    for label, name in enumerate(chosen):
        last, *others = sorted(books[name], key=len)
        whole = "\n".join(others)
        for _ in range(min(MOST, 4 * len(whole) // EXCERPT)):
            start = draw.randrange(len(whole) - EXCERPT)
            train.append({"text": whole[start : start + EXCERPT], "label": label})
        starts = list(range(0, len(last) - EXCERPT, EXCERPT))
        for start in draw.sample(starts, min(60, len(starts))):
            held_out.append({"text": last[start : start + EXCERPT], "label": label})
    draw.shuffle(train)
    draw.shuffle(held_out)
    write(folder, "train", train)
    write(folder, "held-out", held_out)
    print(f"{len(chosen)} classes: {', '.join(chosen)}")


def expression(draw: random.Random, depth: int) -> tuple[str, int, int]:
    """(text, value, symbols)."""
    name, parts, values, size = draw.choice(list(OPERATORS)), [], [], 2
    for _ in range(draw.randint(2, 5)):
        if depth == 1 or draw.random() < DIGIT:
            text, value, symbols = (lambda d: (str(d), d, 1))(draw.randrange(10))
        else:
            text, value, symbols = expression(draw, depth - 1)
        parts.append(text)
        values.append(value)
        size += symbols
    return f"[{name} {' '.join(parts)} ]", OPERATORS[name](values), size


def listops(folder: Path, rows: int, depth: int, longest: int, draw: random.Random) -> None:
    seen, made = set(), []
    while len(made) < rows + rows // 10:
        text, value, size = expression(draw, depth)
        if 20 <= size <= longest and text not in seen:
            seen.add(text)
            made.append({"text": text, "label": value})
    write(folder, "train", made[:rows])
    write(folder, "held-out", made[rows : rows + 2000])


def lookup(draw: random.Random, length: int) -> dict[str, object]:
    """A row of `length` characters; `distances` are from each question to its pair."""
    answers = {capital: str(draw.randrange(10)) for capital in CAPITALS}
    asked = dict(zip(QUESTIONS, draw.choices(CAPITALS, k=len(QUESTIONS))))
    pairs, questions = ["".join(pair) for pair in answers.items()], ["".join(pair) for pair in asked.items()]
    parts = draw.sample(pairs + questions, len(pairs) + len(questions))
    rest = length - sum(map(len, parts))
    cuts = [0, *sorted(draw.randint(0, rest) for _ in parts), rest]
    text = ""
    for start, stop, part in zip(cuts, cuts[1:], [*parts, ""]):
        text += "".join(draw.choices(FILLER, k=stop - start)) + part
    places = {part: text.index(part) for part in parts}
    return {
        "source": text,
        "target": "".join(q + answers[c] + c for q, c in asked.items()),
        "distances": [places[q + c] - places[c + answers[c]] for q, c in asked.items()],
    }


def lookups(folder: Path, rows: int, longest: int, draw: random.Random) -> None:
    lengths = (longest if i % 2 else round(SHORTEST * (longest / SHORTEST) ** draw.random()) for i in range(rows))
    write(folder, "train", [lookup(draw, length) for length in lengths])
    write(folder, "held-out", [lookup(draw, longest) for _ in range(2000)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["authors", "listops", "lookup"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--longest", type=int, help="symbols of listops (120), characters of lookup (1,024)")
    args, draw = parser.parse_args(), random.Random(0)
    if args.which == "authors":
        authors(args.files, args.output, draw)
    elif args.which == "listops":
        listops(args.output, args.rows, args.depth, args.longest or 120, draw)
    else:
        lookups(args.output, args.rows, args.longest or 1024, draw)


if __name__ == "__main__":
    main()
