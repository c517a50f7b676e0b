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
    tasks/countdown  three numbers up to 20 and a target that two sums or differences of them reach, with the numbers
                     between: " 17 9 2 > 10 =" is solved by " 9 - 2 7 17 - 7 10", and any such answer is right. A
                     tenth of all problems, whatever the order of their numbers, is held out. Made with --countdown

Each has train.jsonl and validation.jsonl, of which no row is in train; tasks/tokenizer reads both.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import zlib
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

VARIABLES = 16
WALK, SAID = 16, 2  # digits of a walk, and how many of them are said
ADDED = 3  # what is added to a digit lies below
DIGITS, KEYS = 5, 8  # of a key, and keys of a text
NUMBERS, MOST = 3, 20  # of countdown, and the largest number that occurs
HELD_OUT = 10  # one in so many problems of countdown
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
        cuts[0] = 1 + round(depth * (room - 2))  # the places that are drawn without a depth are 1 to room − 1
    text, at = "", 0
    for cut, name in sorted(zip(cuts, names, strict=True)):
        text += f"{letters[at:cut]}{name}{values[name]}"
        at = cut
    questions = names[:asked]
    parts = [text + letters[at:] + questions[0], values[questions[0]]]
    for name in questions[1:]:
        parts += [name, values[name]]
    return parts


def countdown(draw: random.Random, held_out: bool = False) -> tuple[str, str]:
    """Numbers with a target, and one of the ways to reach it: a calculation and its result after the other."""
    while True:
        numbers = [draw.randint(1, MOST) for _ in range(NUMBERS)]
        left, said = draw.sample(numbers, NUMBERS), ""
        while len(left) > 1 and 1 <= left[-1] <= MOST:
            a, b = (left.pop(draw.randrange(len(left))) for _ in range(2))
            plus = draw.random() < 0.5
            left.append(a + b if plus else a - b)
            said += f" {a} {'+' if plus else '-'} {b} {left[-1]}"
        problem = f"{sorted(numbers)} {left[0]}".encode()
        if len(left) == 1 and 1 <= left[0] <= MOST and (zlib.crc32(problem) % HELD_OUT == 0) == held_out:
            return "".join(f" {number}" for number in numbers) + f" > {left[0]} =", said


def solves(prompt: str, answer: str) -> bool:
    """Whether an answer takes every number of the prompt once, calculates rightly and ends with the target."""
    *numbers, _, target, _ = prompt.split()
    left, words = list(map(int, numbers)), answer.split()
    if len(words) != 4 * (len(left) - 1):
        return False
    for a, sign, b, result in zip(*(words[i::4] for i in range(4)), strict=True):
        if sign not in ("+", "-") or not all(word.isdecimal() for word in (a, b, result)):
            return False
        for number in (int(a), int(b)):
            if number not in left:
                return False
            left.remove(number)
        left.append(int(result))
        if int(a) + (int(b) if sign == "+" else -int(b)) != int(result):
            return False
    return left == [int(target)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    sizes = {
        "chains": 400_000,
        "walks": 200_000,
        "passkeys": 60_000,
        "countdown": 0,
        "length": 512,
        "variables": VARIABLES,
    }
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
    words, size = [word(one, number) for one in before for number in range(10)], 512
    text = "".join(words) * 2 + " =" + "".join(f" {digit}" for digit in range(10)) * 2 + " ="
    if given.countdown:
        text, size = text + "".join([f" {number}" for number in range(1, MOST + 1)] + [" +", " -", " >"]) * 3, 576
    tokenizer = train_bpe([text], size)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(given.output / "tokenizer")

    def length(draw: random.Random) -> int:
        return draw.randint(given.shortest, given.length) if given.shortest else given.length

    makers: dict[str, tuple[int, Callable[[random.Random, bool], Sequence[str]]]] = {
        "chains": (given.chains, lambda draw, _: chain(draw, given.variables)),
        "walks": (given.walks, lambda draw, _: walk(draw, given.digits)),
        "passkey": (
            given.passkeys,
            lambda draw, _: passkey(draw, length(draw), given.keys, given.asked or given.keys, digits=given.key_digits),
        ),
        "countdown": (given.countdown, countdown),
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
                    parts = make(draw, name == "validation")
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
