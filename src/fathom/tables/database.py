"""An SQLite file that a model's queries can read but not change.

The connection is read-only, an authorizer allows only SELECT, and a query ends at a limit of work, rows and bytes. Work
is counted in steps of SQLite's virtual machine, so that results do not depend on the computer. A second limit, in
seconds, stops only queries whose single steps take long, such as searches in long texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fathom.tables.schema import Column, Schema, in_words, kind_of

STEPS = 20_000_000  # of the virtual machine, about a second
ROWS = 100_000
SECONDS = 30.0
_BYTES = 100_000  # of one value
_ANSWER_BYTES = 50_000_000  # of all rows, eight for each value and what texts and blobs are long
_EXPLAIN = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*explain\b", re.IGNORECASE | re.DOTALL)
_STRIDE = 100  # steps between two looks at the count
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_UNREADABLE_NOW = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
# What leaves the file, and what writes billions of characters within one step.
_REFUSED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "printf", "format"}


class QueryError(ValueError):
    """The error of a query that did not run to its end, with the message of SQLite or of a limit."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a query: names of its columns, and rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Database:
    """A file, opened for reading. `steps` and `rows` are a query's limits; `schema` says more of it than the file does
    (names in words), and its columns may be in another order.

    Raises FileNotFoundError; ValueError for a file that is no database, is empty, or is locked.
    """

    def __init__(self, path: str | Path, schema: Schema | None = None, steps: int = STEPS, rows: int = ROWS):
        self.path, self.steps, self.rows = Path(path), steps, rows
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such database file")
        if self.path.stat().st_size == 0:
            raise ValueError(f"{path}: an empty file; name a database with tables")
        alone = "&immutable=1" if _at_rest(self.path.resolve()) else ""
        self.connection = connect(f"file:{quote(str(self.path.resolve()))}?mode=ro{alone}")
        try:
            count = self.connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
            self.schema = schema or read_schema(self.connection, self.path.stem)
        except sqlite3.Error as error:
            self.connection.close()
            locked = "locked" in str(error)
            remedy = "another program holds it; close that, or copy the file" if locked else "name an SQLite file"
            if "readonly" in str(error):
                remedy = "what wrote to it last was cut short; open it once with the program sqlite3, which undoes that"
            if self.path.with_name(self.path.name + "-wal").exists():
                remedy = "its write-ahead log is open; copy both to a folder that can be written, or end what writes it"
            raise ValueError(f"{path}: {error}; {remedy}") from error
        if not count:
            self.connection.close()
            raise ValueError(f"{path}: a database without tables; name one that has some")
        guard(self.connection)

    def run(self, sql: str) -> Answer:
        """The result of a query. Raises QueryError if it fails, does anything but read, or exceeds a limit, and OSError
        if the file cannot be read now, as another program holds it: that says nothing of the query."""
        try:
            return run(self.connection, sql, self.steps, self.rows)
        except OSError as error:
            raise OSError(f"{self.path}: {error}; end the program that holds it, or copy the file") from error

    @functools.cache  # noqa: B019  as long as the database is open
    def values(self, column: int) -> tuple[Any, ...]:
        """The distinct values of a column without None; an empty list if the file lacks it or has too many values."""
        found = self.schema.columns[column]
        table = quoted(self.schema.tables[found.table])
        name = f"{table}.{quoted(found.name)}"  # a bare name in quotes would be a text where there is no such column
        try:
            rows = self.run(f"SELECT DISTINCT {name} FROM {table}").rows
        except QueryError:
            return ()
        return tuple(row[0] for row in rows if row[0] is not None)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _at_rest(path: Path) -> bool:
    """Whether the file has a write-ahead log that nobody has open: SQLite would make files beside it to read it."""
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\2\2" and not path.with_name(path.name + "-wal").exists()


