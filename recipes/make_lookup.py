"""The data of recipes/sft_cpu.yaml: made-up facts, asked about in several ways. Ours, Apache-2.0, made from one seed.

    python recipes/make_lookup.py runs/lookup     # writes train.jsonl and held-out.jsonl

Each thing has a room, a colour and an owner. train.jsonl asks for every fact in all phrasings but one, held-out.jsonl
in the one that is left: a right answer needs the fact and the phrasing, each learned from other rows.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

THINGS = (
    "lamp", "kettle", "ladder", "violin", "globe", "anchor", "basket", "compass", "mirror", "drum", "candle", "map",
    "chair", "bell", "vase", "clock", "rope", "saddle", "hammer", "easel", "trunk", "stove", "quilt", "cradle",
)  # fmt: skip
FACTS = {
    "room": ("kitchen", "attic", "cellar", "study", "hall", "garden"),
    "colour": ("red", "green", "blue", "white", "black", "brown"),
    "owner": ("Ada", "Ben", "Clara", "David", "Emma", "Frank"),
}
QUESTIONS = {
    "room": ("Where is the {}?", "In which room is the {}?", "Tell me where the {} is.", "Where can I find the {}?"),
    "colour": (
        "What colour is the {}?",
        "Which colour has the {}?",
        "Tell me the {}'s colour.",
        "How is the {} painted?",
    ),
    "owner": ("Whose is the {}?", "Who owns the {}?", "Tell me who owns the {}.", "To whom does the {} belong?"),
}
ANSWERS = {"room": "The {} is in the {}.", "colour": "The {} is {}.", "owner": "The {} belongs to {}."}


def main(folder: Path) -> None:
    draw = random.Random(0)
    train, held_out = [], []
    for thing in THINGS:
        for kind, values in FACTS.items():
            answer = ANSWERS[kind].format(thing, draw.choice(values))
            rows = [{"prompt": question.format(thing), "answer": answer} for question in QUESTIONS[kind]]
            held_out.append(rows.pop(draw.randrange(len(rows))))
            train += rows
    draw.shuffle(train)
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("train", train), ("held-out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    print(f"{folder}: {len(train)} rows to train on, {len(held_out)} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lookup"))
