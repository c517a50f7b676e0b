"""Tables as values, as lines of a file, and as the token ids that a generator reads.

A table of slots is read as

    key is value ; key is value ; ⊕ <content_start> item … ⊕ <context_start> sentence …

the table, the plan and the prototypes (AKG, arXiv 2302.12468), each part cut to a length of its own.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEPARATOR, END, CONTEXT, CONTENT, MASK = "<sep>", "<eos>", "<context_start>", "<content_start>", "<MASK>"
MARKERS = (SEPARATOR, END, CONTEXT, CONTENT, MASK)
T5_PREFIX = "translate Table to Text: "
# Parts of a source, by the number that the column `parts` of an example has for each of its tokens.
TABLE, GOLD_PLAN, PLAN, PROTOTYPES = 0, 1, 2, 3
HIGHLIGHTS, HEADER, BODY, CAPTION, BACKGROUND, PREFIX = 4, 5, 6, 7, 8, 9
_ESCAPES = {"\\": "\\\\", ":": "\\:", "\t": "\\t", "\n": "\\n"}
_UNESCAPES = {escaped[1]: plain for plain, escaped in _ESCAPES.items()}
_WORD = re.compile(r"\w+(?:\.\w+)+\.?|\w+(?:[-'’]\w+)*")
STOP_WORDS = frozenset(re.findall(r"\w+", """
    a about above after again against all am an and any are as at be because been before being below between both
    but by can could did do does doing down during each few for from further had has have having he her here hers
    herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on
    once only or other our ours ourselves out over own same she should so some such than that the their theirs them
    themselves then there these they this those through to too under until up very was we were what when where which
    while who whom why will with would you your yours yourself yourselves
"""))  # fmt: skip


def words(text: str) -> list[str]:
    """Lower-cased words of a text, without punctuation: "New York, U.S." → new, york, u.s."""
    return [found.group().lower() for found in _WORD.finditer(text)]


def content_words(text: str) -> list[str]:
    """Words that are no stop words."""
    return [word for word in words(text) if word not in STOP_WORDS]


@dataclass(frozen=True)
class Table:
    """Slots (key, value) in order. A key that occurs again is numbered: `birth`, `birth_2`.

    Raises ValueError for a table without slots and for a slot without a key.
    """

    slots: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError("table=(): a table needs at least one slot, (key, value)")
        seen: Counter[str] = Counter()
        given = {key for key, _ in self.slots}
        found = []
        for key, value in self.slots:
            if not key.strip():
                raise ValueError(f"table: the slot of value {value!r} has no key; name it")
            seen[key] += 1
            while seen[key] > 1 and f"{key}_{seen[key]}" in given:  # a key of the table's own
                seen[key] += 1
            found.append((key if seen[key] == 1 else f"{key}_{seen[key]}", value))
        object.__setattr__(self, "slots", tuple(found))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.slots)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.slots)

    def moved(self, plan: Sequence[str]) -> Table:
        """The slots of a plan first. Raises ValueError for an item that is no key."""
        check_plan(self, plan)
        held = dict(self.slots)
        return Table((*((key, held[key]) for key in plan), *(slot for slot in self.slots if slot[0] not in plan)))

    def line(self) -> str:
        """One line of a file: `key : value<TAB>key : value`, with ":", tab, line end and backslash escaped."""
        return "\t".join(" : ".join(map(_escape, slot)) for slot in self.slots)

    @classmethod
    def from_line(cls, line: str) -> Table:
        """The inverse of `line`. Raises ValueError for a slot without exactly one bare ":"."""
        found = []
        for part in line.rstrip("\n").split("\t"):
            pieces = re.split(r"(?<!\\)((?:\\\\)*):", part)
            if len(pieces) != 3:
                raise ValueError(
                    f"table slot {part!r}: needs exactly one ':' between key and value; write others as \\:"
                )
            key, value = pieces[0] + pieces[1], pieces[2]
            found.append((_unescape(key.removesuffix(" ")), _unescape(value.removeprefix(" "))))
        return cls(tuple(found))


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _UNESCAPES.get(found.group(1), found.group(0)), text)


@dataclass(frozen=True)
class Grid:
    """A table of rows with its context for a description (CTRLSciTab, arXiv 2312.05402).

    Attributes:
        header: names of the columns.
        rows: the body, every row as long as the header.
        caption: of the table.
        highlights: texts of the cells that the description is about.
        background: sentences that the description may draw on.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    highlights: tuple[str, ...] = ()
    background: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.header or not self.rows:
            raise ValueError("table: it is empty; a table needs a header and at least one row")
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.header):
                raise ValueError(
                    f"table row {number} has {len(row)} cells, the header {len(self.header)}: a ragged table; fill the "
                    "row up or quote its commas"
                )
        known = {cell for row in (self.header, *self.rows) for cell in row}
        for cell in self.highlights:
            if cell not in known:
                raise ValueError(f"highlight={cell!r}: no cell of the table has this text")

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(cell for row in self.rows for cell in row)

    def slots(self) -> Table:
        """As slots: of one row, or of one column, `column: value`; of more, `first cell column: value`. A cell without
        either name is of `column 2`, by its place."""
        places = [f"column {place}" for place in range(1, len(self.header) + 1)]
        if len(self.rows) == 1 or len(self.header) == 1:
            names = [name.strip() or place for name, place in zip(self.header, places, strict=True)]
            return Table(tuple(slot for row in self.rows for slot in zip(names, row, strict=True)))
        return Table(
            tuple(
                (f"{row[0]} {name}".strip() or place, value)
                for row in self.rows
                for name, place, value in zip(self.header[1:], places[1:], row[1:], strict=True)
            )
        )


