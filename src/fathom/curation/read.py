"""Reading the raw folder: papers in TEI, rows and plain texts, cut into shards of about equal size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document

from fathom.curation import tei
from fathom.curation.config import Curation
from fathom.data.sources import SUFFIXES, Source, decode, is_table

_READ = 1 << 20
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and halves of pairs, which are not UTF-8


@dataclass(frozen=True)
class Piece:
    """A file, or the lines of a JSONL file that begin in [begin, end) of its bytes; `line` is the first's number."""

    file: str
    begin: int = 0
    end: int | None = None
    line: int = 1


@dataclass(frozen=True)
class Unreadable:
    """A document that cannot be read: its place, and what is wrong with it."""

    id: str
    why: str


def files(raw: Path) -> list[Path]:
    """The files that hold text, in the order they are read. Raises FileNotFoundError or ValueError if there is none."""
    if not raw.exists():
        raise FileNotFoundError(f"{raw}: no such file or folder")
    found = [raw] if raw.is_file() else sorted(file for file in raw.rglob("*") if file.is_file())
    found = [file for file in found if file.name.lower().endswith((*tei.SUFFIXES, *SUFFIXES))]
    if not found:
        raise ValueError(f"{raw}: holds no text; files are read that end in {', '.join((*tei.SUFFIXES, *SUFFIXES))}")
    return found


def shards(raw: Path, size: int) -> list[list[Piece]]:
    """Lists of pieces, of about `size` bytes each. A JSONL file that is not compressed is cut at ends of lines."""
    made: list[list[Piece]] = [[]]
    room = size
    for file in files(raw):
        name, length = str(file.relative_to(raw if raw.is_dir() else raw.parent)), file.stat().st_size
        pieces = _cut(file, name, length, size) if file.name.lower().endswith(".jsonl") else [(Piece(name), length)]
        for piece, taken in pieces:
            if made[-1] and taken > room:
                made.append([])
                room = size
            made[-1].append(piece)
            room -= taken
    return made


def _cut(file: Path, name: str, length: int, size: int) -> Iterator[tuple[Piece, int]]:
    if length <= size:
        yield Piece(name), length
        return
    begin = line = 0
    with file.open("rb") as stream:
        while begin < length:
            lines, left = 0, size
            while left > 0 and (block := stream.read(min(_READ, left))):
                lines += block.count(b"\n")
                left -= len(block)
            rest = stream.readline()  # of the line that the last block ends in
            lines += rest.endswith(b"\n")
            yield Piece(name, begin, stream.tell(), line + 1), stream.tell() - begin
            begin, line = stream.tell(), line + lines


def documents(raw: Path, piece: Piece, config: Curation) -> Iterator[Document | Unreadable]:
    """The documents of a piece, in order. Raises ValueError for rows without the field of the text."""
    file = (raw if raw.is_dir() else raw.parent) / piece.file
    if file.name.lower().endswith(tei.SUFFIXES):
        yield _paper(file, piece.file, config)
    elif is_table(file):
        yield from _rows(file, piece, config)
    else:
        try:
            yield _document(decode(file.read_bytes(), piece.file), piece.file, {})
        except ValueError as error:
            yield Unreadable(piece.file, str(error))


def _document(text: str, name: str, meta: dict[str, Any]) -> Document:
    return Document(text, name, metadata=meta)


def _paper(file: Path, name: str, config: Curation) -> Document | Unreadable:
    try:
        paper = tei.read_tei(file.read_bytes(), name, config.ref_format)
    except ValueError as error:
        return Unreadable(name, str(error))
    meta = {"title": paper.title, "sections": paper.sections, "unresolved_references": paper.unresolved}
    return _document(paper.text, name, meta)


def _rows(file: Path, piece: Piece, config: Curation) -> Iterator[Document | Unreadable]:
    for row, where, why in _ranged(file, piece) if piece.end else _whole(file, piece):
        if why:
            yield Unreadable(where, why)
            continue
        if not isinstance(row, dict) or config.text_field not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where}: no field {config.text_field!r} (found: {found or 'none'}); set text_field")
        text = row[config.text_field]
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: field {config.text_field!r} holds {type(text).__name__}, not text")
        if stray := _NO_TEXT.search(text or ""):
            yield Unreadable(where, f"{where}: {stray[0]!r} at character {stray.start()}, which is no text")
            continue
        others = {key: value for key, value in row.items() if key != config.text_field}
        yield _document(text or "", where, {"row": others} if others else {})


def _whole(file: Path, piece: Piece) -> Iterator[tuple[Any, str, str]]:
    if file.name.lower().endswith(".jsonl"):
        yield from _ranged(file, Piece(piece.file, 0, file.stat().st_size))
        return
    # compressed or Parquet: what is damaged there stops the run
    rows = Source(str(file), argument="RAW").rows(halves=True)
    for number, (row, _) in enumerate(rows, start=1):
        yield row, f"{piece.file}, row {number}", ""


def _ranged(file: Path, piece: Piece) -> Iterator[tuple[Any, str, str]]:
    assert piece.end is not None
    with file.open("rb") as stream:
        stream.seek(piece.begin)
        offset, number = piece.begin, piece.line
        while offset < piece.end:
            line = stream.readline()
            where = f"{piece.file}, line {number}"
            if line.strip():
                try:
                    yield json.loads(decode(line, piece.file, offset, number)), where, ""
                except (json.JSONDecodeError, RecursionError) as error:
                    yield None, where, f"{where}: not JSON ({error})"
                except ValueError as error:
                    yield None, where, str(error)
            offset, number = offset + len(line), number + 1
