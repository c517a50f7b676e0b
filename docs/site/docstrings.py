"""Docstrings as this project writes them, turned into what mkdocstrings reads: several names on one line become a line
each in Google's sections, and lines `name: meaning` outside of these a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = re.compile(r"(\w+(?:, \w+)*):\s+(\S.*)")
SEVERAL = re.compile(r"^    (\w+(?:, \w+)+):((?: .*)?\n(?: {5,}.*\n)*)", re.M)  # an item of a section, to its end


class Docstrings(griffe.Extension):
    """Griffe calls this for every object it reads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(one_name_an_item(obj.docstring.value))


def one_name_an_item(text: str) -> str:
    """`    a, b: meaning` as an item for a and one for b."""
    return SEVERAL.sub(lambda m: "".join(f"    {name}:{m[2]}" for name in m[1].split(", ")), text + "\n").rstrip()


def listed(text: str) -> str:
    """The text with every run of `name: meaning` lines outside the sections of Google's style as a Markdown list."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = NAMES.fullmatch(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found.group(1).split(", "))
            lines += [*([""] if not inside and lines and lines[-1] else []), f"- {names}: {found.group(2)}"]
            inside = True
        elif inside and line.startswith(" "):
            lines.append("    " + line.strip())
        else:
            lines += [*([""] if inside and line else []), line]
            inside = False
    return "\n".join(lines)
