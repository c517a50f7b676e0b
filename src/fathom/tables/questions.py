"""Questions with their right queries and databases, and the scores of predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fathom.models.registry import nearest
from fathom.tables.database import Database, QueryError
from fathom.tables.execution import execution_match, runnable
from fathom.tables.relations import Turn
from fathom.tables.schema import Schema, read_schemas, text_of
from fathom.tables.spoken import spoken_turns
from fathom.tables.sql_match import Unreadable, exact_match, hardness, parse

SUFFIXES = (".sqlite", ".db", ".sqlite3")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question, after those that were asked before it.

    Attributes:
        turns: all that was asked, the current question last.
        query: the right query.
        database: its name.
        interaction: number of the dialogue that it is a turn of.
        spoken: what files say about the words of the turns.
    """

    turns: tuple[str, ...]
    query: str
    database: str
    interaction: int = 0
    spoken: tuple[Turn, ...] | None = None


class Databases:
    """The databases of a folder, `NAME.sqlite` or `NAME/NAME.sqlite`, with names in words from a file like Spider's
    tables.json, or from several. A database without a file has only a schema.

    Raises FileNotFoundError for a folder or file that is not there.
    """

    def __init__(self, folder: str | Path | None, schemas: str | Path | Sequence[str | Path] | None = None):
        if folder is None and not schemas:
            raise ValueError(
                "databases=None and schemas=None: name a folder of SQLite files (--db) or a tables.json (--schemas)"
            )
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None and not self.folder.is_dir():
            raise FileNotFoundError(f"databases={str(folder)!r}: no such folder of SQLite files")
        files = [schemas] if isinstance(schemas, str | Path) else schemas or []
        self.described: dict[str, Schema] = {}
        for file in files:
            for name, schema in read_schemas(file).items():
                if self.described.setdefault(name, schema) != schema:
                    raise ValueError(f"{file}: describes {name!r} otherwise than a file of schemas before it; name one")
        self._open: dict[str, Database | None] = {}

    def file(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        places = (place / f"{name}{end}" for end in SUFFIXES for place in (self.folder, self.folder / name))
        return next((path for path in places if path.is_file()), None)

    def open(self, name: str) -> Database | None:
        """The database's file; None: it has none."""
        if name not in self._open:
            path = self.file(name)
            self._open[name] = None if path is None else Database(path, self.described.get(name))
        return self._open[name]

    def schema(self, name: str) -> Schema:
        """The schema of a database. Raises ValueError, with the nearest name, if there is none."""
        database = self.open(name)
        if database is not None:
            return database.schema
        if name in self.described:
            return self.described[name]
        known = [
            *self.described,
            *(p.stem for p in (self.folder.rglob("*") if self.folder else ()) if p.suffix in SUFFIXES),
        ]
        raise ValueError(f"database {name!r} is not there{nearest(name, known)}; {len(known)} are")

    def close(self) -> None:
        for database in self._open.values():
            if database is not None:
                database.close()
        self._open.clear()

    def __enter__(self) -> Databases:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one prediction: whether it matches, returns what it should and runs, and how hard the gold query
    is; `rows`: whose rows it was run on, "the file's" (and a suite's, if there is one) or "made up".
    None: undecidable, as the gold query cannot be read or the database has no file."""

    exact: bool | None
    execution: bool | None
    runs: bool | None
    hardness: str | None
    rows: str | None = None


def verdict(
    predicted: str, question: Question, databases: Databases, suites: Mapping[str, Any] | None = None
) -> Verdict:
    """The verdict on one prediction. suites: further databases, by name, on which results must also be the same."""
    schema, database = databases.schema(question.database), databases.open(question.database)
    try:
        level: str | None = hardness(parse(question.query, schema))
        exact: bool | None = exact_match(predicted, question.query, schema)
    except Unreadable:
        level = exact = None
    more = list((suites or {}).get(question.database, ()))
    files = more if database is None else [database]
    if not files:
        return Verdict(exact, None, None, level)
    try:
        same: bool | None = execution_match(predicted, question.query, files)
    except QueryError:
        same = None
    if same and database is not None and more:
        with contextlib.suppress(QueryError):  # a query of a view runs on the file alone
            same = execution_match(predicted, question.query, more)
    return Verdict(exact, same, _runs(predicted, files[0]), level, "made up" if database is None else "the file's")


def _runs(query: str, database: Database) -> bool:
    try:
        database.run(runnable(query, distinct=True))
    except QueryError:
        return False
    return True


def summary(verdicts: Sequence[Verdict], questions: Sequence[Question]) -> dict[str, Any]:
    """Shares of questions, and of dialogues in which every question is right; None where no share is defined.

    The last dialogue counts, which the official scripts of SParC and CoSQL forget.
    """
    found: dict[str, Any] = {"questions": len(verdicts)}
    for name in ("exact", "execution", "runs"):
        said = [getattr(v, name) for v in verdicts if getattr(v, name) is not None]
        found[name] = sum(said) / len(said) if said else None
        found[f"{name}_of"] = len(said)
    for name in ("exact", "execution"):
        dialogues: dict[int, list[bool]] = {}
        for one, question in zip(verdicts, questions, strict=True):
            if getattr(one, name) is not None:
                dialogues.setdefault(question.interaction, []).append(getattr(one, name))
        right = [all(turns) for turns in dialogues.values()]
        found[f"interaction_{name}"] = sum(right) / len(right) if right else None
    found["by_hardness"] = _parts(verdicts, [one.hardness or "unread" for one in verdicts])
    found["by_rows"] = _parts(verdicts, [one.rows or "none" for one in verdicts])
    found["by_database"] = _parts(verdicts, [question.database for question in questions])
    return found


def _parts(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The shares of each part of the verdicts."""
    parts: dict[str, list[Verdict]] = {}
    for one, name in zip(verdicts, names, strict=True):
        parts.setdefault(name, []).append(one)
    return {
        name: {
            "questions": len(ones),
            "exact": _share([v.exact for v in ones]),
            "execution": _share([v.execution for v in ones]),
        }
        for name, ones in parts.items()
    }


def _share(values: Sequence[bool | None]) -> float | None:
    said = [value for value in values if value is not None]
    return sum(said) / len(said) if said else None


def questions_of(
    row: Mapping[str, Any],
    where: str,
    number: int,
    fields: tuple[str, str, str],
    goals: bool = False,
    coreference: Any = None,
    parses: Any = None,
) -> Iterator[Question]:
    """The questions of row `number`: one, or with "interaction" every turn of a dialogue; with `goals` also its goal,
    which states the dialogue at once and is learned but never scored.

    Raises ValueError that names the row and the field.
    """
    asked, right, database = fields
    dialogue = row.get("interaction") or [{"utterance": row.get(asked), "query": row.get(right)}]
    final = row.get("final", {"utterance": "", "query": ""})
    if not isinstance(dialogue, list) or not all(isinstance(turn, Mapping) for turn in (*dialogue, final)):
        raise ValueError(f"{where}: 'interaction' must be a list of turns, and 'final' one, each with its fields")
    named = {asked: [turn.get("utterance") for turn in dialogue], right: [turn.get("query") for turn in dialogue]}
    for field, texts in {**named, database: [row.get(database)]}.items():
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: no text in field {field!r} (found: {', '.join(row) or 'none'})")
    if not all(isinstance(final.get(field), str) for field in ("utterance", "query")):
        raise ValueError(f"{where}: no text in fields 'utterance' and 'query' of 'final'")
    turns, queries = tuple(named[asked]), named[right]
    spoken = None
    if coreference is not None or parses is not None:
        spoken = spoken_turns(turns, number, coreference, parses)
    for last in range(1, len(turns) + 1):
        said = None if spoken is None else spoken[:last]
        yield Question(turns[:last], queries[last - 1], row[database], number, spoken=said)
    if goals and "final" in row:
        yield Question((final["utterance"],), final["query"], row[database], number)


def read_gold(path: str | Path) -> list[Question]:
    """Right queries of a file: lines `query<TAB>database` with empty lines between dialogues, or rows of JSONL or of a
    JSON list with "query" and "db_id" (or "database_id"), or with "interaction"; plain, .gz or .xz. Raises OSError, or
    ValueError that names the line."""
    path = Path(path)
    if ".json" in path.name:
        found = [
            question
            for number, (row, where) in enumerate(_json_rows(path))
            for question in questions_of({"question": "", **row}, where, number, ("question", "query", _named(row)))
        ]
    else:
        found, dialogue = [], 0
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                dialogue += 1
                continue
            query, tab, database = line.strip().rpartition("\t")
            if not tab:
                raise ValueError(f"{path}, line {number}: must be a query, a tab and the name of its database")
            found.append(Question(("",), query.strip(), database.strip(), dialogue))
        if not dialogue:  # no dialogues: each question is one
            found = [dataclasses.replace(question, interaction=i) for i, question in enumerate(found)]
    if not found:
        raise ValueError(f"{path}: has no queries")
    return found


def _named(row: Mapping[str, Any]) -> str:
    """The field with the name of a row's database: SParC's and CoSQL's files say "database_id"."""
    return "database_id" if "database_id" in row and "db_id" not in row else "db_id"


def read_predicted(path: str | Path, questions: int | None = None) -> list[str]:
    """Predicted queries of a file: one a line (what follows a tab is left out), or JSONL, or a JSON list, with "query".

    Empty lines end dialogues. Where there are as many lines as `questions`, with them, they are predictions of nothing.
    Raises OSError, or ValueError that names the line.
    """
    path = Path(path)
    if ".json" in path.name:
        found = []
        for row, where in _json_rows(path):
            if not isinstance(row.get("query"), str):
                raise ValueError(f"{where}: no text in field 'query' (found: {', '.join(row) or 'none'})")
            found.append(row["query"])
        return found
    lines = _lines(path)
    said = [line for line in lines if line.strip()]
    if len(said) != questions and len(lines) == questions:
        said = lines
    return [line.split("\t")[0].strip() for line in said]


def _lines(path: Path) -> list[str]:
    """The lines of a file, which "\\n" alone ends: others of Unicode's line ends may stand in a query."""
    lines = text_of(path).split("\n")
    return lines if lines[-1] else lines[:-1]


def _json_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a JSONL file or of a JSON list, and where they stand."""
    rows = _jsonl_rows(path) if ".jsonl" in path.name else _list_rows(path)
    for row, where in rows:
        if not isinstance(row, dict):
            raise ValueError(f'{where}: must be an object with fields, as {{"query": …}}')
        yield row, where


def _jsonl_rows(path: Path) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield json.loads(line), where
            except ValueError as error:
                raise ValueError(f"{where}: is no JSON ({error})") from None


def _list_rows(path: Path) -> Iterator[tuple[Any, str]]:
    text = text_of(path)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); rows one a line belong in a file named .jsonl") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: must be a list of objects with fields")
    yield from ((row, f"{path}, row {number}") for number, row in enumerate(rows))
