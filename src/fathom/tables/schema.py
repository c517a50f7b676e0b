"""The schema of a database: tables, columns, keys, by their names in the file and by names in words."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gzip
import json
import lzma
import re
import zlib
from pathlib import Path
from typing import Any

STAR = 0  # the first column of every schema, "*"
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NUMBERS = ("INT", "REAL", "FLOA", "DOUB", "NUM", "DEC")


@dataclasses.dataclass(frozen=True)
class Column:
    """One column. table: its number, −1 for "*"; words: its name in words; kind: "text", "number", "time", "boolean" or
    "others", as Spider says it."""

    table: int
    name: str
    words: str
    kind: str = "text"


@dataclasses.dataclass(frozen=True)
class Schema:
    """A database's tables and columns, of which the first is "*".

    Attributes:
        name: of the database.
        tables, table_words: names in the file, and in words.
        primary: numbers of the columns that are primary keys.
        foreign: (column, the column it refers to).
    """

    name: str
    tables: tuple[str, ...]
    table_words: tuple[str, ...]
    columns: tuple[Column, ...]
    primary: frozenset[int] = frozenset()
    foreign: tuple[tuple[int, int], ...] = ()

    def of_table(self, table: int) -> list[int]:
        """Numbers of a table's columns, in order."""
        return self._columns_of[table]

    @functools.cached_property
    def _columns_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.tables]
        for number, column in enumerate(self.columns):
            if column.table >= 0:
                found[column.table].append(number)
        return found

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, int]]:
        """Table → column → its number, in lower case."""
        return {
            name.lower(): {self.columns[number].name.lower(): number for number in self.of_table(table)}
            for table, name in enumerate(self.tables)
        }

    @classmethod
    def from_spider(cls, entry: dict[str, Any]) -> Schema:
        """An entry of Spider's tables.json.

        Some databases list names in words in another order than the file's (store_1): words are then made of the
        file's names, as the official code does by hand.
        """
        tables = tuple(entry["table_names_original"])
        originals, words = entry["column_names_original"], entry["column_names"]
        table_words = entry["table_names"]
        plain = [_plain(name) for name in tables]
        if any(_plain(w) != p and _plain(w) in plain for w, p in zip(table_words, plain, strict=True)):
            table_words, words = [in_words(name) for name in tables], [(t, in_words(name)) for t, name in originals]
        columns = [
            Column(table, name, in_word[1].lower(), kind)
            for (table, name), in_word, kind in zip(originals, words, entry["column_types"], strict=True)
        ]
        primary = frozenset(k for key in entry["primary_keys"] for k in (key if isinstance(key, list) else [key]))
        foreign = tuple((a, b) for a, b in entry["foreign_keys"])
        lower = tuple(name.lower() for name in table_words)
        numbers = {*primary, *(number for pair in foreign for number in pair)}
        if not numbers <= set(range(len(columns))) or not {c.table for c in columns} <= set(range(-1, len(tables))):
            raise ValueError(f"{entry['db_id']}: a key or a column is of a number that there is not")
        names = [(c.table, c.name.lower()) for c in columns] + [(len(tables), name.lower()) for name in tables]
        twice = [name for (_, name), count in collections.Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"{entry['db_id']}: has {twice[0]!r} twice")
        return cls(entry["db_id"], tables, lower, tuple(columns), primary, foreign)


def in_words(name: str) -> str:
    """A file's name in words: "StuID" → "stu id"."""
    return " ".join(_CAMEL.sub(" ", name).replace("_", " ").lower().split())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def kind_of(declared: str) -> str:
    """Spider's kind of a column that a file declares as "VARCHAR(20)"."""
    upper = declared.upper()
    if "BOOL" in upper:
        return "boolean"
    if "DATE" in upper or "TIME" in upper or upper == "YEAR":
        return "time"
    if any(part in upper for part in _NUMBERS):
        return "number"
    return "text" if "CHAR" in upper or "TEXT" in upper or "CLOB" in upper else "others"


def read_schemas(path: str | Path) -> dict[str, Schema]:
    """The schemas of a file like Spider's tables.json, plain, .gz or .xz, by name. Raises OSError or ValueError."""
    text = text_of(Path(path))
    try:
        return {entry["db_id"]: Schema.from_spider(entry) for entry in json.loads(text)}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not a list of schemas as in Spider's tables.json ({error!r})") from error


def text_of(path: Path) -> str:
    """The text of a file, unpacked if its name ends in .gz or .xz. Raises OSError, or ValueError that names it."""
    raw = path.read_bytes()
    try:
        unpack: Any = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix.lower())
        return (unpack(raw) if unpack else raw).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 ({error}); save it as UTF-8") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged or truncated {path.suffix} file ({error})") from None
