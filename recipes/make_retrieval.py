"""Short texts that ask for what stood before, 5 % of a folder of training texts. Ours, Apache-2.0, made from one seed.

    python recipes/make_retrieval.py corpus/train     # adds retrieval.jsonl beside the other *.jsonl files
    python recipes/make_retrieval.py corpus/train --share 0.25 --ask all --between 20

Each text names numbers of a few keys, some sentences apart, and then says one of them again, or all in another order.
Without such texts a small model never learns to look back, and every method stays at chance in tasks that ask for it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SHARE = 0.05  # of all bytes of text
KEYS = ("amber", "basil", "cedar", "delta", "ember", "flint", "grove", "heron", "ivory", "jasper", "koala", "lotus")
BETWEEN = (
    "The road goes on.", "Nobody came that day.", "It was late.", "The wind turned.", "They sat and waited.",
    "A door stood open.", "The light went out.", "Rain fell on the roof.",
)  # fmt: skip
NAME = "retrieval.jsonl"


def statement(key: str, number: str) -> str:
    return f"The number of {key} is {number}."


def question(key: str) -> str:
    return f"What is the number of {key}? The number of {key} is"


def text(draw: random.Random, ask: str, between: int) -> str:
    """Two to six keys with a number each, 0 to `between` sentences between them, and one or all asked for."""
    numbers = {key: str(draw.randrange(1000, 10000)) for key in draw.sample(KEYS, draw.randint(2, 6))}
    parts = []
    for key, number in numbers.items():
        parts += [statement(key, number), *draw.choices(BETWEEN, k=draw.randint(0, between))]
    asked = [draw.choice(list(numbers))] if ask == "one" else draw.sample(list(numbers), len(numbers))
    return " ".join([*parts, *(f"{question(key)} {numbers[key]}." for key in asked)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("corpus/train"))
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--ask", choices=["one", "all"], default="one")
    parser.add_argument("--between", type=int, default=12)
    args = parser.parse_args()
    folder, share = args.folder, args.share
    others = [path for path in sorted(folder.glob("*.jsonl")) if path.name != NAME]
    size = sum(len(json.loads(line)["text"]) for path in others for line in path.open(encoding="utf-8"))
    if not size:
        raise SystemExit(f"{folder}: no *.jsonl files with `text` in it; name the folder of the training texts")
    draw, texts, made = random.Random(0), [], 0
    while made < share / (1 - share) * size:
        texts.append(text(draw, args.ask, args.between))
        made += len(texts[-1])
    (folder / NAME).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    print(f"{folder / NAME}: {len(texts)} texts, {made} characters beside {size}")


if __name__ == "__main__":
    main()
