"""Short texts that ask for what stood before, 5 % of a folder of training texts. Ours, Apache-2.0, made from one seed.

    python recipes/make_retrieval.py corpus/train     # adds retrieval.jsonl beside the other *.jsonl files

Each text names numbers of a few keys, some sentences apart, and then says one of them again. Without such texts a small
model never learns to look back, and every method stays at chance in tasks that ask for it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SHARE = 0.05  # of all bytes of text
KEYS = ("amber", "basil", "cedar", "delta", "ember", "flint", "grove", "heron", "ivory", "jasper", "koala", "lotus")
BETWEEN = (
    "The road goes on.", "Nobody came that day.", "It was late.", "The wind turned.", "They sat and waited.",
    "A door stood open.", "The light went out.", "Rain fell on the roof.",
)  # fmt: skip
NAME = "retrieval.jsonl"


def text(draw: random.Random) -> str:
    """Two to six keys with a number each, 0 to 12 sentences between them, and one asked for."""
    numbers = {key: str(draw.randrange(1000, 10000)) for key in draw.sample(KEYS, draw.randint(2, 6))}
    parts = []
    for key, number in numbers.items():
        parts += [f"The number of {key} is {number}.", *draw.choices(BETWEEN, k=draw.randint(0, 12))]
    asked = draw.choice(list(numbers))
    return " ".join([*parts, f"What is the number of {asked}? The number of {asked} is {numbers[asked]}."])


def main(folder: Path) -> None:
    others = [path for path in sorted(folder.glob("*.jsonl")) if path.name != NAME]
    size = sum(len(json.loads(line)["text"]) for path in others for line in path.open(encoding="utf-8"))
    if not size:
        raise SystemExit(f"{folder}: no *.jsonl files with `text` in it; name the folder of the training texts")
    draw, texts, made = random.Random(0), [], 0
    while made < SHARE / (1 - SHARE) * size:
        texts.append(text(draw))
        made += len(texts[-1])
    (folder / NAME).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    print(f"{folder / NAME}: {len(texts)} texts, {made} characters beside {size}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "corpus/train"))
