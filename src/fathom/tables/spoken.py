"""Annotations of the words of questions by other programs, read from files: coreference and parses.

Coreference is RASAT's public layout (`dev_coref.json`): a list with an entry for each row, `{"coref": {chain: {"group":
[mention, …]}}, "text_list": …}`, a mention a list of `{"turn", "position", "ori"}`. Turn 0 is the goal of a dialogue,
or the only question; positions count the words of `text_list`, which are found again by their characters.

Parses are CoNLL-U. `# sent_id = ROW.TURN` before a sentence says whose it is, `ROW.TURN.SENTENCE` where a turn has
several. Their words are those that `fathom.tables.words.split` makes of the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fathom.tables.relations import Turn
from fathom.tables.words import split

Heads = dict[tuple[int, int], tuple[int, ...]]


def spoken_turns(
    turns: Sequence[str], row: int, coreference: Any = None, parses: Heads | None = None
) -> tuple[Turn, ...]:
    """The annotations of a row's turns. Raises ValueError if their words are not the turns'."""
    mentions = mentions_of(coreference, turns, f"coreference of row {row}") if coreference else [()] * len(turns)
    heads = [None if parses is None else parses.get((row, turn)) for turn in range(len(turns))]
    return tuple(Turn(head, tuple(said)) for head, said in zip(heads, mentions, strict=True))


def read_coreference(path: str | Path) -> list[Mapping[str, Any]]:
    """The entries of a file of coreference, one a row. Raises OSError or ValueError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not all(isinstance(entry.get("coref", {}), Mapping) for entry in found):
            raise TypeError("an entry without chains")
        return found
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a list of coreference entries, one a row ({error!r})") from error


def mentions_of(entry: Mapping[str, Any], turns: Sequence[str], where: str) -> list[list[tuple[int, tuple[int, ...]]]]:
    """The mentions of each turn: (chain, numbers of words)."""
    from fathom.tables.source import question_text

    said = str(entry.get("text_list", "")).split()
    chains = [entry["coref"][key]["group"] for key in sorted(entry.get("coref", {}), key=int)]
    named = [_Place(part) for group in chains for mention in group for part in mention]
    goal = int(len(turns) > 1 or any(place.turn for place in named))  # turn 0 is none of ours then
    found: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in turns]
    for chain, group in enumerate(chains):
        for mention in group:
            turn = _Place(mention[0]).turn - goal
            if not 0 <= turn < len(turns):
                continue
            parts = turns[turn].split("|")
            words = set()
            for place in map(_Place, mention):
                before = sum(len(_plain(question_text(part))) for part in parts[: place.part])
                theirs = said[place.start : place.start + place.position + 1]
                words.add(_our_word(theirs, question_text(turns[turn]), before, where))
            found[turn].append((chain, tuple(sorted(words))))
    return found


class _Place:
    """The place of a word in the file's text: its turn, the part of the turn ("2#1": a turn is split at bars), its
    number in the part, and where the part's words begin in the text.
    """

    def __init__(self, part: Mapping[str, Any]):
        turn, _, number = str(part["turn"]).partition("#")
        self.turn, self.part, self.position = int(turn), int(number or 0), int(part["position"])
        self.start = int(part["ori"]) - self.position


def _our_word(theirs: Sequence[str], turn: str, before: int, where: str) -> int:
    """The number of our word with the first character of the last of `theirs`, words whose first begins at character
    `before` of the turn, without spaces."""
    from fathom.tables.source import question_text

    plain = _plain(turn)
    for word in theirs:
        text, last = _plain(question_text(word)), before
        if not text or not plain.startswith(text, before):
            raise ValueError(f"{where}: its text has {word!r} where the question has {plain[before : before + 12]!r}")
        before += len(text)
    place = 0
    for number, ours in enumerate(split(turn)):
        place += len(ours.text)
        if last < place:
            return number
    raise ValueError(f"{where}: names a word behind the question {turn!r}")


def _plain(text: str) -> str:
    return "".join(text.split())


def read_conllu(path: str | Path) -> Heads:
    """(row, turn) → of each word the number of its head, −1 for a root. Raises OSError, or ValueError that names the
    line."""
    found: dict[tuple[int, int], list[int]] = {}
    current: list[int] | None = None
    before = 0
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path}, line {number}"
        name, _, value = line.lstrip("# ").partition("=")
        if line.startswith("#"):
            if name.strip() == "sent_id":
                try:
                    row, turn = map(int, value.strip().split(".")[:2])
                except ValueError:
                    raise ValueError(f"{where}: sent_id={value.strip()!r}: must be ROW.TURN, counted from 0") from None
                current = found.setdefault((row, turn), [])
                before = len(current)
            continue
        if not line.strip():
            continue
        fields = line.split("\t")
        if current is None or len(fields) != 10:
            raise ValueError(f"{where}: needs a word's 10 fields, parted by tabs, after `# sent_id = ROW.TURN`")
        if not fields[0].isdigit():  # several words in one, and words that nobody said
            continue
        if not fields[6].isdigit():
            raise ValueError(f"{where}: the head {fields[6]!r} is no number")
        current.append(int(fields[6]) - 1 + (before if fields[6] != "0" else 0))
    return {key: tuple(heads) for key, heads in found.items()}
