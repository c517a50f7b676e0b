"""Step 3, cleaning: removes lines that are not part of a document's text. Each rule names the lines it removes.

    running heads      a short line that comes again page after page
    page numbers       a line of a number alone
    hyphenation        a word cut at the end of a line is made whole; its two lines become one
    affiliations       addresses, institutes and e-mail before the abstract
    references         a reference list, up to the next heading; citations in the text stay
    acknowledgements   such a section or paragraph

Lines between [START_…] and [END_…] markers (tables, figures, formulas) are left alone.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator

_MARKER = re.compile(r"\[(START|END)_(?:TABLE|FIGURE|FORMULA|NOTE)\]")
_PAGE_NUMBER = re.compile(
    r"(?:page|p\.)?\s*[-–—|]?\s*(?:\d{1,4}|[ivxl]{1,6})\s*[-–—|]?\s*(?:(?:of|/)\s*\d{1,4})?", re.I
)
_NO_HEAD = re.compile(r"[=+<>]|[.:;!?]$")  # formulas and sentences may come again
_DIGITS = re.compile(r"\d+")
_HEADING = re.compile(r"#{1,6} +\S")
_NAMED = r"(?:#{1,6} +)?(?:\d+(?:\.\d+)*\.? +|[IVX]+\. +)?(?:%s)\s*[:.]?"
_REFERENCES = re.compile(
    _NAMED % "references(?: cited)?|bibliography|literature(?: cited)?|works cited|cited works", re.I
)
_THANKS = re.compile(_NAMED % "acknowledge?ments?|acknowledge?ment and funding", re.I)
_THANKS_INLINE = re.compile(r"acknowledge?ments?\s*[:.—–-]\s+\S", re.I)
_OTHER_SECTION = re.compile(
    _NAMED % "appendi(?:x|ces)(?: [a-z0-9])?|supplementary(?: materials?)?|abstract|introduction|conclusions?|"
    "data availability|author contributions", re.I
)  # fmt: skip
_REFERENCE = re.compile(r"\[?\d{1,3}[\].]\s+\S|.*\b(?:1[6-9]|20)\d\d[a-z]?\b|.*\b(?:doi|https?):", re.I)
_ABSTRACT = re.compile(_NAMED % "abstract|summary|introduction", re.I)
_ADDRESS = re.compile(
    r"\S+@\S+\.\w+|\b(?:universit\w*|institut\w*|department|dept\.?|laborator\w*|faculty|school of|college|"
    r"academy of sciences|corresponding author|ORCID)\b", re.I
)  # fmt: skip
_CUT, _CUT_LENGTH = re.compile(r"(\w*[^\W\d_])-$"), 60  # the beginning of a cut word, at most so long
_HEAD_LENGTH, _HEAD_TIMES, _HEAD_APART = 80, 3, 8  # of a running head: characters, how often, lines between
_FRONT_LINES = 60  # that affiliations may stand in, before the abstract

Rule = Callable[[list[str], list[bool]], Iterator[int]]


def clean(text: str, rules: tuple[str, ...]) -> tuple[str, list[tuple[int, str, str]]]:
    """The cleaned text, and the removed lines in order: (number from 1, rule, line).

    A line that hyphenation joins to the one before is listed, too, as its end of line is gone.
    """
    lines = text.split("\n")
    taken: dict[int, str] = {}
    for name in rules:
        if name == "hyphenation":
            continue  # last: of the lines that stay
        blocked = [number in taken or inside for number, inside in enumerate(_marked(lines))]
        for number in RULES[name](lines, blocked):
            if not blocked[number] and lines[number].strip():
                taken.setdefault(number, name)
    kept = [number for number in range(len(lines)) if number not in taken]
    original = {number: lines[number] for number in taken}
    if "hyphenation" in rules:
        for number in _joined(lines, kept):
            taken[number] = "hyphenation"
    if not taken:
        return text, []
    stays = "\n".join(lines[number] for number in kept if taken.get(number) is None)
    removed = [(number + 1, taken[number], original.get(number, lines[number])) for number in sorted(taken)]
    return re.sub(r"\n{3,}", "\n\n", stays).strip(), removed


def _marked(lines: list[str]) -> list[bool]:
    """Whether each line stands in, or has, a marked block."""
    depth, found = 0, []
    for line in lines:
        marks = [kind == "START" for kind in _MARKER.findall(line)] if "[" in line else []
        found.append(depth > 0 or bool(marks))
        for opens in marks:
            depth = max(0, depth + (1 if opens else -1))
    return found


def _running_heads(lines: list[str], blocked: list[bool]) -> Iterator[int]:
    places: dict[str, list[int]] = collections.defaultdict(list)
    for number, line in enumerate(lines):
        said = line.strip()
        short = 3 < len(said) <= _HEAD_LENGTH and " " in said
        if short and not blocked[number] and said[0] not in "#|-*>" and not _NO_HEAD.search(said):
            places[_DIGITS.sub("0", said)].append(number)
    for found in places.values():
        apart = all(b - a >= _HEAD_APART for a, b in itertools.pairwise(found))
        if len(found) >= _HEAD_TIMES and apart:
            yield from found


def _page_numbers(lines: list[str], blocked: list[bool]) -> Iterator[int]:
    for number, line in enumerate(lines):
        if len(line) < 30 and (said := line.strip()) and _PAGE_NUMBER.fullmatch(said):
            yield number


def _affiliations(lines: list[str], blocked: list[bool]) -> Iterator[int]:
    front = next((n for n, line in enumerate(lines[:_FRONT_LINES]) if _ABSTRACT.fullmatch(line.strip())), 0)
    for number in range(front):
        if len(lines[number]) < 300 and not _HEADING.match(lines[number]) and _ADDRESS.search(lines[number]):
            yield number


def _references(lines: list[str], blocked: list[bool]) -> Iterator[int]:
    inside, plain = False, 0
    for number, line in enumerate(lines):
        said = line.strip()
        if _REFERENCES.fullmatch(said):
            inside, plain = True, 0
        elif said and inside:
            plain = 0 if _REFERENCE.match(said) else plain + 1  # entries run over two or three lines
            inside = plain <= 3 and not _HEADING.match(said) and not _OTHER_SECTION.fullmatch(said)
        if inside:
            yield number


def _acknowledgements(lines: list[str], blocked: list[bool]) -> Iterator[int]:
    inside, words = False, 0
    for number, line in enumerate(lines):
        said = line.strip()
        if _THANKS.fullmatch(said):
            inside, words = True, 0
        elif _THANKS_INLINE.match(said):
            yield number
            continue
        elif inside and said:
            ends = _HEADING.match(said) or _REFERENCES.fullmatch(said) or _OTHER_SECTION.fullmatch(said)
            inside = not ends and not (words and not lines[number - 1].strip())  # the paragraph after the heading
            words += inside
        if inside:
            yield number


def _joined(lines: list[str], kept: list[int]) -> Iterator[int]:
    """Make the cut words of `lines` whole in place; the numbers of the lines that are empty afterwards or moved up."""
    seen: set[str] | None = None
    position = 0
    while position + 1 < len(kept):
        number, after = kept[position], kept[position + 1]
        stem = lines[number].rstrip()
        first = _CUT.search(stem[-_CUT_LENGTH:]) if stem.endswith("-") else None
        second = re.match(r"\s*([^\W\d_]+)", lines[after])
        if not (first and second and second[1][0].islower()):
            position += 1
            continue
        if seen is None:
            seen = set(re.findall(r"[\w-]+", "\n".join(lines).lower()))
        compound = f"{first[1]}-{second[1]}".lower() in seen  # written so within a line elsewhere
        keeps = compound and f"{first[1]}{second[1]}".lower() not in seen
        lines[number] = (stem if keeps else stem[:-1]) + lines[after].lstrip()
        yield after
        del kept[position + 1]


RULES: dict[str, Rule] = {
    "references": _references,
    "acknowledgements": _acknowledgements,
    "affiliations": _affiliations,
    "running heads": _running_heads,
    "page numbers": _page_numbers,
}
NAMES = (*RULES, "hyphenation")
