"""Rows for the recipes encoders_classes, _books, _listops, _lookup and _leads. Ours, Apache-2.0, one seed.

    python recipes/make_encoder_tasks.py authors books-train-*.jsonl -o runs/authors    # JSON lines: text, author
    python recipes/make_encoder_tasks.py books books-train-*.jsonl -o runs/books        # JSON lines: text
    python recipes/make_encoder_tasks.py listops -o runs/listops
    python recipes/make_encoder_tasks.py lookup --glued -o runs/lookup                  # source, target, distances
    python recipes/make_encoder_tasks.py leads wiki-train-*.jsonl --held-out wiki-valid.jsonl -o runs/leads

Files may end in .xz, too.

authors: excerpts of 2,000 characters, and who wrote them. Authors with at least three books; one book of each, the
shortest, is held out, so that no name of a story gives the answer away.
books: two excerpts of 1,000 characters, and whether they are of one book; half of the rows are. They do not
overlap, and held-out rows are of books (one in eight) that no training row is of.
listops: nested MAX, MIN, MED (median) and SM (sum modulo 10) of digits, by the grammar of arXiv 1804.06028, at most
`--arguments` (5) and `--depth` (5) deep, `--shortest` (20) to `--longest` (120) symbols.
lookup: pairs of a capital and a digit, one of every capital, in a text of small letters, and in it questions "qC": the
digit of C is the answer to q. The target is "q7C…": after q one layer of a decoder finds the question, and not by it
the pair, so the encoder must bring the two together, over whatever distance. (C comes last, and teaches the decoder to
find questions.) Half of the training rows are shorter, from `--shortest` characters on (64); held-out rows all have
`--longest`. With `--glued` a pair is one character and a question is one, of four capitals, four digits and six
questions, so that no layer is spent on putting characters together. Every capital then has two pairs of different
digits, one before all questions and one behind them, and the one before counts: a decoder that has all pairs from the
encoder knows both, and which is the answer is seen from the question's place alone.
leads: articles (a title, its lead, the other paragraphs) joined to a source of `--shortest` to `--longest` characters,
16,000 to 64,000 if nothing is said, which is 4k to 16k tokens of a usual tokenizer. The source begins with a title; the
target is that article's lead. No article has its lead in the source: what the lead says must be made of the rest
(`--keep-leads` leaves all leads in, and asks to find one). A held-out article is asked for once.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXCERPT = 2000
HALF = 1000  # characters of an excerpt of a pair
HELD_OUT_BOOKS = 8  # one book of so many
LEAD = (80, 1000)  # characters of a lead
BODY = 400  # characters that an article has beside it, at least
BOOKS = 3  # an author has at least as many
MOST = 1500  # training excerpts of an author
OPERATORS = {"MAX": max, "MIN": min, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}
CAPITALS = "ABCDEF"
FILLER, QUESTIONS = "abcdefghijklmnop", "qrstuvwx"
KEYS, DIGITS = "ABCD", "0123"  # of glued lookups, whose questions are the first six
PAIRS = dict(zip((key + digit for key in KEYS for digit in DIGITS), "EFGHIJKLMNOPQRST"))
ASKED = dict(zip((q + key for q in QUESTIONS[:6] for key in KEYS), "!#$%&()*+,-./:;<=>?@[]^_"))
DIGIT = 0.75  # chance that an argument is a digit, as in the published generator


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{folder / name}.jsonl: {len(rows)} rows")


def rows_of(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        with (lzma.open if file.suffix == ".xz" else open)(file, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def authors(files: list[Path], folder: Path, draw: random.Random) -> None:
    books = defaultdict(list)
    for row in rows_of(files):
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


def book_pairs(files: list[Path], folder: Path, rows: int, draw: random.Random) -> None:
    texts = [row["text"] for row in rows_of(files) if len(row["text"]) >= 4 * HALF]
    draw.shuffle(texts)
    apart = max(2, len(texts) // HELD_OUT_BOOKS)
    if len(texts) < 2 * apart:
        raise SystemExit(f"{len(texts)} books of at least {4 * HALF} characters: give at least {2 * apart}")

    def pair(books: list[str], same: int) -> dict[str, object]:
        one, other = draw.sample(range(len(books)), 2)
        if same:
            other = one
            start, end = sorted(draw.sample(range(len(books[one]) - 2 * HALF), 2))
            starts = [start, end + HALF]
            draw.shuffle(starts)
        else:
            starts = [draw.randrange(len(books[book]) - HALF) for book in (one, other)]
        texts = (books[book][start : start + HALF] for book, start in zip((one, other), starts))
        return dict(zip(("text", "second"), texts)) | {"label": same}

    write(folder, "train", [pair(texts[apart:], i % 2) for i in range(rows)])
    write(folder, "held-out", [pair(texts[:apart], i % 2) for i in range(2000)])
    print(f"{len(texts) - apart} books to train on, {apart} held out")


def articles(files: list[Path]) -> list[tuple[str, str, str]]:
    """(title, lead, the other paragraphs) of every text that begins with its title and has enough of both."""
    found = {}
    for row in rows_of(files):
        title, *paragraphs = [part.strip() for part in row["text"].split("\n") if part.strip()]
        lead, body = (paragraphs or [""])[0], "\n".join(paragraphs[1:])
        if title == row["title"] and LEAD[0] <= len(lead) <= LEAD[1] and len(body) >= BODY:
            found.setdefault(title, (title, lead, body))
    return list(found.values())


def leads(
    files: list[Path],
    held_out: list[Path],
    folder: Path,
    rows: int,
    lengths: tuple[int, int],
    keep: bool,
    draw: random.Random,
) -> None:
    train, other = articles(files), articles(held_out)
    titles = {title for title, _, _ in train}
    other = [article for article in other if article[0] not in titles]
    if min(len(train), len(other)) < 2:
        raise SystemExit(f"{len(train)} articles to train on and {len(other)} others: give files with more of both")

    def row(asked: int, among: list[tuple[str, str, str]]) -> dict[str, object]:
        title, lead, _ = among[asked]
        most = min(len(among), lengths[1] // BODY)  # more have no room
        room = round(lengths[0] * (lengths[1] / lengths[0]) ** draw.random())
        head, parts = f"Lead of: {title}\n\n", []
        room -= len(head)
        for place in (asked, *(i for i in draw.sample(range(len(among)), most) if i != asked)):
            heading, opening, body = among[place]
            text = f"{heading}\n" + (f"{opening}\n" if keep else "") + body
            parts.append(text[:room])  # the last one is cut
            room -= len(text) + 2
            if room <= 0:
                break
        first = parts[0]
        draw.shuffle(parts)
        before = sum(len(part) + 2 for part in parts[: parts.index(first)])
        return {"source": head + "\n\n".join(parts), "target": lead, "title": title, "before": before}

    write(folder, "train", [row(draw.randrange(len(train)), train) for _ in range(rows)])
    write(folder, "held-out", [row(asked, other) for asked in range(len(other))])


def expression(draw: random.Random, depth: int, most: int) -> tuple[str, int, int]:
    """(text, value, symbols)."""
    name, parts, values, size = draw.choice(list(OPERATORS)), [], [], 2
    for _ in range(draw.randint(2, most)):
        if depth == 1 or draw.random() < DIGIT:
            text, value, symbols = (lambda d: (str(d), d, 1))(draw.randrange(10))
        else:
            text, value, symbols = expression(draw, depth - 1, most)
        parts.append(text)
        values.append(value)
        size += symbols
    return f"[{name} {' '.join(parts)} ]", OPERATORS[name](values), size


def listops(folder: Path, rows: int, depth: int, arguments: int, lengths: tuple[int, int], draw: random.Random) -> None:
    seen, made = set(), []
    while len(made) < rows + rows // 10:
        text, value, size = expression(draw, depth, arguments)
        if lengths[0] <= size <= lengths[1] and text not in seen:
            seen.add(text)
            made.append({"text": text, "label": value})
    write(folder, "train", made[:rows])
    write(folder, "held-out", made[rows : rows + 2000])


def lookup(draw: random.Random, length: int) -> dict[str, object]:
    """A row of `length` characters; `distances` are from each question to its pair."""
    answers = {capital: str(draw.randrange(10)) for capital in CAPITALS}
    asked = dict(zip(QUESTIONS, draw.choices(CAPITALS, k=len(QUESTIONS))))
    pairs, questions = ["".join(pair) for pair in answers.items()], ["".join(pair) for pair in asked.items()]
    text = spread(draw, draw.sample(pairs + questions, len(pairs) + len(questions)), length)
    places = {part: text.index(part) for part in pairs + questions}
    return {
        "source": text,
        "target": "".join(q + answers[c] + c for q, c in asked.items()),
        "distances": [places[q + c] - places[c + answers[c]] for q, c in asked.items()],
    }


def glued_lookup(draw: random.Random, length: int) -> dict[str, object]:
    """The same of pairs and questions of one character, of which the pairs before the questions count."""
    digits = {capital: draw.sample(DIGITS, 2) for capital in KEYS}
    asked = dict(zip(QUESTIONS, draw.choices(KEYS, k=len(ASKED) // len(KEYS))))
    before, behind = ([PAIRS[c + digits[c][side]] for c in draw.sample(KEYS, len(KEYS))] for side in (0, 1))
    questions = {q: ASKED[q + c] for q, c in asked.items()}
    text = spread(draw, [*before, *draw.sample(list(questions.values()), len(questions)), *behind], length)
    return {
        "source": text,
        "target": "".join(q + digits[c][0] + c for q, c in asked.items()),
        "distances": [text.index(questions[q]) - text.index(PAIRS[c + digits[c][0]]) for q, c in asked.items()],
    }


def spread(draw: random.Random, parts: list[str], length: int) -> str:
    """The parts in their order, with small letters around them."""
    rest = length - sum(map(len, parts))
    cuts = [0, *sorted(draw.randint(0, rest) for _ in parts), rest]
    text = ""
    for start, stop, part in zip(cuts, cuts[1:], [*parts, ""]):
        text += "".join(draw.choices(FILLER, k=stop - start)) + part
    return text


def lookups(folder: Path, rows: int, lengths: tuple[int, int], glued: bool, draw: random.Random) -> None:
    shortest, longest = lengths
    each = (longest if i % 2 else round(shortest * (longest / shortest) ** draw.random()) for i in range(rows))
    row = glued_lookup if glued else lookup
    write(folder, "train", [row(draw, length) for length in each])
    write(folder, "held-out", [row(draw, longest) for _ in range(2000)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["authors", "books", "listops", "lookup", "leads"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="to train on (100,000; leads 4,000)")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--arguments", type=int, default=5, help="of an operator of listops, at most")
    parser.add_argument(
        "--shortest", type=int, help="symbols of listops (20), characters of lookup (64) and leads (16,000)"
    )
    parser.add_argument("--longest", type=int, help="symbols of listops (120), characters of lookup (1,024) and leads")
    parser.add_argument("--held-out", nargs="*", type=Path, default=[], help="files of leads' held-out articles")
    parser.add_argument("--glued", action="store_true", help="a pair or question of a lookup is one character")
    parser.add_argument("--keep-leads", action="store_true", help="leads stand in their articles")
    args, draw = parser.parse_args(), random.Random(0)
    rows = args.rows or (4000 if args.which == "leads" else 100_000)
    if args.which == "authors":
        authors(args.files, args.output, draw)
    elif args.which == "books":
        book_pairs(args.files, args.output, rows, draw)
    elif args.which == "leads":
        lengths = (args.shortest or 16_000, args.longest or 64_000)
        leads(args.files, args.held_out, args.output, rows, lengths, args.keep_leads, draw)
    elif args.which == "listops":
        lengths = (args.shortest or 20, args.longest or 120)
        listops(args.output, rows, args.depth, args.arguments, lengths, draw)
    else:
        lookups(args.output, rows, (args.shortest or 64, args.longest or 1024), args.glued, draw)


if __name__ == "__main__":
    main()
