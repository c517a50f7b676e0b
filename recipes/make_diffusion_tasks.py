"""Three tasks whose right answer is known, as rows of prompt and answer. Made from seeds.

    python recipes/make_diffusion_tasks.py tasks

    tasks/chains     16 digits, each given as another one plus 0, 1 or 2, mod 10, in one token: " Cb Zh Ac … =" says
                     that A is C + 1, B is 7 and C is A + 2. They form one chain, whose order is random: whoever fills
                     in the digits has to find the one that is given (Z), then the one that hangs on it, and so on
    tasks/walks      --digits digits in a row, of which each is the one before it plus 0, 1 or 2, mod 10. All steps are
                     said, and two of the digits: " Zb Ca Zc … =" has steps of 1, 0 and 2, and its second digit is 2.
                     Whoever begins beside the digits that are said needs one sum a digit; the first one from the left
                     needs many
    tasks/passkey    keys among letters, a capital with --key-digits digits: "…kuA41297xz…"; then --asked of them asked
                     for by their capitals. Every character is a token, and a row has --length of them. Half of the
                     keys stand near the end (their distances are log-uniform), as what is near is learned first

Each has train.jsonl and validation.jsonl, of which no row is in train; tasks/tokenizer reads both.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

VARIABLES = 16
WALK, SAID = 16, 2  # digits of a walk, and how many of them are said
ADDED = 3  # what is added to a digit lies below
DIGITS, KEYS = 5, 8  # of a key, and keys of a text
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # answers have a known length: no end


def word(before: int | None, number: int) -> str:
    """The variable that another one hangs on, and what is added to it: one token."""
    return f" {'Z' if before is None else string.ascii_uppercase[before]}{string.ascii_lowercase[number]}"


def chain(draw: random.Random, variables: int = VARIABLES) -> tuple[str, str]:
    """What is said of the digits, and the digits."""
    order = draw.sample(range(variables), variables)
    values, said = [0] * variables, [""] * variables
    for place, variable in enumerate(order):
        before = order[place - 1] if place else None
        number = draw.randrange(10 if before is None else ADDED)
        values[variable] = (number + (0 if before is None else values[before])) % 10
        said[variable] = word(before, number)
    return "".join(said) + " =", "".join(f" {value}" for value in values)


def depths(prompt: str) -> list[int]:
    """How many sums away from the given digit each variable is."""
    before = {i: string.ascii_uppercase.find(said[0]) for i, said in enumerate(prompt.split()[:-1])}
    found = []
    for variable in before:
        steps = 0
        while before[variable] != string.ascii_uppercase.find("Z"):
            variable, steps = before[variable], steps + 1
        found.append(steps)
    return found


def walk(draw: random.Random, digits: int = WALK) -> tuple[str, str]:
    """Steps from digit to digit with two of the digits, and all digits."""
    steps = [draw.randrange(ADDED) for _ in range(digits)]  # the last one leads nowhere
    values = [draw.randrange(10)]
    for step in steps[:-1]:
        values.append((values[-1] + step) % 10)
    said = draw.sample(range(digits), SAID)
    words = [word(values[i] if i in said else None, step) for i, step in enumerate(steps)]
    return "".join(words) + " =", "".join(f" {value}" for value in values)


def distances(prompt: str) -> list[int]:
    """How many sums away from the nearest digit that is said each digit of a walk is."""
    words = prompt.split()[:-1]
    said = [i for i, each in enumerate(words) if each[0] != "Z"]
    return [min(abs(i - j) for j in said) for i in range(len(words))]


def passkey(
    draw: random.Random, length: int, keys: int = KEYS, asked: int = KEYS, depth: float | None = None,
    digits: int = DIGITS,
) -> list[str]:  # fmt: skip
    """[text and question, answer, question, answer …] of `length` tokens. depth: where the first key that is
    asked for stands, 0 to 1; None: anywhere."""
    names = draw.sample(string.ascii_uppercase, keys)
    values = {name: "".join(draw.choices(string.digits, k=digits)) for name in names}
    room = length - keys * (digits + 1) - asked * (digits + 1)
    letters = "".join(draw.choices(string.ascii_lowercase, k=room))
    cuts = [room - int(room ** draw.random()) for _ in names]
    if depth is not None:
        cuts[0] = round(depth * room)
    text, at = "", 0
    for cut, name in sorted(zip(cuts, names, strict=True)):
        text += f"{letters[at:cut]}{name}{values[name]}"
        at = cut
    questions = names[:asked]
    parts = [text + letters[at:] + questions[0], values[questions[0]]]
    for name in questions[1:]:
        parts += [name, values[name]]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    sizes = {"chains": 400_000, "walks": 200_000, "passkeys": 60_000, "length": 512, "variables": VARIABLES}
    sizes |= {"digits": WALK, "keys": KEYS, "key-digits": DIGITS, "held-out": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--asked", type=int, help="keys that a text asks for; default: all")
    parser.add_argument("--shortest", type=int, help="texts with keys have this to --length tokens; default: --length")
    given = parser.parse_args()
    least = (given.keys + (given.asked or given.keys)) * (given.key_digits + 1)
    if given.passkeys and (given.shortest or given.length) < least:
        parser.error(f"texts of {given.shortest or given.length} tokens: keys and questions alone take {least}")

    from fathom.data.tokenizer import train_bpe

    before = (None, *range(max(given.variables, 10)))  # a walk names digits with their letters
    words = [word(one, number) for one in before for number in range(10)]
    tokenizer = train_bpe(["".join(words) * 2 + " =" + "".join(f" {digit}" for digit in range(10)) * 2 + " ="], 512)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(given.output / "tokenizer")

    def length(draw: random.Random) -> int:
        return draw.randint(given.shortest, given.length) if given.shortest else given.length

    makers: dict[str, tuple[int, Callable[[random.Random], Sequence[str]]]] = {
        "chains": (given.chains, lambda draw: chain(draw, given.variables)),
        "walks": (given.walks, lambda draw: walk(draw, given.digits)),
        "passkey": (
            given.passkeys,
            lambda draw: passkey(draw, length(draw), given.keys, given.asked or given.keys, digits=given.key_digits),
        ),
    }
    for task, (count, make) in makers.items():
        if not count:
            continue
        (given.output / task).mkdir(parents=True, exist_ok=True)
        held_out: set[str] = set()
        for name, seed, rows in (("validation", 1, given.held_out), ("train", 0, count)):
            draw = random.Random(seed)
            with (given.output / task / f"{name}.jsonl").open("w", encoding="utf-8") as out:
                while rows:
                    parts = make(draw)
                    if parts[0] in held_out:
                        continue
                    if name == "validation":
                        held_out.add(parts[0])
                    messages = [
                        {"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), parts)
                    ]
                    out.write(json.dumps({"messages": messages}) + "\n")
                    rows -= 1


if __name__ == "__main__":
    main()