def read_csv(
    path: str | Path, highlights: Iterable[str] = (), background: Iterable[str] = (), caption: str = ""
) -> Grid:
    """The table of a CSV file, whose first row is the header. Rows and columns without any text are left out:
    spreadsheets end in them.

    Raises FileNotFoundError, or ValueError for an empty or ragged table and for an unknown highlighted cell.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        text = path.read_text("utf-8-sig")
        rows = [tuple(cell.strip() for cell in row) for row in csv.reader(io.StringIO(text))]
        rows = [row for row in rows if any(row)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 ({error}); save it as UTF-8") from None
    except csv.Error as error:
        raise ValueError(
            f"{path}: is no CSV ({error}); a cell has at most {csv.field_size_limit():,} characters"
        ) from None
    if len(rows) < 2:
        raise ValueError(f"{path}: the table is empty; give a header and at least one row")
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if all(len(row) == 1 and mark in row[0] for row in rows):
            raise ValueError(f"{path}: every line is one cell with {name} in it; part its cells with commas")
    if len(set(map(len, rows))) == 1:
        columns = [column for column in zip(*rows, strict=True) if any(column)]
        rows = list(zip(*columns, strict=True))
    try:
        return Grid(rows[0], tuple(rows[1:]), caption, tuple(highlights), tuple(background))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def table_of_row(row: dict[str, Any], where: str) -> Table | Grid:
    """The table of a JSON row: `table` (slots, or a mapping), or `header` and `rows` with more fields of `Grid`."""
    try:
        if "table" in row:
            slots = row["table"].items() if isinstance(row["table"], dict) else row["table"]
            return Table(tuple((str(key), str(value)) for key, value in slots))
        if "header" in row and "rows" in row:
            background = row.get("background", [])
            return Grid(
                tuple(map(str, row["header"])),
                tuple(tuple(map(str, cells)) for cells in row["rows"]),
                str(row.get("caption", "")),
                tuple(map(str, row.get("highlights", []))),
                tuple(sentences(background) if isinstance(background, str) else map(str, background)),
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    raise ValueError(f"{where}: no table: needs a field 'table' of [key, value] pairs, or 'header' and 'rows'")


def references_of_row(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """The descriptions of a row: `references`, or the one `text`. Raises ValueError for a row without any."""
    found = row.get("references", [row["text"]] if row.get("text") else [])
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise ValueError(f"{where}: no description: needs a field 'text', or 'references' with at least one text")
    return tuple(found)


def sentences(text: str) -> list[str]:
    """The sentences of a running text."""
    return [part for part in re.split(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])", text.strip()) if part]


def check_plan(table: Table, plan: Sequence[str]) -> None:
    """Raise ValueError for an item that is no key of the table, or that comes twice."""
    for item in plan:
        if item not in table.keys:
            raise ValueError(f"plan item {item!r}: no key of the table; keys: {', '.join(table.keys)}")
    if len(set(plan)) != len(plan):
        raise ValueError(f"plan={list(plan)!r}: an item comes twice; name every key once")


def slot_text(key: str, value: str) -> str:
    """The text of a slot in a source."""
    return f"{key} is {value} ;"


@dataclass(frozen=True)
class TableLinearizer:
    """Token ids of tables, plans and prototypes for one tokenizer, which must know `MARKERS` (`with_markers`).

    prefix: stands before the table: nothing for BART, `T5_PREFIX` for T5.
    table_tokens, prototype_tokens: most tokens of the table and of each prototype, its marker included.
    plan_tokens, plan_item_tokens: most tokens of a plan, and of each item, its marker included.
    plan_item: what a planned slot is written as, its key, value or both.
    keep_planned_slots: where a table is cut, planned slots come first.
    """

    tokenizer: Any
    prefix: str = ""
    table_tokens: int = 300
    plan_tokens: int = 60
    plan_item_tokens: int = 5
    prototype_tokens: int = 50
    plan_item: str = "key"
    keep_planned_slots: bool = True

    def __post_init__(self) -> None:
        if self.plan_item not in ("key", "value", "key_value"):
            raise ValueError(f'plan_item={self.plan_item!r}: use "key", "value" or "key_value"')

    def ids(self, text: str) -> list[int]:
        """Token ids of a text in which markers are tokens, without special ones at the ends."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Token ids of a user's text, in which markers are ordinary text."""
        return plain_ids(self.tokenizer, text)

    def text(self, table: Table) -> str:
        """The table as a model reads it."""
        return self.prefix + " ".join(slot_text(*slot) for slot in table.slots)

    def table(self, table: Table, plan: Sequence[str] = ()) -> list[int]:
        """Ids of the table, cut on the right; with a plan and `keep_planned_slots`, its slots are not what is cut."""
        ids = self.plain(self.text(table))
        if len(ids) > self.table_tokens and plan and self.keep_planned_slots:
            ids = self.plain(self.text(table.moved(plan)))
        return ids[: self.table_tokens]

    def plan(self, table: Table, plan: Sequence[str]) -> list[int]:
        """Ids of a plan's items. Raises ValueError for an item that is no key of the table."""
        check_plan(table, plan)
        held, marker = dict(table.slots), self.ids(CONTENT)
        texts = {"key": "{0}", "value": "{1}", "key_value": "{0} {1}"}
        items = (texts[self.plan_item].format(key, held[key]) for key in plan)
        ids = [token for item in items for token in [*marker, *self.plain(" " + item)][: self.plan_item_tokens]]
        return ids[: self.plan_tokens]

    def prototypes(self, texts: Iterable[str]) -> list[int]:
        marker = self.ids(CONTEXT)
        return [token for text in texts for token in [*marker, *self.plain(" " + text)][: self.prototype_tokens]]

    def sentences(self, texts: Iterable[str], strip_stopwords: bool, most: int | None) -> list[str]:
        """Background as a source has it: without stop words, and each sentence cut, where asked for."""
        found = list(texts)
        if strip_stopwords:
            found = [" ".join(w for w in text.split() if w.lower().strip(".,;:()") not in STOP_WORDS) for text in found]
        return found if most is None else [self.tokenizer.decode(self.plain(text)[:most]) for text in found]

    def source(self, table: Table, plan: Sequence[str] = (), prototypes: Iterable[str] = ()) -> list[int]:
        """table ⊕ plan ⊕ prototypes."""
        return [*self.table(table, plan), *self.plan(table, plan), *self.prototypes(prototypes)]


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's text, in which markers and special tokens are ordinary text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def with_markers(tokenizer: Any, markers: Sequence[str] = MARKERS) -> Any:
    """The tokenizer with the markers added as tokens."""
    tokenizer.add_tokens([marker for marker in markers if marker not in tokenizer.get_vocab()], special_tokens=True)
    return tokenizer
