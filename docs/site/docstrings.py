"""Docstrings as this project writes them, turned into Markdown: lines `name: meaning` become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = re.compile(r"(\w+(?:, \w+)*):\s+(\S.*)")


class Lists(griffe.Extension):
    """Griffe calls this for every object it reads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


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
