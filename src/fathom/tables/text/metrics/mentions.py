"""Scores of what a description mentions: cells, numbers, planned slots, and words from no input."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fathom.tables.text.linearize import Grid, Table, content_words, words

_NUMBER = re.compile(r"(?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)|(?<![\w.])[-+−]?\.\d+")

_SPREAD = re.compile(r"(?<=\d)\s*(?:±|\+/-|\().*", re.DOTALL)


def numbers(text: str) -> list[tuple[float, int]]:
    """The numbers of a text, each with its digits after the point: "27.2 %, 1,000" → (27.2, 1), (1000, 0)."""
    found = []
    for written in _NUMBER.findall(text):
        plain = written.replace(",", "").replace("−", "-")
        found.append((float(plain), len(plain.partition(".")[2])))
    return found


def mentioned(cell: str, text: str) -> bool:
    """Whether a text names a cell: its numbers, or its words, one after the other. A spread behind a number, "27.5 ±
    0.3" or "27.5 (0.3)", may be left out."""
    own = [value for value, _ in numbers(_SPREAD.sub("", cell))] or [value for value, _ in numbers(cell)]
    if own and not content_words(re.sub(_NUMBER, " ", cell)):
        return _run(own, [value for value, _ in numbers(text)])
    return _run(words(cell), words(text))


def _run(wanted: Sequence[Any], said: Sequence[Any]) -> bool:
    return bool(wanted) and any(said[i : i + len(wanted)] == wanted for i in range(len(said) - len(wanted) + 1))


def coverage(text: str, highlights: Sequence[str]) -> float | None:
    """Share of the highlighted cells that a description mentions; None without any."""
    return sum(mentioned(cell, text) for cell in highlights) / len(highlights) if highlights else None


def off_target(text: str, grid: Grid) -> float | None:
    """Share of the mentioned cells that are not highlighted; None where no cell is mentioned.

    Cells of one text are one cell. A number that is in no highlighted cell counts wherever it comes from.
    """
    found = {cell for cell in (*grid.cells, *grid.highlights) if mentioned(cell, text)}
    return len(found - set(grid.highlights)) / len(found) if found else None


def number_precision(text: str, cells: Iterable[str]) -> float | None:
    """Share of a description's numbers that a table has or that follow from its numbers in one step; None without
    numbers.

    A step is rounding to the digits written, or the sum, difference, ratio, or ratio in percent of two numbers. From a
    large table many numbers follow: compare the score between models, not with 1.
    """
    held = sorted({value for cell in cells for value, _ in numbers(cell)})
    said = numbers(text)
    if not said:
        return None
    return sum(_derivable(value, digits, held) for value, digits in said) / len(said)


def _derivable(value: float, digits: int, held: list[float]) -> bool:
    half = 0.5 * 10.0**-digits * (1 + 1e-9)  # what rounds to the digits written

    def near(other: float) -> bool:
        return abs(other - value) <= half

    def some(ends: tuple[float, float], b: float, other: int, made: Callable[[float, float], float]) -> bool:
        """Whether a number between the ends, not the one at place `other`, makes the value with b."""
        low, high = min(ends), max(ends)
        slack = 1e-9 * (1 + abs(low) + abs(high))
        places = range(bisect.bisect_left(held, low - slack), bisect.bisect_right(held, high + slack))
        return any(i != other and near(made(held[i], b)) for i in places)

    low, high = value - half, value + half
    return some((low, high), 0.0, -1, lambda a, b: a) or any(
        some((low - b, high - b), b, j, lambda a, b: a + b)
        or some((low + b, high + b), b, j, lambda a, b: a - b)
        or some((b - low, b - high), b, j, lambda a, b: b - a)
        or (b != 0 and some((low * b, high * b), b, j, lambda a, b: a / b))
        or (b != 0 and some((low * b / 100, high * b / 100), b, j, lambda a, b: 100 * a / b))
        for j, b in enumerate(held)
    )


def plan_adherence(text: str, table: Table, plan: Sequence[str]) -> float | None:
    """Planned slots whose values a description has in the planned order (gaps allowed) / slots of the plan. None for an
    empty plan."""
    from fathom.tables.text.plan import place

    if not plan:
        return None
    held = dict(table.slots)
    places = [place(held[key], text) for key in plan]
    best = [0] * len(plan)  # longest increasing run that ends at an item
    for i, here in enumerate(places):
        if here is not None:
            best[i] = 1 + max((best[j] for j in range(i) if places[j] is not None and places[j] <= here), default=0)  # type: ignore[operator]
    return max(best) / len(plan)


def plan_distance(plan: Sequence[str], gold: Sequence[str]) -> float:
    """Edit distance of two plans / length of the longer one, in 0 … 1."""
    row = list(range(len(gold) + 1))
    for i, item in enumerate(plan, start=1):
        corner, row[0] = row[0], i
        for j, other in enumerate(gold, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (item != other))
    return row[-1] / max(len(plan), len(gold), 1)


def hallucination(text: str, table: Table, prompts: Iterable[str] = ()) -> float | None:
    """Share of a description's content words that neither the table nor its prompts have; None without such words."""
    known = {word for part in (*table.keys, *table.values, *prompts) for word in words(part)}
    said = content_words(text)
    return sum(word not in known for word in said) / len(said) if said else None


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams / words, averaged over texts: 1/len for a text that repeats one word (n = 1)."""
    shares = []
    for said in map(words, texts):
        grams = {tuple(said[i : i + n]) for i in range(len(said) - n + 1)}
        shares.append(len(grams) / len(said) if said else 0.0)
    return sum(shares) / max(1, len(shares))