def connect(uri: str) -> sqlite3.Connection:
    """A connection that decodes what is no UTF-8 without it, as Spider's databases need."""
    # A BPE that learns from texts with values asks for them in a thread of its own, before the one that opened goes on.
    connection = sqlite3.connect(uri, timeout=0.5, uri=True, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda raw: raw.decode(errors="ignore")
    return connection


def guard(connection: sqlite3.Connection) -> None:
    """Restrict the connection to reading."""
    with contextlib.suppress(sqlite3.Error):  # SQLite makes its tables of JSON at their first use, no sooner
        connection.execute("SELECT * FROM json_each('[]'), json_tree('[]')").fetchall()
    limits = ((sqlite3.SQLITE_LIMIT_LENGTH, _BYTES), (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000))
    for limit, value in (*limits, (sqlite3.SQLITE_LIMIT_ATTACHED, 0), (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 100_000)):
        connection.setlimit(limit, value)

    def authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
        fine = action in _ALLOWED
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
            fine = False
        if action == sqlite3.SQLITE_READ and (first or "").lower().startswith("pragma_"):
            fine = False
        return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)


def run(connection: sqlite3.Connection, sql: str, steps: int = STEPS, rows: int = ROWS) -> Answer:
    """The result of a query on a guarded connection, within the limits. Raises QueryError, or OSError for a file that
    cannot be read now."""
    with _limited(connection, steps) as over:
        try:
            if _EXPLAIN.match(sql):  # the authorizer is not asked, and its rows are SQLite's own
                raise ValueError("not authorized: EXPLAIN")
            cursor = connection.execute(sql)
            names = tuple(column[0] for column in cursor.description or ())
            found, size = [], 0
            for row in cursor:
                size += 8 * len(row) + sum(len(value) for value in row if isinstance(value, str | bytes))
                if size > _ANSWER_BYTES:
                    raise ValueError(f"more than {_ANSWER_BYTES:,} bytes of rows")
                found.append(row)
                if len(found) > rows:
                    break
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNREADABLE_NOW:
                raise OSError(str(error)) from error
            said = over[0] if over else str(error) or type(error).__name__
            raise QueryError(f"{said}: {sql}") from error
    if not names:
        raise QueryError(f"no query: {sql}")
    if len(found) > rows:
        raise QueryError(f"more than {rows:,} rows: {sql}")
    return Answer(names, found)


@contextlib.contextmanager
def _limited(connection: sqlite3.Connection, steps: int) -> Iterator[list[str]]:
    """Interrupt the connection after `steps` steps. The returned list then has an entry."""
    left, over, end = [max(1, steps // _STRIDE)], list[str](), time.monotonic() + SECONDS

    def look() -> int:
        left[0] -= 1
        if left[0] < 0:
            over.append(f"stopped after {steps:,} steps")
        elif time.monotonic() > end:
            over.append(f"stopped after {SECONDS:g} seconds")
        return len(over)

    connection.set_progress_handler(look, _STRIDE)
    try:
        yield over
    finally:
        connection.set_progress_handler(None, 0)


def quoted(name: str) -> str:
    """A name quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _table_info(connection: sqlite3.Connection, table: str) -> list[Any]:
    """SQLite's rows about a table's columns, generated ones among them; none for a virtual table of an extension that
    is not here, which no query can read."""
    try:
        return connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
    except sqlite3.OperationalError as error:
        if "no such module" in str(error):
            return []
        raise


def read_schema(connection: sqlite3.Connection, name: str) -> Schema:
    """The schema of an open file, before it is guarded."""
    listed = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    )
    said = {row[0]: _table_info(connection, row[0]) for row in listed.fetchall()}
    tables = [title for title, found in said.items() if found]
    columns, primary, links = [Column(-1, "*", "*")], [], []
    keys: dict[str, dict[int, str]] = {}  # table → place in its primary key → column
    for table, title in enumerate(tables):
        for _, column, declared, _, _, key, hidden in said[title]:
            if hidden == 1:
                continue
            if key:
                primary.append(len(columns))
                keys.setdefault(title.lower(), {})[key - 1] = column
            columns.append(Column(table, column, in_words(column), kind_of(declared or "")))
        for row in connection.execute(f"PRAGMA foreign_key_list({quoted(title)})").fetchall():
            links.append((title, row[3], row[2], row[4], row[1]))
    schema = Schema(name, tuple(tables), tuple(in_words(t) for t in tables), tuple(columns), frozenset(primary))
    foreign = []
    for table, column, other, target, place in links:
        there = schema.by_name.get(other.lower(), {})
        if target is None:  # the other table's primary key
            target = keys.get(other.lower(), {}).get(place)
        here = schema.by_name[table.lower()].get(column.lower())
        if here is not None and target is not None and target.lower() in there:
            foreign.append((here, there[target.lower()]))
    return dataclasses.replace(schema, foreign=tuple(foreign))
