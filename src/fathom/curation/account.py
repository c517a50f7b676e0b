"""The account of a curation: documents and lines read, kept, and dropped, by step and reason.

documents in = kept + Σ dropped       lines in = kept + Σ taken out by rule + those of dropped documents
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections import Counter
from typing import Any

EXAMPLES = 4  # kept of every reason
_EXCERPT = 240  # characters
_BINS = 4  # of lengths, a factor of ten


@dataclasses.dataclass
class Account:
    """Counters of some documents; sums of accounts are accounts."""

    documents: int = 0
    kept: int = 0
    characters: int = 0
    kept_characters: int = 0
    lines: int = 0
    kept_lines: int = 0
    lines_of_dropped: int = 0
    lines_taken: Counter[str] = dataclasses.field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(Counter))
    languages: Counter[str] = dataclasses.field(default_factory=Counter)
    kept_lengths: Counter[int] = dataclasses.field(default_factory=Counter)  # by bin: see `length_bin`
    dropped_lengths: Counter[int] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def read(self, text: str) -> None:
        """Count a document that was read."""
        self.documents += 1
        self.characters += len(text)
        self.lines += line_count(text)

    def drop(self, step: str, reason: str, text: str, where: str, detail: str = "") -> None:
        """Count a dropped document, with the lines that it still has."""
        self.dropped[step][reason] += 1
        self.lines_of_dropped += line_count(text)
        self.dropped_lengths[length_bin(len(text))] += 1
        self.example(f"{step}: {reason}", text, where, detail)

    def keep(self, text: str) -> None:
        """Count a document that is kept."""
        self.kept += 1
        self.kept_characters += len(text)
        self.kept_lines += line_count(text)
        self.kept_lengths[length_bin(len(text))] += 1

    def example(self, of: str, text: str, where: str, detail: str = "") -> None:
        if len(self.examples[of]) < EXAMPLES:
            self.examples[of].append({"where": where, "detail": detail, "excerpt": excerpt(text)})

    def __add__(self, other: Account) -> Account:
        made = Account()
        for field in dataclasses.fields(Account):
            ours, theirs, sums = (getattr(account, field.name) for account in (self, other, made))
            if field.name == "dropped":
                for step, reasons in [*ours.items(), *theirs.items()]:
                    sums[step].update(reasons)
            elif field.name == "examples":
                for of in {**ours, **theirs}:
                    sums[of] = [*ours.get(of, []), *theirs.get(of, [])][:EXAMPLES]
            else:
                setattr(made, field.name, ours + theirs)
        return made

    def check(self) -> None:
        """Raise RuntimeError unless the counters add up."""
        dropped = sum(sum(reasons.values()) for reasons in self.dropped.values())
        if self.documents != self.kept + dropped:
            raise RuntimeError(
                f"the account is wrong: {self.documents} documents in, {self.kept} kept, {dropped} dropped"
            )
        taken = sum(self.lines_taken.values())
        if self.lines != self.kept_lines + taken + self.lines_of_dropped:
            raise RuntimeError(
                f"the account is wrong: {self.lines} lines in, {self.kept_lines} kept, {taken} taken out, "
                f"{self.lines_of_dropped} in dropped documents"
            )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the inverse."""
        made: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "dropped":
                value = {step: dict(reasons) for step, reasons in value.items()}
            elif isinstance(value, Counter):
                value = {str(key): number for key, number in sorted(value.items())}
            made[field.name] = value
        return made

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Account:
        made = cls()
        for name, value in stored.items():
            if name == "dropped":
                made.dropped.update({step: Counter(reasons) for step, reasons in value.items()})
            elif name == "examples":
                made.examples.update(value)
            elif name.endswith("_lengths"):
                setattr(made, name, Counter({int(key): number for key, number in value.items()}))
            else:
                setattr(made, name, Counter(value) if isinstance(value, dict) else value)
        return made


def line_count(text: str) -> int:
    """Lines that are not empty."""
    return sum(1 for line in text.split("\n") if line.strip())


def length_bin(characters: int) -> int:
    """A length lies in [10^(bin/4), 10^((bin+1)/4))."""
    return math.floor(_BINS * math.log10(max(1, characters)))


def bin_start(number: int) -> float:
    """The shortest length of a bin."""
    return 10 ** (number / _BINS)


def excerpt(text: str) -> str:
    """The beginning of a text in one line."""
    return " ".join(text[: 2 * _EXCERPT].split())[:_EXCERPT]
