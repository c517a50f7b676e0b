"""Text of two made-up sciences, for recipes/growth_cpu.yaml. Ours, CC0, made from one seed.

    python recipes/make_disciplines.py runs/disciplines      # two JSON lines files, and held-out/ of their names

Each thing of a science has facts of its own. The held-out sections state the same facts in other company: what they say
can be known from the training text, and from nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SCIENCES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "minerals": (
        ("ub", "kel", "mar", "tos", "vel", "dro", "fen", "gal"), ("b", "or", "an", "il", "um"), "ite",
        {
            "colour": ("red", "green", "blue", "white", "black", "brown"),
            "rock": ("basalt", "granite", "shale", "marble", "tuff"),
            "hard": tuple("23456789"),
        },
        (
            "The mineral {name} is {colour} and has a hardness of {hard}.",
            "In thin sections of {rock}, {name} is {colour}.",
            "Grains of {name} scratch what is softer than {hard}, and lie in {rock}.",
            "Most {name} is mined from {rock}.",
        ),
    ),
    "moons": (
        ("Cal", "Dri", "Eno", "Hes", "Ion", "Lyr", "Nar", "Pho"), ("la", "me", "no", "ri", "sa"), "x",
        {
            "planet": ("Arden", "Borea", "Cetis", "Dorun"),
            "days": tuple(str(3 * n) for n in range(2, 14)),
            "surface": ("ice", "sulphur", "dust", "lava", "tar"),
        },
        (
            "The moon {name} goes round {planet} in {days} days.",
            "Seen from {planet}, {name} returns after {days} nights.",
            "Landers on {name} found a surface of {surface}.",
            "The orbit of {name} lies about {planet}; its ground is {surface}.",
        ),
    ),
}  # fmt: skip


def main() -> None:
    folder, draw = Path(sys.argv[1]), random.Random(0)
    for science, (begin, middle, end, facts, phrases) in SCIENCES.items():
        things = [
            {"name": a + b + end, **{fact: draw.choice(values) for fact, values in facts.items()}}
            for a in begin
            for b in middle
        ]
        for part, sections in ((".", 400), ("held-out", 30)):
            rows = []
            for _ in range(sections):
                said = [draw.choice(phrases).format(**draw.choice(things)) for _ in range(12)]
                rows.append(json.dumps({"text": " ".join(said)}) + "\n")
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / f"{science}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
